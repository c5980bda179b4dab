"""Read and validate a reward spec against its JSON Schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jsonschema

from agentrl.data.trajectory import kind_of_json
from agentrl.reward.leaf import FIELDS, LEAVES, SCOPES, object_schema
from agentrl.reward.nodes import AGGREGATES, GROUP_LEAVES
from agentrl.reward.values import COMPARISON_SCHEMA, brief, is_ref, join, parse_pointer
from agentrl.utils.errors import RewardSpecError, did_you_mean, hint_text
from agentrl.utils.files import read_text
from agentrl.utils.parsing import is_unbounded, no_twice, refuse_constant

# JSON Schema of a spec

Schema = dict[str, Any]

VERSION = 1
REDUCES = ("last", "sum", "mean", "min", "all")
_PAIR: Schema = {"type": "array", "prefixItems": [{"type": "number"}, {"type": "number"}], "minItems": 2, "maxItems": 2}
_AT: Schema = {"enum": ["round", "turn", "call"], "description": "pick the element of a list by this index"}
_POINTER: Schema = {"type": "string", "pattern": "^/(task|episode|turn|call)(/|$)"}

_PREDICATE: Schema = {"$ref": "#/$defs/predicate"}
MODS: Schema = {
    "id": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$", "description": "names a metric"},
    "weight": {"type": "number", "description": "factor in a sum or mean"},
    "scale": {**_PAIR, "description": "maps 0 to the first and 1 to the second number"},
    "clip": {**_PAIR, "description": "bounds, applied after scale"},
    "missing": {"enum": ["skip", 0, 1, "invalid"], "description": "what to do if the node could not be scored"},
    "scope": {"enum": list(SCOPES), "description": "evaluate once for each part of this kind"},
    "reduce": {"enum": list(REDUCES), "description": "how the parts become one value (default mean)"},
    "emit": {
        "enum": ["step", "terminal"],
        "description": "reward each part (of calls.match without a scope: each matched call) at its turn, or all at the end",
    },
    "when": _PREDICATE,
}
DEFS: dict[str, Schema] = {
    "ref": {
        "type": "object",
        "description": "A JSON Pointer into task, episode, turn or call.",
        "additionalProperties": False,
        "properties": {"$": _POINTER, "at": _AT},
        "required": ["$"],
    },
    "predicate": {
        "type": "object",
        "description": "A comparison of the value at a pointer, or not / all / any of predicates.",
        "additionalProperties": False,
        "properties": {
            "$": _POINTER,
            "at": _AT,
            **COMPARISON_SCHEMA,
            "not": _PREDICATE,
            "all": {"type": "array", "items": _PREDICATE, "minItems": 1},
            "any": {"type": "array", "items": _PREDICATE, "minItems": 1},
        },
        "oneOf": [
            {"required": ["$"], "minProperties": 2},
            *({"required": [key], "maxProperties": 1} for key in ("not", "all", "any")),
        ],
    },
    "success": {
        "type": "object",
        "description": "The node with this id counts as success from `gte` (default 1) on.",
        "additionalProperties": False,
        "properties": {"id": MODS["id"], "gte": {"type": "number"}},
        "required": ["id"],
    },
}
"""Definitions that schemas of nodes refer to."""
_NODE: Schema = {"$ref": "#/$defs/node"}
_NODE_OR_NUMBER: Schema = {"if": {"type": "number"}, "then": True, "else": _NODE}
_OF: Schema = {"type": "array", "items": _NODE, "minItems": 1}
OP_SCHEMA: Schema = object_schema({"op": {"enum": list(AGGREGATES)}, "of": _OF, **MODS}, ("op", "of"))
_BRANCHES: Schema = {"if": _NODE, "gte": {"type": "number"}, "then": _NODE_OR_NUMBER, "else": _NODE_OR_NUMBER}
GATE_SCHEMA: Schema = object_schema({"op": {"const": "gate"}, **_BRANCHES, **MODS}, ("op", "if", "then"))
SPEC_SCHEMA: Schema = object_schema(
    {
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
        "metrics": {"type": "array", "items": _NODE, "description": "measured, not rewarded; each needs an id"},
    },
    ("agentrl_reward", "name", "root"),
)


def kinds() -> dict[str, Schema]:
    """Map leaf kinds to the JSON Schemas of their `args`."""
    return {kind: leaf.schema for kind, leaf in LEAVES.items()} | {kind: leaf.schema for kind, leaf in GROUP_LEAVES.items()}


def leaf_schema(kind: str, args: Schema) -> Schema:
    """Make the schema of a leaf node of one kind."""
    needed = ("use", "args") if args.get("required") or args.get("oneOf") else ("use",)
    return object_schema({"use": {"const": kind}, "args": args, **MODS}, needed)


def published_schema() -> Schema:
    """Make the schema of whole specs for editors: the content of `rewards/schema.json`."""
    leaves = {kind: leaf_schema(kind, args) for kind, args in kinds().items()}
    choices: list[Schema] = [_when_schema("use", {"const": kind}, {"$ref": f"#/$defs/{kind}"}) for kind in leaves]
    choices.append(_when_schema("op", {"const": "gate"}, {"$ref": "#/$defs/gate"}))
    choices.append(_when_schema("op", {"not": {"const": "gate"}}, {"$ref": "#/$defs/op"}))
    node: Schema = {
        "type": "object",
        "oneOf": [{"required": ["use"]}, {"required": ["op"]}],
        "properties": {"use": {"enum": list(leaves)}, "op": {"enum": [*AGGREGATES, "gate"]}},
        "allOf": choices,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "agentrl reward spec",
        **SPEC_SCHEMA,
        "$defs": {**DEFS, "node": node, "op": OP_SCHEMA, "gate": GATE_SCHEMA, **leaves},
    }


def _when_schema(key: str, test: Schema, then: Schema) -> Schema:
    return {"if": {"required": [key], "properties": {key: test}}, "then": then}


# Read and validate

# Far more than a readable spec needs, and far below Python's recursion limit, since compiling and scoring recurse too.
_MAX_DEPTH = 40


def load_spec(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Load and validate a spec from a JSON file or a dict (which is copied).

    Raises RewardSpecError with the file, the JSON Pointer, the expected value and the nearest valid name. A loaded spec can
    still fail to compile (an invalid regular expression, a function that the run does not allow).
    """
    if not isinstance(source, Mapping | str | Path):
        raise RewardSpecError(f"reward spec: at (the top): a spec must be a JSON object or a path, not {kind_of_json(source)}")
    where = "reward spec" if isinstance(source, Mapping) else str(source)
    if isinstance(source, Mapping) and isinstance(source.get("name"), str):
        where = f"reward spec {source['name']!r}"
    try:
        if isinstance(source, Mapping):
            spec: Any = copy.deepcopy(dict(source))
        else:
            spec = json.loads(read_text(Path(source)), object_pairs_hook=no_twice, parse_constant=refuse_constant)
    except (OSError, UnicodeDecodeError) as error:
        raise RewardSpecError(f"{where}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise RewardSpecError(f"{where}: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise RewardSpecError(f"{where}: {'nested too deeply' if isinstance(error, RecursionError) else error}") from error
    _Check(where).spec(spec)
    return spec  # type: ignore[no-any-return]


class _Check:
    """Validator of a spec, node by node, so that errors name the innermost node."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.ids: dict[str, str] = {}

    def fail(self, pointer: str, message: str) -> NoReturn:
        raise RewardSpecError(f"{self.where}: at {pointer or '(the top)'}: {message}")

    def spec(self, spec: Any) -> None:
        if not isinstance(spec, Mapping):
            self.fail("", f"a reward spec must be a JSON object, not {kind_of_json(spec)}")
        # Before the schemas: NaN passes all their bounds, since no comparison with it is true.
        self._finite(spec, "")
        self._against("spec", spec, "")
        self.node(spec["root"], "/root", 0)
        if "success" in spec and {"use", "op"} & set(spec["success"]):
            self.node(spec["success"], "/success", 0)
        for index, node in enumerate(spec.get("metrics", [])):
            pointer = f"/metrics/{index}"
            self.node(node, pointer, 0)
            if "id" not in node:
                self.fail(pointer, 'a metric needs an "id": the name under which it is logged')

    def node(self, node: Any, pointer: str, depth: int) -> None:
        if not isinstance(node, Mapping):
            self.fail(pointer, f'a node must be an object with "use" or "op", not {kind_of_json(node)}')
        if depth > _MAX_DEPTH:
            self.fail(pointer, f"nested more than {_MAX_DEPTH} nodes deep")
        self._against(self._choice(node, pointer), node, pointer)
        if "clip" in node and node["clip"][0] > node["clip"][1]:
            self.fail(join(pointer, "clip"), f"the lower bound {node['clip'][0]} is above the upper bound {node['clip'][1]}")
        if "id" in node:
            if node["id"] in self.ids:
                self.fail(join(pointer, "id"), f"{node['id']!r} is also the id of {self.ids[node['id']]}")
            self.ids[node["id"]] = pointer
        if "when" in node:
            self._refs(node["when"], join(pointer, "when"))
        args = node.get("args", {})
        if str(node.get("use", "")).startswith("group."):  # its argument is a node and is checked as one
            self.node(args["of"], join(pointer, "args", "of"), depth + 1)
        elif "use" in node:
            self._refs(args, join(pointer, "args"))
        for index, child in enumerate(node.get("of", ())):
            self.node(child, join(pointer, "of", index), depth + 1)
        for key in ("if", "then", "else"):
            # Booleans are numbers in Python; as a branch they go to `node`, which refuses them.
            number = isinstance(node.get(key), (int, float)) and not isinstance(node[key], bool)
            if key in node and (key == "if" or not number):
                self.node(node[key], join(pointer, key), depth + 1)

    def _choice(self, node: Mapping[str, Any], pointer: str) -> str:
        """Return the name of the schema that applies to a node."""
        if ("use" in node) == ("op" in node):
            both = "both" if "use" in node else "neither"
            hints = [(key, did_you_mean(key, ("use", "op"))) for key in node] if both == "neither" else []
            near = next((f" ({key!r}: {hint})" for key, hint in hints if hint), "")
            self.fail(pointer, f'a node has either "use" (a leaf) or "op" (a combinator); this one has {both}{near}')
        key, known = ("use", kinds()) if "use" in node else ("op", [*AGGREGATES, "gate"])
        name = node[key]
        if not isinstance(name, str) or name not in known:
            what = "leaf" if key == "use" else "combinator"
            self.fail(join(pointer, key), f"no {what} {name!r}; {_suggest(name, known)}")
        return name if key == "use" or name == "gate" else "op"

    def _refs(self, value: Any, pointer: str) -> None:
        """Check that references name fields of an episode."""
        if isinstance(value, Mapping):
            # In a `when`, comparisons are next to the "$", so `is_ref` is false for it.
            if "$" in value and (is_ref(value) or "/when" in pointer):
                text, place = value["$"], join(pointer, "$")
                if not isinstance(text, str):
                    self.fail(place, f'a reference must be a string like "/task/gold/answer", not {kind_of_json(text)}')
                try:
                    head, *tail = parse_pointer(text) or ("",)
                except ValueError as error:
                    self.fail(place, str(error))
                if head not in FIELDS:
                    self.fail(place, f"{text!r} starts with {head!r}; {_suggest(head, FIELDS)}")
                if tail and tail[0] not in FIELDS[head]:
                    self.fail(place, f"{head} has no {tail[0]!r}; {_suggest(tail[0], FIELDS[head])}")
            for key, item in value.items():
                near = key[:1] == "$" != key and isinstance(item, str) and item.startswith(tuple(f"/{name}" for name in FIELDS))
                if near or (key == "$" and not is_ref(value) and "/when" not in pointer):
                    self.fail(join(pointer, key), 'it looks like a reference. Write {"$": POINTER}, alone or next to "at"')
                if "$" in value and not is_ref(value) and is_ref(item):
                    self.fail(join(pointer, key), "a comparison takes a value, not a reference")
                self._refs(item, join(pointer, key))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self._refs(item, join(pointer, index))

    def _finite(self, value: Any, pointer: str, depth: int = 0) -> None:
        if depth > 3 * _MAX_DEPTH:
            self.fail(pointer[:200], "nested too deeply")
        if is_unbounded(value):
            self.fail(pointer, f"a number must be finite, and one that a double can hold, not {brief(value)}")
        if isinstance(value, Mapping):
            for key, item in value.items():
                if not isinstance(key, str):
                    self.fail(pointer, f"the key {key!r} is not a string")
                self._finite(item, join(pointer, key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                self._finite(item, join(pointer, index), depth + 1)
        elif value is not None and not isinstance(value, (str, int, float)):
            self.fail(pointer, f"{type(value).__name__} is not a JSON value")

    def _against(self, piece: str, instance: Mapping[str, Any], pointer: str) -> None:
        error = jsonschema.exceptions.best_match(_validator(piece).iter_errors(instance))
        if error is not None:
            self.fail(*_explain_error(error, join(pointer, *error.absolute_path)))


@cache
def _validator(piece: str) -> jsonschema.Draft202012Validator:
    """Build the validator of a node, which accepts any child nodes, since they are checked separately."""
    body = {"spec": SPEC_SCHEMA, "op": OP_SCHEMA, "gate": GATE_SCHEMA}.get(piece) or leaf_schema(piece, kinds()[piece])
    return jsonschema.Draft202012Validator({**body, "$defs": {**DEFS, "node": True}})


def _explain_error(error: jsonschema.ValidationError, place: str) -> tuple[str, str]:
    """Return pointer and readable message of a schema error."""
    rule = error.validator
    found: Any = error.instance
    wanted: Any = error.validator_value
    if rule == "additionalProperties":
        known = error.schema.get("properties", {}) if isinstance(error.schema, Mapping) else {}
        odd = next(key for key in found if key not in known)
        return join(place, odd), f"unknown key {odd!r}; {_suggest(odd, known)}"
    if rule == "required":
        return place, f"{error.message.replace(' is a required property', '')} is missing"
    if rule == "enum":
        return place, f"{found!r} is not allowed; {_suggest(found, list(wanted))}"
    if rule in ("oneOf", "anyOf") and isinstance(wanted, list):
        keys = [" and ".join(option["required"]) for option in wanted if isinstance(option, Mapping) and "required" in option]
        if keys:
            return place, f"needs {'exactly one' if rule == 'oneOf' else 'at least one'} of {', '.join(keys)}"
    if rule == "const":
        return place, f"must be {wanted!r}, not {_short(found)}"
    if rule == "type":
        names = [wanted] if isinstance(wanted, str) else wanted
        expected = " or ".join(f"{'an' if name[0] in 'aio' else 'a'} {name}" for name in names)
        return place, f"must be {expected}, not {kind_of_json(found)}"
    if rule == "pattern" and place.endswith("/$"):
        roots = ("task", "episode", "turn", "call")
        first, *rest = str(found).lstrip("/").split("/")
        hint = hint_text(first, roots, show=lambda name: repr("/" + "/".join([name, *rest])))
        begins = f"/{', /'.join(roots[:-1])} or /{roots[-1]}"
        return place, f"{_short(found)!r} is no pointer of a spec, which begins with {begins}{hint}"
    return place, _short(error.message, 300)


def _short(value: Any, limit: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _suggest(name: Any, known: Iterable[Any]) -> str:
    options = list(known)
    listed = ", ".join("null" if item is None else str(item) for item in options)
    return f"{did_you_mean(name, options)} known: {listed}".lstrip()
