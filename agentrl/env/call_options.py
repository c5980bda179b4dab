"""Tool calls: validation of their arguments, and their options."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from agentrl.data.trajectory import Blame, Json
from agentrl.utils.errors import ConfigError, ToolSchemaError, check_arguments, did_you_mean
from agentrl.utils.parsing import TwiceError, nfc, parts_of
from agentrl.utils.schemas import (
    BadSchemaError,
    check_schema,
    checked_validator,
    fault_words,
    first_fault,
    own_names,
    property_schemas,
    schema_parts,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem with a call: `kind` is a short, stable code, `message` is for the model to read."""

    kind: str
    message: str


Check = Callable[[Json], Problem | None]


def compile_validator(name: str, parameters: Mapping[str, Json]) -> Check:
    """Compile a schema into a function that returns the first problem of arguments, or None. Raises TypeError for a bad schema;
    the function raises TimeoutError if it takes too long, and TooLongError on an event loop (`agentrl.utils.schemas`)."""
    # Cached by content, so that tools made per episode (by an MCP server or a wrapper) compile nothing again.
    safe_schema(name, parameters)
    try:
        kind = parameters.get("type")
        if isinstance(kind, str | list) and "object" not in kind:  # it would refuse every call
            raise BadSchemaError("/type", f"{kind!r} takes no arguments, which are an object", 'write "object"')
        return _compiled_check(json.dumps(parameters))
    except BadSchemaError as problem:
        raise ToolSchemaError(f"tool {name}: its parameters are not a valid JSON Schema: {problem}") from problem


def safe_schema(name: str, parameters: Mapping[str, Json]) -> None:
    """Raise TypeError, naming tool and place, for a schema that may fetch, hang or exhaust memory."""
    try:
        check_schema(parameters)
    except BadSchemaError as problem:
        raise ToolSchemaError(f"tool {name}: the schema of its parameters cannot be used, {problem}") from problem
    for part in parts_of(parameters):
        names = part.get("properties") if isinstance(part, dict) else None
        if isinstance(names, dict) and len(set(map(nfc, names))) < len(names):
            twice = Counter(map(nfc, names)).most_common(1)[0][0]
            raise ToolSchemaError(f"tool {name}: its parameters have {twice!r} in two spellings of Unicode. Rename one")


_TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


@lru_cache(maxsize=4096)
def _compiled_check(text: str) -> Check:
    parameters = json.loads(text)
    validator = checked_validator(parameters)
    # For a flat schema of strings, integers and booleans, valid arguments (the common case) skip the slow general validator,
    # which decides on all others.
    properties, required = parameters.get("properties", {}), set(parameters.get("required", ()))
    kinds = {
        name: _TYPES[schema["type"]]
        for name, schema in properties.items()
        if isinstance(schema, dict) and not set(schema) - {"type", "description", "default"}
        if isinstance(schema.get("type"), str) and schema["type"] in _TYPES
    }
    flat = parameters.get("type") == "object" and not set(parameters) - {"type", "properties", "required", "additionalProperties"}
    simple = flat and len(kinds) == len(properties) and required <= kinds.keys()

    def check(arguments: Json) -> Problem | None:
        if simple and isinstance(arguments, dict) and required.issubset(arguments):
            for name, value in arguments.items():
                if type(value) is not kinds.get(name):  # not isinstance: true is not an integer in JSON Schema
                    break
            else:
                return None
        error = first_fault(validator, arguments)
        if error is None:
            return None
        place = ".".join(str(part) for part in error.absolute_path)
        prefix = f"{place}: " if place else ""
        instance: Json = error.instance
        wanted: Json = error.validator_value
        schema: Json = error.schema
        if error.validator == "required":
            missing = next(name for name in wanted if name not in instance)
            return Problem("missing_argument", f"{prefix}missing argument {missing!r}")
        if error.validator == "additionalProperties":
            known = list(schema.get("properties", {}))
            extra = min(set(instance) - set(known))
            return Problem("unexpected_argument", f"{prefix}no argument {extra!r}; {nearest(extra, known)}")
        if error.validator == "type":
            expected = " or ".join(wanted) if isinstance(wanted, list) else wanted
            return Problem("wrong_type", f"{prefix}expected {expected}, got {_value_text(instance)}")
        return Problem("invalid_argument", f"{prefix}{fault_words(error)}")

    return check


def call_fault(name: str, arguments: Mapping[str, Json], parameters: Mapping[str, Json], *, shown: bool = True) -> str | None:
    """Return the fault of an expected call, or None: arguments that the tool's schema refuses or, with `shown`, does not show to
    the policy."""
    try:
        given = own_names(arguments, parameters)
        wrong = compile_validator(name, parameters)(given)
    except (TimeoutError, TwiceError) as problem:
        return str(problem)
    parts = schema_parts(parameters, parameters)
    hidden = [key for key in given if not property_schemas(parts, key)]
    if shown and wrong is None and hidden:
        known = list(dict.fromkeys(key for part in parts for key in part.get("properties") or ()))
        return f"no argument {hidden[0]!r}; {nearest(hidden[0], known)}"
    return None if wrong is None else wrong.message


