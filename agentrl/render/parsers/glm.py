"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>...</tool_call>`: GLM-4.5 to 4.7 (4.5 with line breaks)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.parsers.syntax import ForTools, Parsed, Syntax
from agentrl.render.schema_values import argument_value
from agentrl.render.toolcalls import CLOSE, OPEN, blocks, malformed, skip_blanks
from agentrl.trajectory import Json, ToolCall

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Strings are written as they are and all else as JSON, so values are read by the tools' schemas as in `parse_qwen_xml`."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        close = text.find(CLOSE, start)
        stop = len(text) if close < 0 else close + len(CLOSE)
        raw = text[start:stop]
        if close < 0:
            return [malformed(call_id, raw, f"no {CLOSE}")], stop
        return [_call(text[start + len(OPEN) : close], raw, call_id, schemas if tools else None)], stop

    return blocks(text, OPEN, CLOSE, read)


def _call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None) -> ToolCall:
    position = body.find(_KEY) if _KEY in body else len(body)
    name = body[:position].strip()
    if not name or "<" in name or "\n" in name:
        return malformed(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    while (pair := _pair(body, position)) is not None:
        key, value, position = pair
        arguments[key] = argument_value(value, key, schema)
    if body[position:].strip():
        return malformed(call_id, raw, "expected <arg_key>KEY</arg_key> and <arg_value>value</arg_value>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


def _pair(body: str, position: int) -> tuple[str, str, int] | None:
    """Key, value and the position after the pair that begins at `position`; None if there is none. By finds, each of which looks
    at what it takes only: an expression for the pair would look through the rest of the text for every key without a value."""
    begin = skip_blanks(body, position)
    key_end = body.find(_KEY_END, begin) if body.startswith(_KEY, begin) else -1
    if key_end < 0:
        return None
    value = skip_blanks(body, key_end + len(_KEY_END))
    end = body.find(_VALUE_END, value) if body.startswith(_VALUE, value) else -1
    if end < 0:
        return None
    return body[begin + len(_KEY) : key_end].strip(), body[value + len(_VALUE) : end], end + len(_VALUE_END)


GLM = Syntax(
    "glm",
    ForTools(lambda tools: partial(parse_glm, tools=tools)),
    seen=lambda call: "<arg_key>" in call,
    ends=("<|observation|>",),
    opens=(OPEN, CLOSE),
    close=CLOSE,
)
