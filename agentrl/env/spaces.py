"""Gymnasium spaces of conversations, random values of a JSON Schema, and blocking execution of coroutines."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
from collections.abc import Coroutine, Iterable, Mapping
from re import _constants as sre  # type: ignore[attr-defined]  # the standard library's own parse tree
from re import _parser  # type: ignore[attr-defined]
from typing import Any, TypeVar

import gymnasium
import numpy as np

from agentrl.data.trajectory import Json, Message, as_row, message_of
from agentrl.env.toolbox import Toolbox
from agentrl.utils.schemas import as_2020, resolve_reference
from agentrl.utils.threads import after_fork, background

# Random text of a pattern

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PRINTABLE = "".join(map(chr, range(32, 127)))
_CLASSES = {sre.CATEGORY_DIGIT: "0123456789", sre.CATEGORY_WORD: _LETTERS + "0123456789_", sre.CATEGORY_SPACE: " "}
_CLASSES |= {
    sre.CATEGORY_NOT_DIGIT: _PRINTABLE.translate(dict.fromkeys(map(ord, "0123456789"))),
    sre.CATEGORY_NOT_SPACE: _PRINTABLE[1:],
    sre.CATEGORY_NOT_WORD: "".join(letter for letter in _PRINTABLE if not (letter.isalnum() or letter == "_")),
}
_MORE = 6


class Unsupported(ValueError):
    """The pattern uses an unsupported construct: look-around, a back reference, a flag."""


def sample_pattern(pattern: str, rng: np.random.Generator) -> str:
    """Sample a text in which `pattern` is found (JSON Schema searches: only anchors bind the ends).

    Raises Unsupported if no text was found, and re.error if `pattern` is not a regular expression.
    """
    made = _text(_parser.parse(pattern), rng)
    if re.search(pattern, made) is None:
        raise Unsupported(f"no text found for the pattern {pattern!r}")
    return made


def _text(items: Iterable[tuple[Any, Any]], rng: np.random.Generator) -> str:
    text = ""
    for kind, value in items:
        if kind is sre.LITERAL:
            text += chr(value)
        elif kind is sre.ANY:
            text += _pick(_LETTERS, rng)
        elif kind is sre.NOT_LITERAL:
            text += _pick(_PRINTABLE.replace(chr(value), ""), rng)
        elif kind is sre.IN:
            text += _pick(_members(value), rng)
        elif kind is sre.BRANCH:
            text += _text(value[1][int(rng.integers(len(value[1])))], rng)
        elif kind is sre.SUBPATTERN:
            text += _text(value[3], rng)
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            low, high, inner = value
            times = int(rng.integers(low, min(int(high), low + _MORE) + 1))
            text += "".join(_text(inner, rng) for _ in range(times))
        elif kind is not sre.AT:
            raise Unsupported(f"{kind} in a pattern")
    return text


def _members(items: Iterable[tuple[Any, Any]]) -> str:
    """Return the characters of a class; complements are taken within printable ASCII."""
    chosen: set[str] = set()
    negated = False
    for kind, value in items:
        if kind is sre.NEGATE:
            negated = True
        elif kind is sre.LITERAL:
            chosen.add(chr(value))
        elif kind is sre.RANGE:
            chosen.update(map(chr, range(value[0], min(value[1], value[0] + 255) + 1)))
        elif value in _CLASSES:
            chosen.update(_CLASSES[value])
        else:
            raise Unsupported(f"{value} in a pattern")
    members = sorted(set(_PRINTABLE) - chosen if negated else chosen)
    if not members:
        raise Unsupported("a character class without printable members")
    return "".join(members)


def _pick(letters: str, rng: np.random.Generator) -> str:
    return letters[int(rng.integers(len(letters)))]


# Random values of a schema

_MAX_DEPTH = 6
_TRIES = 20


def sample_arguments(parameters: Mapping[str, Json], rng: np.random.Generator) -> dict[str, Json]:
    """Sample valid arguments from a tool's parameter schema; each optional one has probability 1/2."""
    parameters = as_2020(parameters)
    value = sample_value(parameters, rng, parameters, 0)
    return value if isinstance(value, dict) else {}


