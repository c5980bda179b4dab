"""`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5, Nemotron 3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.parsers.syntax import ForTools, Parsed, Syntax
from agentrl.render.schema_values import argument_value
from agentrl.render.toolcalls import MOST_CALLS, malformed, too_many
from agentrl.trajectory import Json, ToolCall

_FUNCTION, _FUNCTION_END = re.compile(r"<function=([^>\n]*)>"), "</function>"
_PARAMETER, _PARAMETER_END = re.compile(r"\s*<parameter=([^>\n]*)>\n?"), "</parameter>"


def parse_qwen_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter>...</function></tool_call>`.

    Values in this syntax are untyped. With the tools' schemas a value is read as its declared type (as a string
    if none is declared); without any tools, as JSON if it is valid JSON and as a string otherwise.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    prose: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while (start := text.find("<tool_call>", position)) >= 0:
        prose.append(text[position:start])
        if len(calls) == MOST_CALLS:
            calls.append(too_many(text[start:]))
            position = len(text)
            break
        close = text.find("</tool_call>", start)
        position = len(text) if close < 0 else close + len("</tool_call>")
        raw, call_id = text[start:position], f"call_{len(calls)}"
        body = text[start + len("<tool_call>") : close if close >= 0 else len(text)]
        calls.append(_xml_call(body, raw, call_id, schemas if tools else None, closed=close >= 0))
    prose.append(text[position:])
    return "".join(prose).strip(), tuple(calls)


def _xml_call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None, *, closed: bool) -> ToolCall:
    body = body.strip() if closed else ""
    head = _FUNCTION.match(body)
    if head is None or head.end() > len(body) - len(_FUNCTION_END) or not body.endswith(_FUNCTION_END):
        what = "expected <function=NAME>...</function>" if closed else "no </tool_call>"
        return malformed(call_id, raw, what)
    name, inner = head.group(1).strip(), body[head.end() : len(body) - len(_FUNCTION_END)]
    if not name:
        return malformed(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    position = 0
    # From one to the next, and never by a search: what stands between two parameters would be dropped without a word.
    while (parameter := _PARAMETER.match(inner, position)) is not None:
        end = inner.find(_PARAMETER_END, parameter.end())
        if end < 0:
            break
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
    opens=("<tool_call>",),
    close="</tool_call>",
)
