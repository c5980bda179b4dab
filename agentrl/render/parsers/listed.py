"""`<|tool_call|>` and a JSON list of calls: Granite 3.x (to the end of the turn) and Phi-4-mini (to `<|/tool_call|>`)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl.render.parsers.syntax import Parsed, Syntax
from agentrl.render.toolcalls import blocks, broken_end, call_from_json, malformed, strict_json
from agentrl.trajectory import ToolCall

_OPEN, _CLOSE = "<|tool_call|>", "<|/tool_call|>"
_BEGINS = re.compile(r"<\|tool_call\|>|<tool_call>(?=\s*[\[{])")
"""Granite writes the mark as a token of its own or as a plain tag, and closes the tag at times."""
_ENDS = re.compile(r"\s*(?:<\|/tool_call\|>|</tool_call>)")


def parse_listed(text: str) -> Parsed:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, or one object, with or without `<|/tool_call|>`."""

    def read(start: int, call_id: str) -> tuple[list[ToolCall], int]:
        body = text.index(">", start) + 1
        try:
            value, end = strict_json(text, body)
        except ValueError as problem:
            return _broken(text, start, body, call_id, f"not valid JSON: {problem}")
        closing = _ENDS.match(text, end)
        stop = closing.end() if closing else end
        raw, first = text[start:stop], int(call_id.removeprefix("call_"))
        items = value if isinstance(value, list) else [value]
        if not items:
            return [malformed(call_id, raw, "expected a JSON list of calls, got an empty one")], stop
        return [call_from_json(item, f"call_{first + i}", raw) for i, item in enumerate(items)], stop

    return blocks(text, _BEGINS, _CLOSE, read)


def _broken(text: str, start: int, body: int, call_id: str, error: str) -> tuple[list[ToolCall], int]:
    """Where a broken list ends is not known: at its closing tag, before the next opening one, or with the turn."""
    stop, _ = broken_end(text, body, _OPEN, _CLOSE)
    return [malformed(call_id, text[start:stop], error)], stop


def _write(calls: Sequence[ToolCall]) -> str:
    return _OPEN + json.dumps([{"name": c.name, "arguments": c.arguments} for c in calls], ensure_ascii=False)


# Phi's prompt has a token of its own around the list of tools; Granite's asks for the list in words.
PHI = Syntax(
    "phi",
    parse_listed,
    seen=lambda call: _OPEN in call and _CLOSE in call,
    write=lambda calls: _write(calls) + _CLOSE,
    asked=lambda prompt: "<|/tool|>" in prompt,
    opens=(_OPEN, _CLOSE),
)
GRANITE = Syntax(
    "granite",
    parse_listed,
    seen=lambda call: _OPEN in call,
    write=_write,
    asked=lambda prompt: f"{_OPEN} followed by" in prompt,
    opens=(_OPEN, "<tool_call>", _CLOSE),
)
