"""`calls.schema` and `calls.none`: whether calls are well-formed, and whether there are any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.reward.leaf import BY, Args, Context, Leaf, Reading, UnscorableError, object_schema
from agentrl.reward.values import brief
from agentrl.reward.view import View
from agentrl.schemas import BadSchemaError, checked_validator, first_fault
from agentrl.trajectory import Json, ToolCall

_VALIDATORS: dict[str, Any] = {}
_MOST_VALIDATORS = 4096


class CallsSchema(Leaf):
    """Share of the calls that name an available tool and match its parameters' JSON Schema."""

    kind: ClassVar[str] = "calls.schema"
    formula: ClassVar[str] = (
        "valid calls / calls (credit=partial), or 1 if all are valid (credit=all); `empty` if there "
        "is no call; check=parse only requires that the arguments are a JSON object"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "check": {"enum": ["schema", "parse"]},
            "credit": {"enum": ["partial", "all"]},
            "empty": {"enum": [0, 1, None]},
            "by": BY,
        }
    )
    example: ClassVar[dict[str, Any]] = {"credit": "all"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("by", "assistant") != "assistant" and args.get("check", "schema") == "schema":
            raise ValueError("the record has the schemas of the policy's tools only; with by: user or both give check: parse")

    def read(self, view: View, args: Args) -> Reading:
        calls = view.made(args.get("by", "assistant"))
        if not calls:
            empty = args.get("empty", 0)
            return Reading(None if empty is None else float(empty), {"calls": 0})
        schemas = _parameters(view) if args.get("check", "schema") == "schema" else None
        # By name within the episode: the key of the common cache takes a dump of the whole schema.
        validators: dict[str, Any] = {}
        errors: list[Json] = []
        for index, made in enumerate(calls):
            fault = _fault(made.call, schemas, validators)
            if fault is not None:
                errors.append({"call": index, "name": made.call.name[:100], "fault": fault})
        valid = len(calls) - len(errors)
        value = valid / len(calls) if args.get("credit", "partial") == "partial" else float(not errors)
        return Reading(value, {"calls": len(calls), "valid": valid, "faults": errors[:20]})


class CallsNone(Leaf):
    """1 if no call was made (or none of the named tools was called)."""

    kind: ClassVar[str] = "calls.none"
    formula: ClassVar[str] = "1 if no call (of `names`, if given) was made, else 0"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"names": {"type": "array", "items": {"type": "string"}, "minItems": 1}, "by": BY}
    )
    example: ClassVar[dict[str, Any]] = {"names": ["delete_account"]}

    def read(self, view: View, args: Args) -> Reading:
        names = args.get("names")
        calls = view.made(args.get("by", "assistant"))
        made = [made.call.name for made in calls if names is None or made.call.name in names]
        return Reading(float(not made), {"made": brief(made)})


def _parameters(view: View) -> dict[str, Json]:
    tools = [tool.get("function") for tool in view.trajectory.tools]
    found = {tool["name"]: tool.get("parameters", {}) for tool in tools if isinstance(tool, Mapping) and "name" in tool}
    if not found:
        raise UnscorableError("the trajectory has no tool schemas")
    return found


def _fault(call: ToolCall, schemas: Mapping[str, Json] | None, validators: dict[str, Any]) -> str | None:
    if call.arguments is None:
        return str(brief(call.error or "malformed"))
    if schemas is None:
        return None
    if call.name not in schemas:
        return "no such tool"
    if call.name not in validators:
        validators[call.name] = _validator(schemas[call.name])
    try:
        error = first_fault(validators[call.name], call.arguments)
    except TimeoutError as late:
        raise UnscorableError(str(late)) from late
    return None if error is None else str(brief(error.message))


def _validator(schema: Json) -> Any:
    """The validator of a schema, cached because building one costs more than most validations."""
    key = json.dumps(schema, sort_keys=True, default=repr)
    if key not in _VALIDATORS:
        # An environment may make up tools for each task; without a bound they would all stay.
        if len(_VALIDATORS) >= _MOST_VALIDATORS:
            _VALIDATORS.clear()
        try:
            _VALIDATORS[key] = checked_validator(schema)
        except BadSchemaError as error:
            raise UnscorableError(f"a tool's parameters are not a JSON Schema: {error}") from error
    return _VALIDATORS[key]
