"""Tool-call syntaxes in JSON, and the table of all syntaxes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl.data.trajectory import Json, ToolCall
from agentrl.render.tagged_syntaxes import FUNCTION_GEMMA, GEMMA, GLM, LFM2, OLMO, PYTHONIC, QWEN_XML
from agentrl.render.tool_calls import (
    CLOSE,
    MOST_CALLS,
    OPEN,
    Parsed,
    Syntax,
    blocks,
    broken_call,
    broken_end,
    call_from_json,
    closed_blocks,
    limit_calls,
    malformed_call,
    overflow_call,
    parse_tool_calls,
    render_tool_calls,
    skip_blanks,
    strict_json,
    whole_json,
)
from agentrl.utils.parsing import put_once

# DeepSeek

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_LIST_MARKS = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_FENCE, _FENCE_END = "\n```json\n", "```"


def parse_deepseek(text: str) -> Parsed:
    """Parse `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, or `function<｜tool▁sep｜>NAME` and the arguments
    in a ```json fence, per call; the tokens around all calls are dropped."""

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        begin = start + len(_BEGIN)
        following = text.find(_BEGIN, begin)
        limit = following if following >= 0 else len(text)
        try:
            separator = text.find(_SEP, begin, limit)
            if separator < 0:
                raise ValueError(f"expected {_SEP}")
            name, begin = text[begin:separator].strip(), separator + len(_SEP)
            line = text.find("\n", begin, limit)
            fenced = line >= 0 and text.startswith(_FENCE, line)
            if fenced:
                name, begin = text[begin:line].strip(), line + len(_FENCE)
            try:
                value, end = strict_json(text, begin)
            except ValueError as problem:
                raise ValueError(f"not valid JSON: {problem}") from None
            end = skip_blanks(text, end)
            if fenced and not text.startswith(_FENCE_END, end):
                raise ValueError("expected ``` after the arguments")
            end = skip_blanks(text, end + len(_FENCE_END)) if fenced else end
            if not text.startswith(_END, end):
                raise ValueError(f"expected {_END} after the arguments")
        except ValueError as problem:
            return broken_call(text, start, (_BEGIN, _END), call_id, str(problem))
        stop = end + len(_END)
        return [call_from_json({"name": name, "arguments": value}, call_id, text[start:stop])], stop

    prose, calls = blocks(text, _BEGIN, _END, read)
    return (_LIST_MARKS.sub("", prose).strip() if calls else prose), calls


DEEPSEEK = Syntax("deepseek", parse_deepseek, seen=lambda call: _BEGIN in call)

_DSML = "｜DSML｜"
_BLOCK, _BLOCK_END = (f"<{slash}{_DSML}function_calls>" for slash in ("", "/"))
_INVOKE = re.compile(rf'\s*<{_DSML}invoke name="([^"\n]*)">(.*?)</{_DSML}invoke>', re.DOTALL)
_VALUE = rf"((?:(?!<{_DSML}parameter ).)*?)</{_DSML}parameter>"  # up to its own end mark
_PARAMETER = re.compile(rf'\s*<{_DSML}parameter name="([^"\n]*)" string="(true|false)">{_VALUE}', re.DOTALL)


def parse_dsml(text: str) -> Parsed:
    """Parse `<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</...>...`; a parameter
    with `string="false"` is JSON."""

    def read(body: str, raw: str, call_id: str) -> list[ToolCall]:
        first, position = int(call_id.removeprefix("call_")), 0
        calls: list[ToolCall] = []
        while len(calls) <= MOST_CALLS and (invoke := _INVOKE.match(body, position)) is not None:
            calls.append(_invoke(invoke, f"call_{first + len(calls)}"))
            position = invoke.end()
        if len(calls) > MOST_CALLS:
            return [*calls, overflow_call(raw)]
        if not calls or body[position:].strip():
            return [malformed_call(call_id, raw, "expected <invoke name=...> and nothing else")]
        return calls

    return closed_blocks(text, _BLOCK, _BLOCK_END, read)


def _invoke(invoke: re.Match[str], call_id: str) -> ToolCall:
    raw, name, body = invoke.group(0).strip(), invoke.group(1), invoke.group(2)
    if not name:
        return malformed_call(call_id, raw, "expected a function name")
    arguments: dict[str, Json] = {}
    position = 0
    while (item := _PARAMETER.match(body, position)) is not None:
        key, is_string, text = item.groups()
        try:
            put_once(arguments, key, text if is_string == "true" else whole_json(text))
        except ValueError as problem:
            return malformed_call(call_id, raw, f"{key} is not valid JSON: {problem}", name)
        position = item.end()
    if body[position:].strip():
        return malformed_call(call_id, raw, 'expected <parameter name="KEY" string="true|false">', name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


DSML = Syntax("deepseek_dsml", parse_dsml, seen=lambda call: _BLOCK in call, opens=(_BLOCK, _BLOCK_END))


# The harmony format of gpt-oss: a turn is a sequence of messages on channels, and a call is a message to a function.
#
# <|channel|>analysis<|message|>thoughts<|end|>
# <|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"key": "a"}<|call|>
#
# or, after all calls, `<|start|>assistant<|channel|>final<|message|>the answer<|return|>`. Analysis is the reasoning; `final`,
# and commentary without a recipient, are the content. (https://cookbook.openai.com/articles/openai-harmony)

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_ROLE = re.compile(r"^(?:<\|start\|>)?\s*(?:assistant)?")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")


def harmony_parts(text: str) -> tuple[str | None, str, tuple[ToolCall, ...]]:
    """Split a turn, which begins after `<|start|>assistant`, into (reasoning, content, calls).

    A message to a function whose body is no JSON object becomes a call with `error`; so does a message to another recipient, and
    a turn that was cut within a call. Text without a header is content.
    """
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    while position < len(text):
        end = _ENDS.search(text, position)
        piece = text[position : end.start() if end else len(text)]
        raw = text[position : end.end() if end else len(text)]
        position += len(raw)
        header, mark, body = piece.partition(_MESSAGE)
        header = _ROLE.sub("", header, count=1)
        channel, to = _CHANNEL.search(header), _RECIPIENT.search(header)
        if to is not None and len(calls) == MOST_CALLS:
            calls.append(overflow_call(text[position - len(raw) :]))
            break
        if to is not None:
            calls.append(_read_harmony_call(to.group(1), body, raw, f"call_{len(calls)}", bool(mark), end is not None))
        elif not mark and channel is None:
            said.append(header)
        elif channel is not None and channel.group(1) == "analysis":
            thoughts.append(body)
        else:
            said.append(body)
    return ("\n".join(thoughts) if thoughts else None), "".join(said).strip(), tuple(calls)


def _read_harmony_call(to: str, body: str, raw: str, call_id: str, has_body: bool, closed: bool) -> ToolCall:
    name = to.removeprefix("functions.")
    if not name or not to.startswith("functions."):
        return malformed_call(call_id, raw, f"a message to {to!r}, which is not functions.NAME")
    if not has_body or not closed:
        return malformed_call(call_id, raw, "the call was cut", name)
    try:
        value, end = strict_json(body)
    except ValueError as problem:
        return malformed_call(call_id, raw, f"not valid JSON: {problem}", name)
    if body[end:].strip():
        return malformed_call(call_id, raw, "text after the arguments", name)
    return call_from_json({"name": name, "arguments": value}, call_id, raw)


HARMONY = Syntax(
    "harmony",
    lambda text: harmony_parts(text)[1:],
    seen=lambda call: "<|channel|>commentary" in call and "to=functions." in call,
    ends=("<|call|>",),
)


# Granite and Phi

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"
_BEGINS = re.compile(r"<\|tool_call\|>|<tool_call>(?=\s*[\[{])")
"""Granite writes the mark as a token or as a plain tag, which it sometimes closes."""
_BEGINS_JSON = re.compile(r"\s*[\[{]")
_LIST_ENDS = re.compile(r"\s*(?:<\|/tool_call\|>|</tool_call>)")


def parse_listed(text: str) -> Parsed:
    """Parse `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, or one object, with or without `<|/tool_call|>`."""

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        body = text.index(">", start) + 1
        try:
            try:
                value, end = strict_json(text, body)
            except ValueError as problem:
                raise ValueError(f"not valid JSON: {problem}") from None
            closing = _LIST_ENDS.match(text, end)
            if closing is None and _BEGINS_JSON.match(text, end):
                raise ValueError("another call behind the list; write all of them in one list")
        except ValueError as problem:  # its end is unknown: at the closing tag, before the next opening one, or at the turn's end
            stop, _ = broken_end(text, body, _OPEN, _CLOSE)
            return [malformed_call(call_id, text[start:stop], str(problem))], stop
        stop = closing.end() if closing else end
        raw, first = text[start:stop], int(call_id.removeprefix("call_"))
        items = value if isinstance(value, list) else [value]
        if not items:
            return [malformed_call(call_id, raw, "expected a JSON list of calls, got an empty one")], stop
        return [call_from_json(item, f"call_{first + i}", raw) for i, item in enumerate(items)], stop

    return blocks(text, _BEGINS, _CLOSE, read)


def _write_list(calls: Sequence[ToolCall]) -> str:
    return _OPEN + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls], ensure_ascii=False)


# Phi's prompt has tokens around the list of tools; Granite's describes the list of calls in words.
PHI = Syntax(
    "phi",
    parse_listed,
    seen=lambda call: _OPEN in call and _CLOSE in call,
    write=lambda calls: _write_list(calls) + _CLOSE,
    asked=lambda prompt: "<|/tool|>" in prompt,
    opens=(_OPEN, _CLOSE),
)
GRANITE = Syntax(
    "granite",
    parse_listed,
    seen=lambda call: _OPEN in call,
    write=_write_list,
    asked=lambda prompt: f"{_OPEN} followed by" in prompt,
    opens=(_OPEN, "<tool_call>", _CLOSE),
)


# Llama

_PYTHON_TAG = "<|python_tag|>"
_NEXT_TAG = re.compile(r"\}\s*<\|python_tag\|>\s*(?=\{)")
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"


def parse_llama_json(text: str) -> Parsed:
    """Parse `{"name": ..., "parameters": {...}}`, or several, separated by `;` or nothing, as the whole turn or after a tag."""
    said, tag, body = _NEXT_TAG.sub("};", text).rpartition(_PYTHON_TAG)
    if body.strip().startswith(_PYTHON_START):
        inside, _, after = body.strip().removeprefix(_PYTHON_START).partition(_PYTHON_END)
        # Llama 4 puts either its text, before its calls, or the calls between these.
        calls_inside = inside.lstrip().startswith("{") and not after.strip()
        said, body = (said, inside) if calls_inside else (said + inside, after)
    body = body.strip()
    if not body.startswith("{"):
        if tag:  # only a call may follow the token
            return said.strip(), (malformed_call("call_0", tag + body, f"expected a JSON object after {_PYTHON_TAG}"),)
        return text.strip(), ()
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        if len(calls) == MOST_CALLS:
            calls.append(overflow_call(body[position:]))
            break
        call_id = f"call_{len(calls)}"
        try:
            value, end = strict_json(body, position)
        except ValueError as problem:
            # The end of the broken call is unknown, so it takes the rest of the turn.
            calls.append(malformed_call(call_id, body[position:], f"not valid JSON: {problem}"))
            break
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        calls.append(call_from_json(value, call_id, body[position:end], key))
        position = skip_blanks(body, end)
        if position < len(body) and not body.startswith((";", "{"), position):
            calls.append(malformed_call(f"call_{len(calls)}", body[position:], "expected ';' between two calls"))
            break
        if body.startswith(";", position):
            position = skip_blanks(body, position + 1)
    return said.strip(), tuple(calls)


LLAMA_JSON = Syntax(
    "llama_json",
    parse_llama_json,
    seen=lambda call: '"name"' in call and '"parameters"' in call,
    write=lambda calls: "; ".join(json.dumps({"name": c.name, "parameters": c.arguments}, ensure_ascii=False) for c in calls),
)


# Mistral

_MARK = "[TOOL_CALLS]"


def parse_mistral(text: str) -> Parsed:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]`, or, of newer models,
    `[TOOL_CALLS]name[ARGS]{...}` per call, in some with `[CALL_ID]id` before `[ARGS]`."""
    prose, mark, body = text.partition(_MARK)
    if not mark:
        return text.strip(), ()
    calls: list[ToolCall] = []
    for number, piece in enumerate(body.split(_MARK, MOST_CALLS)):
        raw = _MARK + piece
        if number == MOST_CALLS or len(calls) >= MOST_CALLS:
            calls.append(overflow_call(raw))
            break
        # Each mark begins a new call, so a broken call does not affect the others.
        head, args, arguments = piece.partition("[ARGS]")
        name, _, sampled_id = head.partition("[CALL_ID]") if args else ("", "", "")
        name, call_id = name.strip(), sampled_id.strip() or f"call_{len(calls)}"
        try:
            value, end = strict_json(arguments if args else piece)
        except ValueError as problem:
            calls.append(malformed_call(call_id, raw, f"not valid JSON: {problem}", name))
            continue
        if (arguments if args else piece)[end:].strip():
            calls.append(malformed_call(call_id, raw, "text after the calls"))
        elif args:
            calls.append(call_from_json({"name": name, "arguments": value}, call_id, raw))
        elif not isinstance(value, list) or not value:
            calls.append(malformed_call(call_id, raw, "expected a JSON array of calls"))
        else:
            for item in value:
                # The sampled id is kept, since the template repeats it with the tool's result.
                own = item.get("id") if isinstance(item, dict) else None
                calls.append(call_from_json(item, own if isinstance(own, str) and own else f"call_{len(calls)}", raw))
    return prose.strip(), limit_calls(calls)


MISTRAL = Syntax("mistral", parse_mistral, seen=lambda call: _MARK in call, opens=(_MARK,))


# The table of syntaxes

HERMES = Syntax(
    "hermes",
    parse_tool_calls,
    seen=lambda call: OPEN in call and '"name"' in call and CLOSE in call,
    write=render_tool_calls,
    opens=(OPEN, CLOSE),
    close=CLOSE,
)

# In the order of recognition: a syntax that contains another one's marks comes before it.
SYNTAXES: dict[str, Syntax] = {
    syntax.name: syntax
    for syntax in (
        HARMONY, DSML, DEEPSEEK, GEMMA, FUNCTION_GEMMA, LFM2, QWEN_XML, GLM, MISTRAL, PHI, GRANITE, HERMES, LLAMA_JSON, OLMO,
        PYTHONIC,
    )
}  # fmt: skip
