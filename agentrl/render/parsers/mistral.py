"""`[TOOL_CALLS]` of Mistral, in its three forms: a JSON array, `name[ARGS]{...}`, and `name[CALL_ID]id[ARGS]{...}`."""

from __future__ import annotations

from agentrl.render.parsers.syntax import Parsed, Syntax
from agentrl.render.toolcalls import MOST_CALLS, call_from_json, malformed, strict_json, too_many, within_most
from agentrl.trajectory import Json, ToolCall

_MARK = "[TOOL_CALLS]"


def parse_mistral(text: str) -> Parsed:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]`, or, in newer models,
    `[TOOL_CALLS]name[ARGS]{...}` for each call, with `[CALL_ID]id` before `[ARGS]` in some."""
    prose, mark, body = text.partition(_MARK)
    if not mark:
        return text.strip(), ()
    calls: list[ToolCall] = []
    for number, piece in enumerate(body.split(_MARK, MOST_CALLS)):
        raw = _MARK + piece
        if number == MOST_CALLS or len(calls) >= MOST_CALLS:
            calls.append(too_many(raw))
            break
        # Each mark begins a call of its own, so that a broken one does not take the others with it.
        head, args, arguments = piece.partition("[ARGS]")
        name, _, sampled_id = head.partition("[CALL_ID]") if args else ("", "", "")
        name, call_id = name.strip(), sampled_id.strip() or f"call_{len(calls)}"
        try:
            value, end = strict_json(arguments if args else piece)
        except ValueError as problem:
            calls.append(malformed(call_id, raw, f"not valid JSON: {problem}", name))
            continue
        if (arguments if args else piece)[end:].strip():
            calls.append(malformed(call_id, raw, "text after the calls"))
        elif args:
            calls.append(call_from_json({"name": name, "arguments": value}, call_id, raw))
        elif not isinstance(value, list) or not value:
            calls.append(malformed(call_id, raw, "expected a JSON array of calls"))
        else:
            calls += [_item(item, f"call_{len(calls) + i}", raw) for i, item in enumerate(value)]
    return prose.strip(), within_most(calls)


def _item(item: Json, call_id: str, raw: str) -> ToolCall:
    # The id is part of what was sampled, and the template repeats it with the tool's answer.
    sampled_id = item.get("id") if isinstance(item, dict) else None
    return call_from_json(item, sampled_id if isinstance(sampled_id, str) and sampled_id else call_id, raw)


MISTRAL = Syntax("mistral", parse_mistral, seen=lambda call: _MARK in call, opens=(_MARK,))