def call_check(function: Callable[..., Any], hidden: Sequence[str], *, method: bool, by_python: bool) -> Check:
    """Make a check that refuses non-objects and `hidden` parameters, which the caller fills in; with `by_python` also arguments
    that `function` does not take, in Python's words. `method`: the caller fills in the first parameter."""
    # The signature of the wrapper, not of the wrapped function: the wrapper is called.
    signature = None
    with suppress(ValueError):  # some builtin functions have none
        signature = inspect.signature(function, follow_wrapped=False) if by_python else None
    first = (None,) if method else ()
    filled = dict.fromkeys(hidden)
    called = getattr(function, "__qualname__", type(function).__name__)

    def check(arguments: Json) -> Problem | None:
        if not isinstance(arguments, dict):
            return Problem("wrong_type", f"expected object, got {_value_text(arguments)}")
        for name in hidden:
            if name in arguments:
                return Problem("unexpected_argument", f"{called}() got an unexpected keyword argument {name!r}")
        if signature is None:
            return None
        try:
            signature.bind(*first, **arguments, **filled)
        except TypeError as found:
            unknown, said = arguments.keys() - signature.parameters.keys(), str(found)
            try:
                function(*first, **arguments, **filled)  # for Python's message; the body does not run, since binding fails
            except TypeError as problem:
                said = str(problem)
            return Problem("unexpected_argument" if unknown else "missing_argument", said)
        return None

    return check


def nearest(name: str, known: list[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, or else the first 20 known ones."""
    return did_you_mean(name, known, f"known: {', '.join(known[:20])}" if known else "none are known")


def _value_text(value: Json) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    kind = "null" if value is None else kinds.get(type(value), type(value).__name__)
    said = repr(value)
    return kind if value is None else f"{kind} {said if len(said) <= 40 else said[:37] + '...'}"


# Options of a call

OnTimeout = Literal["stop", "answer"]
Caller = Literal["assistant", "user"]
Strictness = Literal["strict", "lenient", "off"]

MAX_OUTPUT = 2048
"""Default budget of a tool's result, in tokens."""

FIELD = re.compile(r"\{(\w+)\}")
_FIELDS = ("message", "json", "error", "tool")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a tool's calls.

    `timeout` (seconds) and `max_output` (tokens; None: the environment's, `ToolEnv.max_output`) bound every call. `on_timeout`:
    after a timeout, "stop" ends the episode; with "answer" the policy reads an error and continues. `late`: who is responsible
    for a timeout, the "infrastructure" (default with "stop": the episode ends unscored) or the "policy" (default with "answer",
    and right for tools that run the policy's code: with "stop" the episode ends there and is scored).
    `parallel=False` keeps other calls of the turn from overlapping this one. `concurrency` bounds the simultaneous calls in this
    process, over all episodes. `inline` runs a plain function on the event loop instead of in a thread: for functions that take
    microseconds and never wait. `process` runs a plain module function in a child process, which is killed after a timeout: for
    functions that may hang; arguments and result are pickled, and nothing else is shared. `read_only` declares that the call
    changes no state. `by`: the caller, the policy or the environment's simulated user (docs/users.md); each sees only its own
    tools, and the policy is never responsible for a timeout of a user tool.

    `check` selects the argument check (docs/environments.md: "Shown, checked"); the policy always sees the tool's schema.

    `on_error`: "stop" ends the episode unscored if the function raises anything but ToolError; with "answer" the policy reads the
    exception's text, as it always does for ToolError. Default: "stop" if `check` is "strict", else "answer", since unchecked
    arguments make functions raise, and a policy must not escape a bad reward by a wrong argument.

    `error`: the text that the policy reads instead of a result, by default the environment's (`ToolEnv.error_text`). Fields:
    `{message}`, `{json}` (the message as a quoted JSON string), `{error}` (the kind, such as "tool_error") and `{tool}` (the
    tool's name).

    Raises ValueError for another field in braces, and ConfigError for a value of the wrong type or out of range.
    """

    timeout: float = 30.0
    on_timeout: OnTimeout = "stop"
    late: Blame | None = None
    max_output: int | None = None
    parallel: bool = True
    concurrency: int | None = None
    inline: bool = False
    process: bool = False
    read_only: bool = False
    by: Caller = "assistant"
    check: Strictness = "strict"
    on_error: OnTimeout | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        check_arguments(Options, (), given)
        for name in ("timeout", "max_output", "concurrency"):
            if given[name] is not None and not given[name] > 0:
                raise ConfigError(f"Options: {name} = {given[name]!r}; expected more than 0")
        for name in FIELD.findall(self.error or ""):
            if name not in _FIELDS:
                known = ", ".join(f"{{{field}}}" for field in _FIELDS)
                raise ValueError(f"error: {{{name}}} is no field; {did_you_mean(name, _FIELDS, f'known: {known}')}")

    @property
    def policy_late(self) -> bool:
        """True if the policy is responsible for a call that timed out."""
        if self.by == "user":
            return False
        return self.late == "policy" or (self.late is None and self.on_timeout == "answer")


DEFAULT = Options()
