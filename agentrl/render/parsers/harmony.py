"""The harmony format of gpt-oss: a turn is a run of messages on channels, and a call is a message to a function.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"key": "a"}<|call|>

or, at the end of a run of calls, `<|start|>assistant<|channel|>final<|message|>the answer<|return|>`. Analysis is the
reasoning; `final`, and commentary to nobody, are what is said. (https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

import re

from agentrl.render.parsers.syntax import Parsed, Syntax
from agentrl.render.toolcalls import MOST_CALLS, call_from_json, malformed, strict_json, too_many
from agentrl.trajectory import ToolCall

_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_ROLE = re.compile(r"^(?:<\|start\|>)?\s*(?:assistant)?")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=(\S+?)(?=\s|<\||$)")


def parse_harmony(text: str) -> Parsed:
    """What is said and the calls; the reasoning is left out (`harmony_parts` has all three)."""
    _, said, calls = harmony_parts(text)
    return said, calls


def harmony_parts(text: str) -> tuple[str | None, str, tuple[ToolCall, ...]]:
    """(reasoning, what is said, calls) of a turn, which begins after `<|start|>assistant`.

    A message to a function whose body is no JSON object is kept as a call with `error`; so is a message to someone else,
    and a turn that was cut within a call. Text without any header is what is said.
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
        channel, to = _CHANNEL.search(header), _TO.search(header)
        if to is not None and len(calls) == MOST_CALLS:
            calls.append(too_many(text[position - len(raw) :]))
            break
        if to is not None:
            calls.append(_call(to.group(1), body, raw, f"call_{len(calls)}", bool(mark), end is not None))
        elif not mark and channel is None:
            said.append(header)
        elif channel is not None and channel.group(1) == "analysis":
            thoughts.append(body)
        else:
            said.append(body)
    return ("\n".join(thoughts) if thoughts else None), "".join(said).strip(), tuple(calls)


def _call(to: str, body: str, raw: str, call_id: str, has_body: bool, closed: bool) -> ToolCall:
    name = to.removeprefix("functions.")
    if not name or not to.startswith("functions."):
        return malformed(call_id, raw, f"a message to {to!r}, which is not functions.NAME")
    if not has_body or not closed:
        return malformed(call_id, raw, "the call was cut", name)
    try:
        value, end = strict_json(body)
    except ValueError as problem:
        return malformed(call_id, raw, f"not valid JSON: {problem}", name)
    if body[end:].strip():
        return malformed(call_id, raw, "text after the arguments", name)
    return call_from_json({"name": name, "arguments": value}, call_id, raw)


HARMONY = Syntax(
    "harmony",
    parse_harmony,
    seen=lambda call: "<|channel|>commentary" in call and "to=functions." in call,
    ends=("<|call|>",),
)
