"""Tool-call syntaxes other than Hermes: Qwen3-coder XML, Llama-3 JSON, Mistral.

Every parser takes the text of a turn, returns (prose, calls) like `parse_tool_calls`, and never raises: text that
cannot be parsed is kept verbatim in a call with `error` set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from agentrl.render.schema_values import typed_value
from agentrl.render.toolcalls import call_from_json, malformed, parse_tool_calls, strict_json
from agentrl.trajectory import Json, ToolCall

Parsed = tuple[str, tuple[ToolCall, ...]]
Parser = Callable[[str], Parsed]


class ForTools:
    """A parser that needs the schemas of the available tools; `make` returns the parser for a list of tools."""

    def __init__(self, make: Callable[[Sequence[Mapping[str, Any]]], Parser]) -> None:
        self._make = make
        self._made: dict[str, Parser] = {}

    def bind(self, tools: Sequence[Mapping[str, Any]]) -> Parser:
        """The parser for these tools, cached for equal lists: building one may mean reading a whole vocabulary."""
        key = json.dumps(tools, sort_keys=True, default=str)
        if key not in self._made:
            if len(self._made) >= _TOOL_LISTS_REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = self._make(tools)
        return self._made[key]


_TOOL_LISTS_REMEMBERED = 64
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


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
        close = text.find("</tool_call>", start)
        position = len(text) if close < 0 else close + len("</tool_call>")
        raw, call_id = text[start:position], f"call_{len(calls)}"
        body = text[start + len("<tool_call>") : close if close >= 0 else len(text)]
        calls.append(_xml_call(body, raw, call_id, schemas if tools else None, closed=close >= 0))
    prose.append(text[position:])
    return "".join(prose).strip(), tuple(calls)


def parse_llama_json(text: str) -> Parsed:
    """`{"name": ..., "parameters": {...}}`, or several separated by `;`, as the whole turn."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not body.startswith("{"):
        return text.strip(), ()
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        call_id = f"call_{len(calls)}"
        try:
            value, end = strict_json(body, position)
        except ValueError as problem:
            # Where the broken one ends is not known, so the rest of the turn goes with it.
            calls.append(malformed(call_id, body[position:], f"not valid JSON: {problem}"))
            break
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        calls.append(call_from_json(value, call_id, body[position:end], key))
        rest = body[end:].lstrip()
        if rest and not rest.startswith(";"):
            calls.append(malformed(f"call_{len(calls)}", rest, "expected ';' between two calls"))
            break
        position = len(body) - len(rest.removeprefix(";").lstrip())
    return "", tuple(calls)


def parse_mistral(text: str) -> Parsed:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]`, or, in newer models,
    `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    prose, mark, body = text.partition(_MISTRAL)
    if not mark:
        return text.strip(), ()
    calls: list[ToolCall] = []
    for piece in body.split(_MISTRAL):
        raw = _MISTRAL + piece
        # Each mark begins a call of its own, so that a broken one does not take the others with it.
        name, args, arguments = piece.partition("[ARGS]")
        call_id = f"call_{len(calls)}"
        try:
            value, end = strict_json(arguments if args else piece)
        except ValueError as problem:
            calls.append(malformed(call_id, raw, f"not valid JSON: {problem}", name.strip() if args else ""))
            continue
        if (arguments if args else piece)[end:].strip():
            calls.append(malformed(call_id, raw, "text after the calls"))
        elif args:
            calls.append(call_from_json({"name": name.strip(), "arguments": value}, call_id, raw))
        elif not isinstance(value, list) or not value:
            calls.append(malformed(call_id, raw, "expected a JSON array of calls"))
        else:
            calls += [_mistral_item(item, f"call_{len(calls) + i}", raw) for i, item in enumerate(value)]
    return prose.strip(), tuple(calls)


QWEN_XML = ForTools(lambda tools: partial(parse_qwen_xml, tools=tools))

PARSERS: dict[str, Parser | ForTools] = {
    "hermes": parse_tool_calls,
    "qwen_xml": QWEN_XML,
    "llama_json": parse_llama_json,
    "mistral": parse_mistral,
}


def parser_for(rendered_call: str) -> str | None:
    """The tool-call syntax of a template, recognized from a call that it rendered; None if it is none of these."""
    # First, because this syntax has <tool_call> around it, too.
    if "<function=" in rendered_call:
        return "qwen_xml"
    if _MISTRAL in rendered_call:
        return "mistral"
    if "<tool_call>" in rendered_call and '"name"' in rendered_call:
        return "hermes"
    return "llama_json" if '"name"' in rendered_call and '"parameters"' in rendered_call else None


def _mistral_item(item: Json, call_id: str, raw: str) -> ToolCall:
    # The id is part of what was sampled, and the template repeats it with the tool's answer.
    sampled_id = item.get("id") if isinstance(item, dict) else None
    return call_from_json(item, sampled_id if isinstance(sampled_id, str) and sampled_id else call_id, raw)


def _xml_call(body: str, raw: str, call_id: str, schemas: Mapping[str, Mapping[str, Any]] | None, *, closed: bool) -> ToolCall:
    match = _FUNCTION.fullmatch(body)
    if match is None or not closed:
        what = "expected <function=NAME>...</function>" if closed else "no </tool_call>"
        return malformed(call_id, raw, what)
    name, inner = match.group(1).strip(), match.group(2)
    if not name:
        return malformed(call_id, raw, "expected a function name")
    schema = None if schemas is None else schemas.get(name, {})
    arguments: dict[str, Json] = {}
    position = 0
    for parameter in _PARAMETER.finditer(inner):
        # What stands between two parameters would be dropped without a word.
        if inner[position : parameter.start()].strip():
            break
        key = parameter.group(1).strip()
        arguments[key] = _xml_value(parameter.group(2), key, schema)
        position = parameter.end()
    if inner[position:].strip():
        return malformed(call_id, raw, "expected <parameter=KEY>value</parameter>", name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


def _xml_value(text: str, key: str, schema: Mapping[str, Any] | None) -> Json:
    if schema is not None:
        return typed_value(text, (schema.get("properties") or {}).get(key), schema)
    try:
        value, end = strict_json(text)
    except ValueError:
        return text
    # A quoted string stays as it was written: the quotes may be meant.
    return text if text[end:].strip() or isinstance(value, str) else value