def sample_value(schema: Json, rng: np.random.Generator, root: Mapping[str, Json], depth: int = 0) -> Any:
    """Sample a value of `schema`; `root` resolves local references.

    Supports the keywords that typed Python signatures produce (types, enum, const, unions, bounds, lengths,
    references) and patterns without look-around. Other keywords (formats, allOf, not) are ignored.
    """
    if not isinstance(schema, Mapping) or not schema:
        return int(rng.integers(0, 10))
    if schema.get("nullable") is True and (depth > _MAX_DEPTH or rng.integers(4) == 0):
        return None
    if "$ref" in schema:
        return sample_value(resolve_reference(str(schema["$ref"]), root), rng, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    for union in ("anyOf", "oneOf"):
        if union in schema:
            # Too deep, the last branch is taken: for an Optional field of a recursive type it is null, which ends the recursion.
            branches = schema[union]
            return sample_value(branches[-1 if depth > _MAX_DEPTH else int(rng.integers(len(branches)))], rng, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "integer")
    if isinstance(kind, list):
        kind = kind[int(rng.integers(len(kind)))]
    if kind == "null":
        return None
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind in ("integer", "number"):
        return _number(kind, schema, rng)
    if kind == "string":
        return _string(schema, rng)
    return _array(schema, rng, root, depth) if kind == "array" else _object(schema, rng, root, depth)


def _string(schema: Mapping[str, Json], rng: np.random.Generator) -> str:
    """Sample a text that fits pattern and lengths; plain letters if there is no pattern or no attempt fits."""
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    for _ in range(_TRIES if "pattern" in schema else 0):
        try:
            made = sample_pattern(str(schema["pattern"]), rng)
        except (Unsupported, re.error):
            break
        if low <= len(made) and (high is None or len(made) <= int(high)):
            return made
    low = int(schema.get("minLength", 1))
    length = int(rng.integers(low, max(low, min(int(schema.get("maxLength", low + 8)), low + 8)) + 1))
    return "".join(chr(ord("a") + int(letter)) for letter in rng.integers(0, 26, size=length))


def _number(kind: str, schema: Mapping[str, Json], rng: np.random.Generator) -> int | float:
    step = 1 if kind == "integer" else 0
    lows = [schema[key] + by for key, by in (("minimum", 0), ("exclusiveMinimum", step)) if key in schema]
    highs = [schema[key] - by for key, by in (("maximum", 0), ("exclusiveMaximum", step)) if key in schema]
    low = max(lows) if lows else min(highs) - 99 if highs else 0
    high = min(highs) if highs else low + 99
    if multiple := schema.get("multipleOf"):
        first, last = math.ceil(low / multiple), math.floor(max(high, low + multiple) / multiple)
        for _ in range(_TRIES):
            value = _whole_number(first, last, rng) * multiple
            if (value / multiple).is_integer():  # in floating point, 7 * 0.01 is no multiple of 0.01
                break
        return int(value) if kind == "integer" else float(value)
    if kind == "integer":
        return _whole_number(math.ceil(low), math.floor(high), rng)
    value = float(low) + (float(high) - float(low)) * float(rng.uniform(0.01, 0.99))
    short = round(value, 6)
    return short if low < short < high else value


def _whole_number(low: int, high: int, rng: np.random.Generator) -> int:
    """Sample an integer from `low` to `high`, both of any size."""
    return low + int(rng.integers(min(high - low, 2**62) + 1))


def _array(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> list[Any]:
    prefix = schema.get("prefixItems", [])
    low = int(schema.get("minItems", 0))
    high = min(int(schema.get("maxItems", low + 3)), low + 3)
    size = max(len(prefix), low if depth > _MAX_DEPTH else int(rng.integers(low, high + 1)))
    values: list[Any] = []
    for _ in range(size * _TRIES):
        if len(values) == size:
            break
        part = prefix[len(values)] if len(values) < len(prefix) else schema.get("items", {})
        value = sample_value(part, rng, root, depth + 1)
        if not schema.get("uniqueItems") or value not in values:
            values.append(value)
    return values


def _object(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> dict[str, Any]:
    required = set(schema.get("required", ()))
    chosen: dict[str, Any] = {}
    for name, part in schema.get("properties", {}).items():
        if name in required or (depth <= _MAX_DEPTH and rng.integers(2)):
            chosen[name] = sample_value(part, rng, root, depth + 1)
    extra = schema.get("additionalProperties")
    if isinstance(extra, Mapping):
        low = int(schema.get("minProperties", 0))
        high = int(schema.get("maxProperties", max(low, len(chosen)) + 2))
        size = max(low, min(high, len(chosen) + int(rng.integers(3)))) if depth <= _MAX_DEPTH else low
        names = schema.get("propertyNames", {})
        for index in range(size * _TRIES):
            if len(chosen) >= size:
                break
            name = str(sample_value({"type": "string", **names}, rng, root, depth + 1)) if names else f"k{index}"
            chosen.setdefault(name, sample_value(extra, rng, root, depth + 1))
    return chosen


# Gymnasium spaces

Observation = list[Message]
Action = Message | str


class MessagesSpace(gymnasium.Space[Observation]):
    """The space of all lists of messages."""

    is_np_flattenable = False  # type: ignore[assignment]

    def contains(self, x: Any) -> bool:
        return isinstance(x, list) and all(isinstance(item, Message) for item in x)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Observation:
        """Sample one user message of random words."""
        words = self.np_random.integers(0, 1000, size=int(self.np_random.integers(1, 9)))
        return [Message("user", " ".join(f"w{word}" for word in words))]

    def to_jsonable(self, sample_n: Iterable[Observation]) -> list[Any]:
        return [[as_row(message) for message in sample] for sample in sample_n]

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        return [[message_of(row) for row in sample] for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessagesSpace)

    __hash__ = gymnasium.Space.__hash__

    def __repr__(self) -> str:
        return "MessagesSpace()"


class ToolCallSpace(gymnasium.Space[Action]):
    """The space of assistant turns: any text or assistant message, also with malformed calls.

    `sample` returns the text of one schema-valid call, or plain text if there are no tools.
    """

    is_np_flattenable = False  # type: ignore[assignment]

    def __init__(self, toolbox: Toolbox) -> None:
        super().__init__()
        self._toolbox: Toolbox | None = toolbox
        self._frozen: list[dict[str, Json]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Return a pickled state with the schemas but not the functions (AsyncVectorEnv compares pickled spaces)."""
        return {**self.__dict__, "_toolbox": None, "_frozen": self.schemas()}

    def schemas(self) -> list[dict[str, Json]]:
        """Return the function schemas of the tools that are offered now."""
        return self._frozen if self._toolbox is None else self._toolbox.schemas()

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) or (isinstance(x, Message) and x.role == "assistant")

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Action:
        schemas = self.schemas()
        if not schemas:
            return f"w{int(self.np_random.integers(0, 1000))}"
        function = schemas[int(self.np_random.integers(len(schemas)))]["function"]
        arguments = sample_arguments(function["parameters"], self.np_random)
        body = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def to_jsonable(self, sample_n: Iterable[Action]) -> list[Any]:
        return [sample if isinstance(sample, str) else as_row(sample) for sample in sample_n]

    def from_jsonable(self, sample_n: Iterable[Any]) -> list[Any]:
        return [sample if isinstance(sample, str) else message_of(sample) for sample in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ToolCallSpace) and self.schemas() == other.schemas()

    __hash__ = gymnasium.Space.__hash__

    def __repr__(self) -> str:
        return f"ToolCallSpace({', '.join(schema['function']['name'] for schema in self.schemas())})"


# The synchronous interface

T = TypeVar("T")

# A forked child must not poll its parent's file descriptors.
_local = after_fork(threading.local(), lambda held: held.__dict__.clear())


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion on this thread's event loop, which all environments share.

    If a loop already runs in this thread (in a notebook), it blocks while the background loop runs the coroutine. Raises
    RuntimeError in the background loop itself (in a callback or tool): await `astep` there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        loop: asyncio.AbstractEventLoop | None = _local.__dict__.get("held")
        if loop is None or loop.is_closed():
            loop = _local.held = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(work)
        except (KeyboardInterrupt, SystemExit):
            del _local.held  # its tasks would continue in the next call and raise this again
            raise
    held = background()
    if held.here:
        work.close()
        raise RuntimeError("reset() and step() block; inside of agentrl's own event loop await areset() and astep() instead")
    return asyncio.run_coroutine_threadsafe(work, held.loop).result()
