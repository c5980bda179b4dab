"""Calls between DeepSeek's control tokens: NAME and JSON (V3.1), the same in a code fence (V3, R1); and the DSML of V3.2."""

from __future__ import annotations

import re

from agentrl.render.parsers.syntax import Parsed, Syntax
from agentrl.render.toolcalls import MOST_CALLS, blocks, broken_end, call_from_json, malformed, skip_blanks, strict_json, too_many
from agentrl.trajectory import Json, ToolCall

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_AROUND = re.compile("<｜tool▁calls▁(?:begin|end)｜>")
_FENCE, _FENCE_END = "\n```json\n", "```"


def parse_deepseek(text: str) -> Parsed:
    """`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, or `function<｜tool▁sep｜>NAME` and the arguments in a
    fence of ```json, each call for itself; the tokens around all calls are dropped."""

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        try:
            name, value, end = _body(text, start + len(_BEGIN))
            if not text.startswith(_END, end):
                raise ValueError(f"expected {_END} after the arguments")
        except ValueError as problem:
            return _broken(text, start, call_id, str(problem))
        stop = end + len(_END)
        return [call_from_json({"name": name, "arguments": value}, call_id, text[start:stop])], stop

    prose, calls = blocks(text, _BEGIN, _END, read)
    return (_AROUND.sub("", prose).strip() if calls else prose), calls


def _body(text: str, start: int) -> tuple[str, Json, int]:
    """Name, arguments and the position after them. Raises ValueError."""
    following = text.find(_BEGIN, start)
    separator = text.find(_SEP, start, following if following >= 0 else len(text))
    if separator < 0:
        raise ValueError(f"expected {_SEP}")
    name, begin = text[start:separator].strip(), separator + len(_SEP)
    line = text.find("\n", begin, following if following >= 0 else len(text))
    fenced = line >= 0 and text.startswith(_FENCE, line)
    if fenced:
        name, begin = text[begin:line].strip(), line + len(_FENCE)
    value, end = _json(text, begin)
    end = skip_blanks(text, end)
    if fenced:
        if not text.startswith(_FENCE_END, end):
            raise ValueError("expected ``` after the arguments")
        end = skip_blanks(text, end + len(_FENCE_END))
    return name, value, end


def _json(text: str, start: int) -> tuple[Json, int]:
    try:
        return strict_json(text, start)
    except ValueError as problem:
        raise ValueError(f"not valid JSON: {problem}") from None


def _broken(text: str, start: int, call_id: str, error: str) -> tuple[list[ToolCall], int]:
    """A malformed call ends with its own end, before the next call, or with the text."""
    stop, closed = broken_end(text, start + len(_BEGIN), _BEGIN, _END)
    return [malformed(call_id, text[start:stop], error if closed else f"no {_END}: {error}")], stop


DEEPSEEK = Syntax("deepseek", parse_deepseek, seen=lambda call: _BEGIN in call)

_DSML = "｜DSML｜"
_BLOCK, _BLOCK_END = (f"<{slash}{_DSML}function_calls>" for slash in ("", "/"))
_INVOKE = re.compile(rf'\s*<{_DSML}invoke name="([^"\n]*)">(.*?)</{_DSML}invoke>', re.DOTALL)
_PARAMETER = re.compile(rf'\s*<{_DSML}parameter name="([^"\n]*)" string="(true|false)">(.*?)</{_DSML}parameter>', re.DOTALL)


def parse_dsml(text: str) -> Parsed:
    """`<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</...>...`; a parameter says
    whether it is a string, and is JSON if not."""

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        close = text.find(_BLOCK_END, start)
        stop = len(text) if close < 0 else close + len(_BLOCK_END)
        raw, body = text[start:stop], text[start + len(_BLOCK) : close if close >= 0 else len(text)]
        if close < 0:
            return [malformed(call_id, raw, f"no {_BLOCK_END}")], stop
        first, position = int(call_id.removeprefix("call_")), 0
        calls: list[ToolCall] = []
        while len(calls) <= MOST_CALLS and (invoke := _INVOKE.match(body, position)) is not None:
            calls.append(_invoke(invoke, f"call_{first + len(calls)}"))
            position = invoke.end()
        if len(calls) > MOST_CALLS:
            return [*calls, too_many(raw)], stop
        if not calls or body[position:].strip():
            return [malformed(call_id, raw, "expected <invoke name=...> and nothing else")], stop
        return calls, stop

    return blocks(text, _BLOCK, _BLOCK_END, read)


def _invoke(invoke: re.Match[str], call_id: str) -> ToolCall:
    raw, name, body = invoke.group(0).strip(), invoke.group(1), invoke.group(2)
    if not name:
        return malformed(call_id, raw, "expected a function name")
    arguments: dict[str, Json] = {}
    position = 0
    while (item := _PARAMETER.match(body, position)) is not None:
        key, is_string, text = item.groups()
        try:
            arguments[key] = text if is_string == "true" else _whole(text)
        except ValueError as problem:
            return malformed(call_id, raw, f"{key} is not valid JSON: {problem}", name)
        position = item.end()
    if body[position:].strip():
        return malformed(call_id, raw, 'expected <parameter name="KEY" string="true|false">', name)
    return ToolCall(name=name, arguments=arguments, id=call_id, raw=raw)


def _whole(text: str) -> Json:
    value, end = strict_json(text)
    if text[end:].strip():
        raise ValueError("text after the value")
    return value


DSML = Syntax("deepseek_dsml", parse_dsml, seen=lambda call: _BLOCK in call, opens=(_BLOCK, _BLOCK_END))
