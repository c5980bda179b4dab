"""Tool calls as text: the interface of call syntaxes, shared parsing, typed values, and the Hermes form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from agentrl.data.trajectory import Json, ToolCall, kind_of_json
from agentrl.utils.parsing import TwiceError, is_unbounded, no_twice, refuse_constant
from agentrl.utils.schemas import property_schemas, schema_parts

# The interface of call syntaxes

Parsed = tuple[str, tuple[ToolCall, ...]]
Parser = Callable[[str], Parsed]
"""Function from the text of a turn to (prose, calls). It never raises: text that cannot be parsed is kept unchanged in a call
with `error` set."""


class ForTools:
    """A parser that depends on the tools' schemas; `make` returns the parser for a list of tools."""

    def __init__(self, make: Callable[[Sequence[Mapping[str, Any]]], Parser]) -> None:
        # Cached for equal lists, since building a parser may require reading a whole vocabulary.
        self._make = lru_cache(maxsize=64)(lambda tools: make(json.loads(tools)))

    def bind(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        """Return the parser for these tools."""
        return self._make(json.dumps(tools, default=str))  # order is kept: some parsers use it for unnamed arguments


@dataclass(frozen=True)
class Syntax:
    """A syntax in which models write tool calls.

    name: its value in `model.tool_parser`.
    seen: returns True if a call rendered by a chat template is in this syntax.
    write: returns the text of a turn's calls, for templates that write no calls and leave them to a turn's content.
    asked: returns True if the prompt of such a template asks for this syntax.
    ends: control tokens that end a turn of calls, if another token ends an answer.
    opens: marks before which a turn's text is prose: those that begin a call, and the closing one, which alone is a malformed
        call; empty if calls may begin otherwise.
    close: the mark that ends each call; "" without one.
    """

    name: str
    parser: Parser | ForTools
    seen: Callable[[str], bool]
    write: Callable[[Sequence[ToolCall]], str] | None = None
    asked: Callable[[str], bool] = lambda prompt: False
    ends: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    close: str = ""


# Tool calls in the Hermes / Qwen form: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A malformed call is kept with
# its raw text and the reason, so that the environment can answer it and a reward spec can count it.

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MOST_CALLS = 10_000
"""Most calls in one turn. Two characters may be a call of hundreds of bytes, so 10 MB of them would take a gigabyte."""
MOST_VALUES = 500_000
"""Most values in one JSON text, counted by separators and opening brackets: a value may take 70 times its text in memory."""


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the text outside call blocks (stripped) and a `ToolCall` per block (ids: `call_0`, `call_1`, ...). A block
    that is no valid call has its text in `raw` and the reason in `error`. A string argument may contain the closing tag."""
    return blocks(text, OPEN, CLOSE, partial(_block, text))


def render_tool_calls(calls: Sequence[ToolCall]) -> str:
    """Write calls so that `parse_tool_calls` reads them back. A malformed call is written as sampled."""
    bodies = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False) for call in calls]
    pairs = zip(calls, bodies, strict=True)
    return "\n".join(call.raw if call.arguments is None else f"{OPEN}\n{body}\n{CLOSE}" for call, body in pairs)


def blocks(
    text: str, opening: str | re.Pattern[str], closing: str, read: Callable[[int, str], tuple[list[ToolCall], int]]
) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a turn with calls in blocks into prose and calls. `read(start, call_id)` reads the block that begins with `opening`
    at `start` and returns its calls and the position after it. A `closing` mark outside of blocks is a malformed call: as prose
    it would end the episode without an error for the policy."""
    begins = re.compile(re.escape(opening)) if isinstance(opening, str) else opening
    ends = re.compile(re.escape(closing))
    prose: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    following, stray = begins.search(text), ends.search(text)
    while following or stray:
        if len(calls) >= MOST_CALLS:
            calls.append(overflow_call(text[position:]))
            position = len(text)
            break
        call_id = f"call_{len(calls)}"
        if following and not (stray and stray.start() < following.start()):
            prose.append(text[position : following.start()])
            found, position = read(following.start(), call_id)
            calls += found
            following = begins.search(text, position)
        elif stray:
            prose.append(text[position : stray.start()])
            calls.append(malformed_call(call_id, closing, f"{closing} without the mark that opens a call"))
            position = stray.end()
        if stray and stray.start() < position:
            stray = ends.search(text, position)
    prose.append(text[position:])
    return "".join(prose).strip(), limit_calls(calls)


def closed_blocks(text: str, opening: str, closing: str, read: Callable[[str, str, str], list[ToolCall]]) -> Parsed:
    """Split a turn like `blocks`, for blocks that end at the next `closing` mark (malformed without one).

    `read(body, raw, call_id)` reads the calls of a block.
    """

    def read_block(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        close = text.find(closing, start)
        stop = len(text) if close < 0 else close + len(closing)
        if close < 0:
            return [malformed_call(call_id, text[start:stop], f"no {closing}")], stop
        return read(text[start + len(opening) : close], text[start:stop], call_id), stop

    return blocks(text, opening, closing, read_block)


def call_from_json(value: Json, call_id: str, raw: str, arguments_key: str = "arguments") -> ToolCall:
    """Make a `ToolCall` from a decoded `{"name": str, "arguments": object}`, with `error` set for another value."""
    if not isinstance(value, dict):
        return malformed_call(call_id, raw, f"expected a JSON object, got {kind_of_json(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return malformed_call(call_id, raw, 'expected a non-empty string under "name"')
    if arguments_key not in value:
        return malformed_call(call_id, raw, f'expected an object under "{arguments_key}", which is missing', name)
    arguments = value[arguments_key]
    if not isinstance(arguments, dict):
        error = f'expected an object under "{arguments_key}", got {kind_of_json(arguments)}'
        return malformed_call(call_id, raw, error, name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


def write_call(call: ToolCall) -> dict[str, Json]:
    """Write a call in OpenAI's format."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}


def sendable(call: ToolCall) -> ToolCall:
    """Adapt a call for the history of strict servers: allowed characters in the name, and an object as arguments, which for a
    malformed call contains its text."""
    name = _NOT_IN_NAMES.sub("_", call.name)[:64] or "malformed_call"
    return replace(call, name=name, arguments={"malformed": call.raw} if call.arguments is None else call.arguments)


CUT = "the turn was cut at its limit of tokens (rollout.max_turn_tokens); write a shorter call"


def mark_cut(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Add the token limit to the error of a cut turn's last call, if malformed."""
    if not calls or calls[-1].arguments is not None:
        return tuple(calls)
    return (*calls[:-1], replace(calls[-1], error=f"{CUT}: {calls[-1].error}"))


def malformed_call(call_id: str, raw: str, error: str, name: str = "") -> ToolCall:
    """Make the record of a call that cannot be parsed."""
    return ToolCall(name=name, arguments=None, id=call_id, raw=raw, error=error)


def overflow_call(raw: str) -> ToolCall:
    """Make the malformed call with all text after the first `MOST_CALLS` calls."""
    return malformed_call(f"call_{MOST_CALLS}", raw, f"more than {MOST_CALLS} calls in one turn")


def limit_calls(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Replace the calls beyond `MOST_CALLS` by one malformed call, for syntaxes with lists of calls, whose `raw` is the whole
    list."""
    return tuple(calls) if len(calls) <= MOST_CALLS + 1 else (*calls[:MOST_CALLS], overflow_call(calls[MOST_CALLS].raw))


def strict_json(text: str, start: int = 0) -> tuple[Json, int]:
    """Read a JSON value at `start` (after white space), and return it and the position after it. Raises ValueError for NaN,
    Infinity and other text that is not JSON, a duplicate key, nesting over 64 levels, more than `MOST_VALUES` values,
    numbers beyond the range of a double, and lone surrogates, which no tokenizer can encode."""
    blank = _JSON_BLANK.match(text, start)
    try:
        at = blank.end() if blank else start
        value, end = _DECODER.raw_decode(text, at) if len(text) <= _WINDOW else _decode_long(text, at)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    check_json(value)
    return value, end


def whole_json(text: str) -> Json:
    """Read a text that is one JSON value. Raises ValueError as `strict_json`, and for text after the value."""
    value, end = strict_json(text)
    if text[end:].strip():
        raise ValueError("text after the value")
    return value


def _decode_long(text: str, start: int) -> tuple[Json, int]:
    # A JSON error counts all lines before it, so a long text with many broken calls is read in windows. A value that may be
    # cut by the window's end is read again in a window of twice the size.
    size = _WINDOW
    while True:
        window = text[start : start + size]
        whole = start + size >= len(text)
        if len(window) > MOST_VALUES and sum(map(window.count, ",[{")) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        try:
            value, end = _DECODER.raw_decode(window)
        except json.JSONDecodeError as problem:
            cut = problem.pos > len(window) - _LONGEST_WORD or problem.msg.startswith("Unterminated string")
            if whole or not cut:
                raise ValueError(f"{problem.msg}: char {start + problem.pos}") from None
        else:
            if whole or end < len(window):
                return value, start + end
        size *= 2


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, object_pairs_hook=no_twice)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.:-]")
_WINDOW = 16_384
_LONGEST_WORD = 16  # characters of a token that a window's end may cut: "-Infinity" or an escape
_JSON_BLANK, _BLANK = re.compile(r"[ \t\r\n]*"), re.compile(r"\s*")


# Decoded values are encoded again deeper in the call stack, closer to the recursion limit.
_MAX_DEPTH = 64


def check_json(value: Json) -> None:
    """Raise ValueError if a value could not be written back as JSON in UTF-8."""
    level: list[Json] = [value]  # level by level, since recursion could overflow here too
    for _ in range(_MAX_DEPTH):
        inner: list[Json] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.keys())
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            elif isinstance(item, str):
                try:
                    _ = item.isascii() or item.encode()
                except UnicodeEncodeError:
                    raise ValueError("lone surrogate in a string") from None
            elif is_unbounded(item):
                raise ValueError("a number beyond the range of a double")
        if not inner:
            return
        level = inner
    raise ValueError(f"JSON nested deeper than {_MAX_DEPTH}")


def skip_blanks(text: str, at: int) -> int:
    """Return the first position from `at` on that is not white space, without copying the text."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def broken_call(
    text: str, start: int, marks: tuple[str, str], call_id: str, error: str, name: str = ""
) -> tuple[list[ToolCall], int]:
    """Return the malformed call of the block that opens at `start`, up to its `broken_end`, and the position after it."""
    stop, closed = broken_end(text, start + len(marks[0]), *marks)
    return [malformed_call(call_id, text[start:stop], error if closed else f"no {marks[1]}: {error}", name)], stop


def broken_end(text: str, body: int, opening: str, closing: str) -> tuple[int, bool]:
    """Find the end of a broken block whose body begins at `body`: after its closing mark, before the next opening mark, or at the
    end of the text, whichever is first. Also returns True if there is a closing mark."""
    following = text.find(opening, body)
    limit = following if following >= 0 else len(text)
    # Searched only up to there: otherwise each of many unclosed blocks would scan the whole text.
    close = text.find(closing, body, limit)
    return (close + len(closing), True) if close >= 0 else (limit, False)


def _block(text: str, start: int, call_id: str) -> tuple[list[ToolCall], int]:
    """Read the block that opens at `start`, and return its call and the position after it."""
    body = start + len(OPEN)
    try:
        value, end = strict_json(text, body)
    except ValueError as problem:
        return broken_call(text, start, (OPEN, CLOSE), call_id, f"not valid JSON: {problem}")
    close = skip_blanks(text, end)
    if not text.startswith(CLOSE, close):
        return broken_call(text, start, (OPEN, CLOSE), call_id, f"expected {CLOSE} after the JSON object")
    stop = close + len(CLOSE)
    return [call_from_json(value, call_id, text[start:stop])], stop


# Untyped values, read as the types that the tool declares. The types are tried in the order of vLLM's Qwen3-coder parser, so
# that a model served there gets the same arguments (tests/engines/test_vllm_parsers.py).


def argument_value(text: str, key: str, schema: Mapping[str, Any] | None) -> Json:
    """Read the argument `key` of a call by the tool's parameter schema; without one (None), as JSON if it is valid and no string,
    else as text. Raises TwiceError for an object with a duplicate key."""
    if schema is not None:
        return typed_value(text, {"anyOf": property_schemas(schema_parts(schema, schema), key)}, schema)
    value = _read_as(["JSON"], text)
    return text if isinstance(value, str) else value  # a quoted string keeps its quotes, which may be intended


def typed_value(text: str, schema: Json, root: Mapping[str, Any]) -> Json:
    """Read `text` as the first declared type that fits, in the order of `_KINDS`; else as JSON if valid, else as text, which the
    call's validation rejects. Without a declared type a value is text. `root` resolves references."""
    declared: set[str] = set()
    parts = schema_parts(schema, root)
    for part in parts:
        kinds = part.get("type")
        declared.update([kinds] if isinstance(kinds, str) else [item for item in kinds or () if isinstance(item, str)])
        values = [*(part.get("enum") or ()), *([part["const"]] if "const" in part else ())]
        declared.update(_NAMES[type(value)] for value in values)
    if declared and any(part.get("nullable") is True for part in parts):
        declared.add("null")
    return _read_as([*(kind for kind in _KINDS if kind in declared), *["JSON"] * bool(declared)], text)


def _read_as(kinds: Sequence[str], text: str) -> Json:
    """Read `text` as the first of these JSON types that fits, else as text."""
    word = text.strip().lower()
    for kind in kinds:
        try:
            if kind == "null" and text.lower() == "null":
                return None
            if kind == "integer" and not is_unbounded(whole := int(text)):
                return whole
            if kind == "number" and math.isfinite(value := float(text)):
                if value != int(value):
                    return value
                # A float is not exact for integers beyond 2**53.
                return int(text) if _WHOLE.fullmatch(text) else int(value)
            if kind == "boolean" and word in ("true", "1", "false", "0"):
                return word in ("true", "1")
            if kind in ("object", "array", "JSON"):
                return whole_json(text)
            if kind == "string":
                return text
        except TwiceError:
            raise
        except ValueError:
            continue
    return text


_WHOLE = re.compile(r"\s*[-+]?\d{1,400}\s*")
# In the order of the attempts. "string" fits everything, so it comes last.
_KINDS = ("null", "integer", "number", "boolean", "object", "array", "string")
_NAMES = {
    type(None): "null", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array", str: "string",
}  # fmt: skip
