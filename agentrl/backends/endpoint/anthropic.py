"""Anthropic's messages: a request to `Ask`, and an answer to a message or its events."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence

from agentrl.backends.endpoint.ask import (
    Ask,
    as_dict,
    call_of,
    chosen,
    in_order,
    json_schema,
    listed,
    number,
    only,
    other_sampling,
    stops,
    text_of,
    tool,
)
from agentrl.backends.endpoint.errors import RequestError
from agentrl.backends.endpoint.fields import COMMON, typed
from agentrl.backends.endpoint.live import Live
from agentrl.backends.endpoint.session import Answer
from agentrl.backends.endpoint.wire import Exchange, Wire, event
from agentrl.tool.forms import is_thought, thought_of
from agentrl.trajectory import Json, Message, ToolCall

_KNOWN = {
    "model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "temperature", "top_p",
    "top_k", "metadata", "service_tier", "cache_control", "output_config",
}  # fmt: skip
_TYPES = {**COMMON, "tool_choice": "an object", "cache_control": "an object", "output_config": "an object"}
_HARMLESS: dict[str, Sequence[Json]] = {"thinking": ({"type": "disabled"},)}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def read_anthropic(exchange: Exchange) -> Ask:
    """Raises RequestError."""
    body = exchange.body
    only(body, _KNOWN, _HARMLESS)
    typed(body, _TYPES)
    tools = [_tool(row, f"tools[{i}]") for i, row in enumerate(listed(body, "tools"))]
    choice = as_dict(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = typed(choice, {"disable_parallel_tool_use": "true or false"}, "tool_choice").get("type")
    calls, name = chosen({"any": "required", "tool": choice}.get(str(kind), kind), tools)
    system = text_of(body.get("system"), "system")
    return Ask(
        messages=in_order([*([Message("system", system)] if system else []), *_messages(listed(body, "messages"))]),
        tools=[] if kind == "none" else tools,
        max_tokens=number(body, "max_tokens"),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        stop_field="stop_sequences",
        schema=json_schema(as_dict(body.get("output_config") or {}, "output_config").get("format"), "output_config.format"),
        schema_field="output_config.format",
        calls=calls,
        only=name,
        single=choice.get("disable_parallel_tool_use") is True,
        other=other_sampling(body, exchange.own),
    )


def write_anthropic(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """The one answer as a message."""
    (answer,) = answers
    text: list[Json] = [{"type": "text", "text": answer.message.content}] if answer.message.content else []
    calls = [_block(call, call.arguments) for call in answer.message.tool_calls]
    return {**_head(exchange), "content": [*text, *calls], **_ending(answer), "usage": _usage(answer)}


async def stream_anthropic(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """The same as events: text as it is sampled, calls once their turn is over."""

    def told(kind: str, **row: Json) -> str:
        return event({"type": kind, **row}, kind)

    def piece(index: int, **delta: Json) -> str:
        return told("content_block_delta", index=index, delta=delta)

    nothing = {"input_tokens": 0, "output_tokens": 0}
    begun = {**_head(exchange), "content": [], "stop_reason": None, "stop_sequence": None, "usage": nothing}
    yield told("message_start", message=begun)
    blocks = 0
    async for heard in live.heard():
        if heard.text and not blocks:
            blocks = 1
            yield told("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if heard.text:
            yield piece(0, type="text_delta", text=heard.text)
    ((answer, rest),) = live.answers()
    if rest and not blocks:
        blocks = 1
        yield told("content_block_start", index=0, content_block={"type": "text", "text": ""})
    if rest:
        yield piece(0, type="text_delta", text=rest)
    if blocks:
        yield told("content_block_stop", index=0)
    for index, call in enumerate(answer.message.tool_calls, start=blocks):
        yield told("content_block_start", index=index, content_block=_block(call, {}))
        yield piece(index, type="input_json_delta", partial_json=json.dumps(call.arguments, ensure_ascii=False))
        yield told("content_block_stop", index=index)
    yield told("message_delta", delta=_ending(answer), usage=_usage(answer))
    yield told("message_stop")


def anthropic_error(problem: RequestError) -> dict[str, Json]:
    """An error of Anthropic's interface."""
    kind = _KINDS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


ANTHROPIC = Wire("v1/messages", read_anthropic, write_anthropic, stream_anthropic, anthropic_error, "error")


def _messages(rows: Sequence[Json]) -> list[Message]:
    """Turns as messages; answers to calls, which stand in a user's turn, are messages of their own before its text."""
    found: list[Message] = []
    for index, row in enumerate(rows):
        where = f"messages[{index}]"
        role, content = as_dict(row, where).get("role"), row.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}: expected the role 'user' or 'assistant'")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else listed(row, "content", where)
        found += _assistant(blocks, where) if role == "assistant" else _user(blocks, where, role)
    if not found or found[-1].role == "assistant":
        raise RequestError("messages: the last one must be the user's; a turn that the client begins cannot be continued")
    return found


def _user(blocks: Sequence[Json], where: str, role: str) -> list[Message]:
    answers, text = [], []
    for index, item in enumerate(blocks):
        here = f"{where}.content[{index}]"
        block = as_dict(item, here)
        if block.get("type") == "tool_result":
            said = text_of(block.get("content"), f"{here}.content")
            typed(block, {"tool_use_id": "text", "is_error": "true or false"}, here)
            if block.get("tool_use_id") is None:
                raise RequestError(f"{here}.tool_use_id: expected text")
            answers.append(Message("tool", said, tool_call_id=block["tool_use_id"]))
        else:
            text.append(text_of([block], here))
    return [*answers, *([Message(role, "".join(text))] if text or not answers else [])]  # type: ignore[arg-type]


def _assistant(blocks: Sequence[Json], where: str) -> list[Message]:
    calls: list[ToolCall] = []
    text, thought = list[str](), list[str]()
    for index, item in enumerate(blocks):
        here = f"{where}.content[{index}]"
        block = as_dict(item, here)
        if block.get("type") == "tool_use":
            calls.append(call_of(block.get("name"), block.get("input"), block.get("id"), here))
        elif is_thought(block):
            thought.append(thought_of(block))
        else:
            text.append(text_of([block], here))
    return [Message("assistant", "".join(text), tuple(calls), reasoning="".join(thought) or None)]


def _tool(row: Json, where: str) -> dict[str, Json]:
    if not isinstance(row, dict) or row.get("type") not in (None, "custom"):
        raise RequestError(f"{where}: only tools of the client's own are supported")
    return tool({key: value for key, value in row.items() if key != "type"}, row.get("input_schema"), where)


def _block(call: ToolCall, given: Json) -> dict[str, Json]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _head(exchange: Exchange) -> dict[str, Json]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": exchange.model}


def _ending(answer: Answer) -> dict[str, Json]:
    reason = "tool_use" if answer.message.tool_calls else "stop_sequence" if answer.stopped else "end_turn"
    if answer.generation.finish not in ("stop", "stop_string"):
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": answer.stopped if reason == "stop_sequence" else None}


def _usage(answer: Answer) -> dict[str, Json]:
    return {"input_tokens": answer.prompt_tokens, "output_tokens": len(answer.generation.token_ids)}
