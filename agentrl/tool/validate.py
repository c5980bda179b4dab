"""Checks arguments against a JSON Schema, or against a Python function, and says in one line what is wrong with them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import ValidationError

from agentrl.errors import did_you_mean
from agentrl.schemas import BadSchemaError, check_schema, checked_validator, first_fault
from agentrl.trajectory import Json


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a call: `kind` is stable and short, `message` is for the model to read."""

    kind: str
    message: str


Check = Callable[[Json], Problem | None]


def compile_validator(name: str, parameters: Mapping[str, Json]) -> Check:
    """A function from arguments to the first problem, or None; equal schemas share it. Raises TypeError for a bad schema; the
    function raises TimeoutError if it takes too long, and TooLongError on an event loop (`agentrl.schemas`)."""
    # By content: tools that are made anew for each episode (from an MCP server, or by a wrapper) compile nothing anew.
    safe_schema(name, parameters)
    try:
        return _compiled(json.dumps(parameters))
    except BadSchemaError as problem:
        raise TypeError(f"tool {name}: its parameters are not a valid JSON Schema: {problem}") from problem


def safe_schema(name: str, parameters: Mapping[str, Json]) -> None:
    """Raises TypeError, which names the tool and the place, if its schema could fetch something, never end or fill the memory."""
    try:
        check_schema(parameters)
    except BadSchemaError as problem:
        raise TypeError(f"tool {name}: the schema of its parameters cannot be used, {problem}") from problem


@lru_cache(maxsize=4096)
def _compiled(text: str) -> Check:
    parameters = json.loads(text)
    validator = checked_validator(parameters)
    simple = _simple(parameters)

    def check(arguments: Json) -> Problem | None:
        if simple is not None and _fits(simple, arguments):
            return None
        error = first_fault(validator, arguments)
        return None if error is None else _problem(error, parameters)

    return check


def as_called(function: Callable[..., Any], hidden: Sequence[str] = (), *, method: bool = False) -> Check:
    """A function from arguments to what Python says if `function` does not take them by name, or None. `hidden`: parameters that
    the caller fills in, so that the arguments must not; `method`: the first parameter is filled in as well."""
    # Not what it wraps: the wrapper is what would be called.
    signature = inspect.signature(function, follow_wrapped=False)
    first = (None,) if method else ()
    filled = dict.fromkeys(hidden)
    check_object = as_object(function, hidden)

    def check(arguments: Json) -> Problem | None:
        if problem := check_object(arguments):
            return problem
        try:
            signature.bind(*first, **arguments, **filled)
        except TypeError:
            unknown = arguments.keys() - signature.parameters.keys()
            return Problem(
                "unexpected_argument" if unknown else "missing_argument", _said(function, first, {**arguments, **filled})
            )
        return None

    return check


def _said(function: Callable[..., Any], first: Sequence[Any], arguments: Mapping[str, Any]) -> str:
    """What Python says of a call whose arguments do not fit; nothing of the function runs, since it cannot be entered."""
    try:
        function(*first, **arguments)
    except TypeError as problem:
        return str(problem)
    raise AssertionError(f"{function!r} takes arguments that its signature refuses")


def as_object(function: Callable[..., Any], hidden: Sequence[str] = ()) -> Check:
    """A function from arguments to a problem if they are no object, or name a parameter that is `hidden`."""
    called = getattr(function, "__qualname__", type(function).__name__)

    def check(arguments: Json) -> Problem | None:
        if not isinstance(arguments, dict):
            return Problem("wrong_type", f"expected object, got {_short(arguments)}")
        for name in hidden:
            if name in arguments:
                said = f"{called}() got an unexpected keyword argument {name!r}"
                return Problem("unexpected_argument", said)
        return None

    return check


_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def _simple(parameters: Mapping[str, Json]) -> dict[str, tuple[type, bool]] | None:
    """For a flat schema of plain strings, integers and booleans: name -> (type, required).

    For such a schema valid arguments, the common case, are recognized without the general validator, which is slow.
    """
    known = {"type", "properties", "required", "additionalProperties"}
    if set(parameters) - known or parameters.get("type") != "object":
        return None
    required, properties = parameters.get("required", ()), parameters.get("properties", {})
    if set(required) - set(properties):
        return None
    flat: dict[str, tuple[type, bool]] = {}
    for name, schema in properties.items():
        if not isinstance(schema, dict) or set(schema) - {"type", "description", "default"}:
            return None
        if not isinstance(schema.get("type"), str) or schema["type"] not in _TYPES:
            return None
        flat[name] = (_TYPES[schema["type"]], name in required)
    return flat


def _fits(flat: Mapping[str, tuple[type, bool]], arguments: Json) -> bool:
    if not isinstance(arguments, dict):
        return False
    present = 0
    for name, (kind, required) in flat.items():
        if name in arguments:
            if type(arguments[name]) is not kind:  # not isinstance: true is not an integer in JSON Schema
                return False
            present += 1
        elif required:
            return False
    # If there are others, the general validator decides, since the schema may allow them.
    return present == len(arguments)


def _problem(error: ValidationError, parameters: Mapping[str, Json]) -> Problem:
    place = ".".join(str(part) for part in error.absolute_path)
    prefix = f"{place}: " if place else ""
    if error.validator == "required":
        required: Json = error.validator_value
        present: Json = error.instance
        missing = [name for name in required if name not in present]
        return Problem("missing_argument", f"{prefix}missing argument {missing[0]!r}")
    if error.validator == "additionalProperties":
        schema: Json = error.schema
        instance: Json = error.instance
        known = list(schema.get("properties", {}))
        extra = sorted(set(instance) - set(known))
        return Problem("unexpected_argument", f"{prefix}no argument {extra[0]!r}; {nearest(extra[0], known)}")
    if error.validator == "type":
        expected: Json = error.validator_value
        expected = " or ".join(expected) if isinstance(expected, list) else expected
        return Problem("wrong_type", f"{prefix}expected {expected}, got {_short(error.instance)}")
    return Problem("invalid_argument", f"{prefix}{_clip(error.message)}")


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelled name: the nearest known one, or all of them."""
    return did_you_mean(name, known, f"known: {', '.join(known[:20])}" if known else "there are none")


def _short(value: Json) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    kind = "null" if value is None else kinds.get(type(value), type(value).__name__)
    return kind if value is None else f"{kind} {_clip(repr(value), 40)}"


def _clip(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
