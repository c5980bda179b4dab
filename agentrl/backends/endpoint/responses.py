"""OpenAI's responses: a request to `Ask`, and an answer to a response or its events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace

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
    text_of,
    tool,
)
from agentrl.backends.endpoint.chat import chat_error
from agentrl.backends.endpoint.errors import RequestError
from agentrl.backends.endpoint.fields import COMMON, typed
from agentrl.backends.endpoint.live import Live
from agentrl.backends.endpoint.session import Answer
from agentrl.backends.endpoint.wire import Exchange, Wire, event
from agentrl.tool.forms import thought_of
from agentrl.trajectory import Json, Message, ToolCall

_KNOWN = {
    "model", "input", "instructions", "previous_response_id", "tools", "tool_choice", "parallel_tool_calls", "text", "stream",
    "max_output_tokens", "temperature", "top_p", "top_k", "seed", "store", "metadata", "user", "include", "stream_options",
    "service_tier", "prompt_cache_key", "safety_identifier", "reasoning", "truncation",
}  # fmt: skip
_TYPES = {**COMMON, "include": "a list", "reasoning": "an object", "truncation": "text", "previous_response_id": "text"}
_HARMLESS: dict[str, Sequence[Json]] = {"background": (False,), "top_logprobs": (0,), "max_tool_calls": ()}
_TEXT = ("input_text", "output_text", "text", "refusal")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_responses(exchange: Exchange) -> Ask:
    """Raises RequestError."""
    body = exchange.body
    only(body, _KNOWN, _HARMLESS)
    typed(body, _TYPES)
    if body.get("truncation") == "auto":
        raise RequestError("truncation: only 'disabled' is supported; the recorded history must be the one that was sent")
    tools = [_tool(row, f"tools[{i}]") for i, row in enumerate(listed(body, "tools"))]
    choice = body.get("tool_choice")
    calls, name = chosen(choice, tools)
    return Ask(
        messages=in_order(_conversation(exchange)),
        tools=[] if choice == "none" else tools,
        max_tokens=number(body, "max_output_tokens"),
        seed=number(body, "seed", -(2**63)),
        schema=json_schema(as_dict(body.get("text") or {}, "text").get("format"), "text.format"),
        schema_field="text.format",
        calls=calls,
        only=name,
        single=body.get("parallel_tool_calls") is False,
        other=other_sampling(body, exchange.own),
    )


def write_response(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """The one answer as a response, which a later request may name."""
    return _response(exchange, ask, answers[0], f"resp_{uuid.uuid4().hex}", _items(answers[0].message))


async def stream_response(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """The same as events: text as it is sampled, calls once their turn is over."""
    number, count = f"resp_{uuid.uuid4().hex}", 0
    begun = _head(exchange, number) | {"status": "in_progress", "output": [], "usage": None}

    def told(kind: str, **row: Json) -> str:
        nonlocal count
        count += 1
        return event({"type": kind, "sequence_number": count - 1, **row}, kind)

    yield told("response.created", response=begun)
    yield told("response.in_progress", response=begun)
    item = f"msg_{uuid.uuid4().hex}"
    at = {"item_id": item, "output_index": 0, "content_index": 0}
    opened = False
    async for heard in live.heard():
        if heard.text and not opened:
            opened = True
            for kind, row in _opened(item):
                yield told(kind, **row)
        if heard.text:
            yield told("response.output_text.delta", **at, delta=heard.text, logprobs=[])
    ((answer, rest),) = live.answers()
    items = _items(answer.message, item)
    if items[0]["type"] == "message" and not opened:
        for kind, row in _opened(item):
            yield told(kind, **row)
    if rest:
        yield told("response.output_text.delta", **at, delta=rest, logprobs=[])
    for index, row in enumerate(items):
        for kind, part in _ended(row, index):
            yield told(kind, **part)
    response = _response(exchange, ask, answer, number, items)
    yield told(f"response.{response['status']}", response=response)


RESPONSES = Wire("v1/responses", read_responses, write_response, stream_response, chat_error, "error")


def _conversation(exchange: Exchange) -> list[Message]:
    """All messages: the instructions, which hold for one request, then the response that is continued, then the input."""
    body, kept = exchange.body, exchange.session.kept
    before: list[Message] = []
    if (name := body.get("previous_response_id")) is not None:
        if name not in kept:
            raise RequestError(f"previous_response_id: no response {name!r} in this session", code="previous_response_not_found")
        before = kept[name]
    given = body.get("input")
    rows = [{"role": "user", "content": given}] if isinstance(given, str) else listed(body, "input")
    if not rows:
        raise RequestError("input: expected text or a non-empty list")
    instructions = text_of(body.get("instructions"), "instructions")
    return [*([Message("system", instructions)] if instructions else []), *before, *_messages(rows)]


def _messages(rows: Sequence[Json]) -> list[Message]:
    """Items as messages: an assistant's text and the calls after it are one turn."""
    found: list[Message] = []
    thought = ""  # before the assistant's turn that it is of
    turn: list[ToolCall] | None = None  # of the assistant's turn that may go on
    for index, item in enumerate(rows):
        where = f"input[{index}]"
        row = typed(item, {"type": "text", "role": "text", "call_id": "text"}, where)
        kind = row.get("type", "message")
        if kind == "reasoning":
            thought += thought_of({key: row[key] for key in ("content", "summary") if row.get(key)})
            continue
        if kind == "function_call":
            call = call_of(row.get("name"), row.get("arguments"), row.get("call_id"), where)
            if turn is None:
                found.append(Message("assistant"))
                turn = []
            turn.append(call)
            found[-1] = replace(found[-1], tool_calls=tuple(turn), reasoning=found[-1].reasoning or thought or None)
            thought = ""
            continue
        turn = None
        if kind == "function_call_output":
            if row.get("call_id") is None:
                raise RequestError(f"{where}.call_id: expected text")
            found.append(Message("tool", text_of(row.get("output"), f"{where}.output", _TEXT), tool_call_id=row["call_id"]))
        elif kind == "message" and row.get("role") in _ROLES:
            role = _ROLES[row["role"]]
            said = text_of(row.get("content"), f"{where}.content", _TEXT)
            found.append(Message(role, said, reasoning=thought or None if role == "assistant" else None))  # type: ignore[arg-type]
            turn, thought = ([] if role == "assistant" else None), ""
        else:
            raise RequestError(f"{where}: items of type {kind!r} are not supported")
    return found


