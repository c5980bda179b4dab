"""`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.parsers.syntax import ForTools, Parsed, Syntax
from agentrl.render.schema_values import argument_value
from agentrl.render.toolcalls import CLOSE, OPEN, blocks, malformed, skip_blanks
from agentrl.trajectory import Json, ToolCall

_BEGINS = re.compile("<tool_call>|<function=")
"""The policy may leave out the tag around a function, as both servers allow."""
_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^>\n]*)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"\s*<parameter=([^>\n]*)>\n?"), "</parameter>"


def parse_qwen_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

    Values in this syntax are untyped. With the tools' schemas a value is read as its declared type (as a string
    if none is declared); without any tools, as JSON if it is valid JSON and as a string otherwise.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    known = schemas if tools else None

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        wrapped = text.startswith(OPEN, start)
        mark = CLOSE if wrapped else _FUNCTION_END
        close = text.find(mark, start)
        stop = len(text) if close < 0 else close + len(mark)
        body = text[start + len(OPEN) : close] if wrapped else text[start:stop]
        if not wrapped and text.startswith(CLOSE, end := skip_blanks(text, stop)):
            stop = end + len(CLOSE)
        return [_xml_call(body, text[start:stop], call_id, known, "" if close >= 0 else mark)], stop

    return blocks(text, _BEGINS, CLOSE, read)


def _xml_call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None, missing: str) -> ToolCall:
    body = "" if missing else body.strip()
    head = _FUNCTION.match(body)
    if head is None or head.end() > len(body) - len(_FUNCTION_END) or not body.endswith(_FUNCTION_END):
        return malformed(call_id, raw, f"no {missing}" if missing else "expected <function=NAME>...</function>")
    name, inner = head.group(1).strip(), body[head.end() : len(body) - len(_FUNCTION_END)]
    if not name:
        return malformed(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    position = 0
    # From one to the next, and never by a search: what stands between two parameters would be dropped without a word.
    while (parameter := _PARAMETER.match(inner, position)) is not None:
        end = inner.find(_PARAMETER_END, parameter.end())
        # A value that goes on over the next parameter has lost its end, and the call would be made with a wrong argument.
        if end < 0 or inner.find("<parameter=", parameter.end(), end) >= 0:
            return malformed(call_id, raw, f"no {_PARAMETER_END} after the value of {parameter.group(1).strip()!r}", name)
        key = parameter.group(1).strip()
        arguments[key] = argument_value(inner[parameter.end() : end].removesuffix("\n"), key, schema)
        position = end + len(_PARAMETER_END)
    if inner[position:].strip():
        return malformed(call_id, raw, "expected <parameter=KEY>value</parameter>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


QWEN_XML = Syntax(
    "qwen_xml",
    ForTools(lambda tools: partial(parse_qwen_xml, tools=tools)),
    seen=lambda call: "<function=" in call,
    opens=(OPEN, "<function=", CLOSE),
    close=CLOSE,
)
