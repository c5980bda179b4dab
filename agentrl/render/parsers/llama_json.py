"""`{"name": ..., "parameters": {...}}` as the whole turn: Llama 3.1 to 4."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentrl.render.grammar import llama_rules
from agentrl.render.parsers.syntax import Parsed, Syntax
from agentrl.render.toolcalls import MOST_CALLS, call_from_json, malformed, skip_blanks, strict_json, too_many
from agentrl.trajectory import ToolCall

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"


def parse_llama_json(text: str) -> Parsed:
    """`{"name": ..., "parameters": {...}}`, or several, separated by `;` or by nothing, as the whole turn or after a tag."""
    said, tag, body = text.rpartition(_PYTHON_TAG)
    if body.strip().startswith(_PYTHON_START):
        inside, _, after = body.strip().removeprefix(_PYTHON_START).partition(_PYTHON_END)
        # Llama 4 puts between these what it says, before its calls, or the calls.
        calls_inside = inside.lstrip().startswith("{") and not after.strip()
        said, body = (said, inside) if calls_inside else (said + inside, after)
    body = body.strip()
    if not body.startswith("{"):
        if tag:  # what follows the token is a call and nothing else
            return said.strip(), (malformed("call_0", tag + body, f"expected a JSON object after {_PYTHON_TAG}"),)
        return text.strip(), ()
    calls: list[ToolCall] = []
    position = 0
    while position < len(body):
        if len(calls) == MOST_CALLS:
            calls.append(too_many(body[position:]))
            break
        call_id = f"call_{len(calls)}"
        try:
            value, end = strict_json(body, position)
        except ValueError as problem:
            # Where the broken one ends is not known, so the rest of the turn goes with it.
            calls.append(malformed(call_id, body[position:], f"not valid JSON: {problem}"))
            break
        key = "arguments" if isinstance(value, dict) and "arguments" in value else "parameters"
        calls.append(call_from_json(value, call_id, body[position:end], key))
        position = skip_blanks(body, end)
        if position < len(body) and not body.startswith((";", "{"), position):
            calls.append(malformed(f"call_{len(calls)}", body[position:], "expected ';' between two calls"))
            break
        if body.startswith(";", position):
            position = skip_blanks(body, position + 1)
    return said.strip(), tuple(calls)


def _write(calls: Sequence[ToolCall]) -> str:
    bodies = [json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False) for call in calls]
    return "; ".join(bodies)


LLAMA_JSON = Syntax(
    "llama_json",
    parse_llama_json,
    seen=lambda call: '"name"' in call and '"parameters"' in call,
    write=_write,
    grammar=llama_rules,
)