def _tool(row: Json, where: str) -> dict[str, Json]:
    if not isinstance(row, dict) or row.get("type") != "function":
        raise RequestError(f"{where}: only tools of type 'function' are supported")
    return tool(row, row.get("parameters"), where)


def _items(message: Message, item: str | None = None) -> list[dict[str, Json]]:
    """The output of a turn: its text, unless there are only calls, then each call."""
    items: list[dict[str, Json]] = []
    if message.content or not message.tool_calls:
        part = _part(message.content)
        row = {"id": item or f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**row, "content": [part]})
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        row = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call.id, "name": call.name}
        items.append({**row, "arguments": arguments, "status": "completed"})
    return items


def _part(text: str) -> dict[str, Json]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _opened(item: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """The events before a message's text."""
    row = {"id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": 0, "item": row}
    yield "response.content_part.added", {"item_id": item, "output_index": 0, "content_index": 0, "part": _part("")}


def _ended(item: Mapping[str, Json], index: int) -> Iterator[tuple[str, dict[str, Json]]]:
    """The events after a message's text, or of a whole call."""
    at: dict[str, Json] = {"item_id": item["id"], "output_index": index}
    if item["type"] == "message":
        part = item["content"][0]
        yield "response.output_text.done", {**at, "content_index": 0, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**at, "content_index": 0, "part": part}
    else:
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": begun}
        yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
        yield "response.function_call_arguments.done", {**at, "arguments": item["arguments"], "name": item["name"]}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _response(exchange: Exchange, ask: Ask, answer: Answer, number: str, items: Sequence[Json]) -> dict[str, Json]:
    if exchange.body.get("store") is not False:
        instructed = bool(text_of(exchange.body.get("instructions"), "instructions"))
        exchange.session.kept[number] = [*ask.messages[instructed:], answer.message]
    prompt, sampled = answer.prompt_tokens, len(answer.generation.token_ids)
    whole = answer.generation.finish in ("stop", "stop_string")
    return _head(exchange, number) | {
        "status": "completed" if whole else "incomplete",
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": list(items),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def _head(exchange: Exchange, number: str) -> dict[str, Json]:
    body = exchange.body
    return {
        "id": number,
        "object": "response",
        "created_at": int(time.time()),
        "model": exchange.model,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": exchange.own["temperature"],
        "top_p": exchange.own["top_p"],
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
    }
