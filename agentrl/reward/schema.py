"""The grammar of reward specs as JSON Schema: one schema per kind of node, and the published whole."""

from __future__ import annotations

from typing import Any

from agentrl.reward.group import GROUP_LEAVES
from agentrl.reward.leaves import LEAVES
from agentrl.reward.ops import AGGREGATES
from agentrl.reward.predicate import COMPARISON_SCHEMA
from agentrl.reward.view import SCOPES

Schema = dict[str, Any]

VERSION = 1
REDUCES = ("last", "sum", "mean", "min", "all")
_PAIR: Schema = {
    "type": "array",
    "prefixItems": [{"type": "number"}, {"type": "number"}],
    "minItems": 2,
    "maxItems": 2,
}
_AT: Schema = {"enum": ["round", "turn", "call"], "description": "pick the element of a list by this index"}
_POINTER: Schema = {"type": "string", "pattern": "^/(task|episode|turn|call)(/|$)"}

REF_DEF: Schema = {
    "type": "object",
    "description": "A JSON Pointer into task, episode, turn or call.",
    "additionalProperties": False,
    "properties": {"$": _POINTER, "at": _AT},
    "required": ["$"],
}
PREDICATE_DEF: Schema = {
    "type": "object",
    "description": "A comparison of the value at a pointer, or not / all / any of predicates.",
    "additionalProperties": False,
    "properties": {
        "$": _POINTER,
        "at": _AT,
        **COMPARISON_SCHEMA,
        "not": {"$ref": "#/$defs/predicate"},
        "all": {"type": "array", "items": {"$ref": "#/$defs/predicate"}, "minItems": 1},
        "any": {"type": "array", "items": {"$ref": "#/$defs/predicate"}, "minItems": 1},
    },
    "oneOf": [
        {"required": ["$"], "minProperties": 2},
        {"required": ["not"], "maxProperties": 1},
        {"required": ["all"], "maxProperties": 1},
        {"required": ["any"], "maxProperties": 1},
    ],
}
MODS: Schema = {
    "id": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$", "description": "names a metric"},
    "weight": {"type": "number", "description": "factor in a sum or mean"},
    "scale": {**_PAIR, "description": "maps 0 to the first and 1 to the second number"},
    "clip": {**_PAIR, "description": "bounds, applied after scale"},
    "missing": {
        "enum": ["skip", 0, 1, "invalid"],
        "description": "what to do if the node could not be scored",
    },
    "scope": {"enum": list(SCOPES), "description": "evaluate once for each part of this kind"},
    "reduce": {"enum": list(REDUCES), "description": "how the parts become one value (default mean)"},
    "emit": {
        "enum": ["step", "terminal"],
        "description": "reward each part (of calls.match without a scope: each matched call) at its turn, or all at the end",
    },
    "when": {"$ref": "#/$defs/predicate"},
}
_NODE: Schema = {"$ref": "#/$defs/node"}
_NODE_OR_NUMBER: Schema = {"if": {"type": "number"}, "then": True, "else": _NODE}
OP_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "op": {"enum": list(AGGREGATES)},
        "of": {"type": "array", "items": _NODE, "minItems": 1},
        **MODS,
    },
    "required": ["op", "of"],
}
GATE_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "op": {"const": "gate"},
        "if": _NODE,
        "gte": {"type": "number"},
        "then": _NODE_OR_NUMBER,
        "else": _NODE_OR_NUMBER,
        **MODS,
    },
    "required": ["op", "if", "then"],
}
SUCCESS_DEF: Schema = {
    "type": "object",
    "description": "The node with this id counts as success from `gte` (default 1) on.",
    "additionalProperties": False,
    "properties": {"id": MODS["id"], "gte": {"type": "number"}},
    "required": ["id"],
}
SPEC_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "$schema": {"type": "string"},
        "agentrl_reward": {"const": VERSION, "description": "version of the grammar"},
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "root": _NODE,
        "success": {
            "type": "object",
            "if": {"anyOf": [{"required": ["use"]}, {"required": ["op"]}]},
            "then": _NODE,
            "else": {"$ref": "#/$defs/success"},
            "description": "an episode succeeds if this is 1; without it, see docs/rewards.md",
        },
        "metrics": {
            "type": "array",
            "items": _NODE,
            "description": "measured, not rewarded; each needs an id",
        },
    },
    "required": ["agentrl_reward", "name", "root"],
}


def kinds() -> dict[str, Schema]:
    """Leaf kind -> JSON Schema of its `args`."""
    return {
        **{kind: leaf.schema for kind, leaf in LEAVES.items()},
        **{kind: leaf.schema for kind, leaf in GROUP_LEAVES.items()},
    }


def leaf_schema(kind: str, args: Schema) -> Schema:
    """Schema of a leaf node of one kind."""
    needed = ["use", "args"] if args.get("required") or args.get("oneOf") else ["use"]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {"use": {"const": kind}, "args": args, **MODS},
        "required": needed,
    }


def published_schema() -> Schema:
    """The whole grammar, for editors: the content of `rewards/schema.json`."""
    leaves = {kind: leaf_schema(kind, args) for kind, args in kinds().items()}
    choices: list[Schema] = [_when("use", {"const": kind}, {"$ref": f"#/$defs/{kind}"}) for kind in leaves]
    choices.append(_when("op", {"const": "gate"}, {"$ref": "#/$defs/gate"}))
    choices.append(_when("op", {"not": {"const": "gate"}}, {"$ref": "#/$defs/op"}))
    node: Schema = {
        "type": "object",
        "oneOf": [{"required": ["use"]}, {"required": ["op"]}],
        "properties": {"use": {"enum": list(leaves)}, "op": {"enum": [*AGGREGATES, "gate"]}},
        "allOf": choices,
    }
    definitions = {
        "ref": REF_DEF,
        "predicate": PREDICATE_DEF,
        "success": SUCCESS_DEF,
        "node": node,
        "op": OP_SCHEMA,
        "gate": GATE_SCHEMA,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "agentrl reward spec",
        **SPEC_SCHEMA,
        "$defs": {**definitions, **leaves},
    }


def _when(key: str, test: Schema, then: Schema) -> Schema:
    return {"if": {"required": [key], "properties": {key: test}}, "then": then}
