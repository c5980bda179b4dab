"""Protocols of the endpoint: OpenAI's chat completions and responses, and Anthropic's messages."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.contrib.agents.session import AgentSession, Answer, Ask, Live, SampledPart, in_order, refusal_of
from agentrl.contrib.toolkit.chat_forms import declaration, is_thought
from agentrl.data.chat_forms import thought_of
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.engines.chat_format import (
    RequestError,
    Types,
    as_dict,
    call_of,
    check_types,
    list_field,
    read_by_form,
    read_messages,
    text_of,
    write_message,
)
from agentrl.rollout.engine import Generation, Sampling
from agentrl.utils.schemas import BadSchemaError, check_schema

# Fields of requests

COMMON: Types = {
    "model": "text", "stream": "true or false", "temperature": "a number", "top_p": "a number", "top_k": "a number",
    "tools": "a list", "metadata": "an object", "service_tier": "text",
}  # fmt: skip
"""Fields of the bodies of all protocols."""
OPENAI: Types = {
    **COMMON, "user": "text", "store": "true or false", "prompt_cache_key": "text", "safety_identifier": "text",
    "stream_options": "an object", "parallel_tool_calls": "true or false",
}  # fmt: skip
SCHEMA: Types = {"properties": "an object", "required": "a list"}
CHOICES = 128
"""Maximum choices per request; OpenAI's limit."""
STOPS = 16
"""Maximum stop strings per request."""


def check_fields(body: Mapping[str, Json], types: Types, others: str, harmless: Mapping[str, Sequence[Json]]) -> None:
    """Raise RequestError for a field of another type than in `types`, and for an unknown field: not in `types`, not among the
    words of `others`, and not `harmless`, that is with a value without effect."""
    unknown = sorted(
        key
        for key, value in body.items()
        if value is not None and key not in {*types, *others.split()} and not (key in harmless and value in harmless[key])
    )
    if unknown:
        raise RequestError(f"{', '.join(unknown)}: not supported")
    check_types(body, types)


def number(body: Mapping[str, Json], key: str, least: int = 1, most: int = 2**63 - 1) -> int | None:
    """Read an optional integer field in [least, most]. Raises RequestError for other values."""
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestError(f"{key}: expected a whole number of at least {least}, got {repr(value)[:80]}")
    return value


def stops(value: Json, key: str) -> tuple[str, ...]:
    """Read stop strings. Raises RequestError if they are invalid."""
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > STOPS or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{key}: expected a string or up to {STOPS} of them, none of them empty")
    return tuple(texts)


def tool_choice(choice: Json, tools: Sequence[Mapping[str, Json]]) -> tuple[bool, str | None]:
    """Convert a tool choice ("auto", "none", "required" or a tool's name) to `Ask.calls` and `Ask.only`. Raises RequestError."""
    if choice in (None, "auto", "none"):
        return False, None
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and names:
        return True, None
    if isinstance(choice, Mapping) and choice.get("name") in names:
        return True, str(choice["name"])
    raise RequestError(f"tool_choice: expected 'auto', 'none', 'required' or a function among {', '.join(names) or 'none'}")


def json_schema(form: Json, where: str) -> Json:
    """Return the JSON Schema of a response format; None for text. Raises RequestError for an unknown format."""
    kind = as_dict(form, where).get("type") if form is not None else "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = form.get("schema") or as_dict(form.get("json_schema") or {}, where).get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError(f"{where}: expected the type 'text', 'json_object' or 'json_schema' with a schema")
    _check(schema, f"{where}: schema")
    return schema


def _check(schema: Json, where: str) -> None:
    """Raise RequestError if the schema is unsuitable for a grammar."""
    try:
        check_schema(schema)
    except BadSchemaError as problem:
        raise RequestError(f"{where}: {problem}") from None


def other_sampling(body: Mapping[str, Json], own: Sampling) -> dict[str, Json]:
    """Return the request's sampling parameters that differ from the run's `own`."""
    given = {key: body[key] for key in ("temperature", "top_p", "top_k") if body.get(key) is not None}
    return {key: value for key, value in given.items() if value != getattr(own, key)}


def client_tools(body: Mapping[str, Json], kinds: Sequence[str | None], said: str, place: str) -> list[dict[str, Json]]:
    """Read a request's tools in OpenAI's form. `kinds`: allowed types, described by `said`; `place`: path of their parameters.

    Raises RequestError for another type, or parameters that are not a schema."""
    tools = []
    for index, row in enumerate(list_field(body, "tools")):
        where = f"tools[{index}]"
        if not isinstance(row, dict) or row.get("type") not in kinds:
            raise RequestError(f"{where}: only tools of {said} are supported")
        outer, _, key = place.rpartition(".")
        if (schema := (as_dict(row.get(outer), where) if outer else row).get(key)) is not None:
            given = check_types(schema, SCHEMA, f"{where}: parameters")
            if None in (given.get(key, ()) for key in SCHEMA):
                raise RequestError(f"{where}: parameters: properties and required cannot be null")
            for name, inner in given.get("properties", {}).items():
                if not isinstance(inner, dict | bool):
                    raise RequestError(f"{where}: parameters.properties.{name}: expected a schema")
            if not all(isinstance(name, str) for name in given.get("required", [])):
                raise RequestError(f"{where}: parameters.required: expected a list of text")
        with read_by_form():
            tool = declaration({key: value for key, value in row.items() if key != "type" or value == "function"}, where)
        _check(tool["function"]["parameters"], f"{where}: parameters")
        tools.append(tool)
    return tools


# A protocol


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request in progress: its session, its body, and the name of the model."""

    session: AgentSession
    body: Mapping[str, Json]
    model: str


@dataclass(frozen=True, slots=True)
class Wire:
    """One protocol. `path`: of the URL, after the session's. `read` raises RequestError. `stream` yields server-sent events; its
    exceptions are reported by `error` in an event of type `error_event`."""

    path: str
    read: Callable[[Exchange], Ask]
    write: Callable[[Exchange, Ask, Sequence[Answer]], dict[str, Json]]
    stream: Callable[[Exchange, Ask, Live], AsyncIterator[str]]
    error: Callable[[RequestError], dict[str, Json]]
    error_event: str | None = None

    async def events(self, exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
        """Stream the events; a failure becomes the last event, in the protocol's form."""
        try:
            async for part in self.stream(exchange, ask, live):
                yield part
        except Exception as problem:  # the client must see every failure
            yield event(self.error(refusal_of(problem)), self.error_event)


def event(row: Mapping[str, Json], name: str | None = None) -> str:
    """Format a server-sent event; `name`: its type, in protocols with types."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(row)}\n\n"


# Chat completions

_CHAT: Types = {**OPENAI, "logprobs": "true or false"}
_CHAT_FIELDS = "messages tool_choice max_tokens max_completion_tokens response_format seed n stop"
_HARMLESS: dict[str, Sequence[Json]] = {
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


def read_chat(exchange: Exchange) -> Ask:
    """Parse a chat completion request. Raises RequestError."""
    body = exchange.body
    if body.get("top_logprobs"):
        raise RequestError("top_logprobs: only 0 is supported; the engine reports only the log probability of the sampled token")
    check_fields(body, _CHAT, _CHAT_FIELDS, _HARMLESS)
    choice = body.get("tool_choice")
    kinds = ("function", None)
    tools = [] if choice == "none" else client_tools(body, kinds, "type 'function'", "function.parameters")
    calls, name = tool_choice(
        as_dict(choice.get("function"), "tool_choice.function") if isinstance(choice, dict) else choice, tools
    )
    limits = [limit for key in ("max_completion_tokens", "max_tokens") if (limit := number(body, key)) is not None]
    return Ask(
        messages=in_order(read_messages(body.get("messages"))),
        tools=tools,
        max_tokens=min(limits, default=None),
        seed=number(body, "seed", -(2**63)),
        stop=stops(body.get("stop"), "stop"),
        choices=number(body, "n", 1, CHOICES) or 1,
        logprobs=bool(body.get("logprobs")),
        schema=json_schema(body.get("response_format"), "response_format"),
        calls=calls,
        only=name,
        single=body.get("parallel_tool_calls") is False,
        other=other_sampling(body, exchange.session.served.sampling),
    )


def write_chat(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """Build a completion with one choice per answer."""
    decode = exchange.session.served.decode if ask.logprobs else None
    choices = [
        {
            "index": index,
            "message": write_message(answer.message),
            "finish_reason": finish_of(answer),
            "logprobs": None if decode is None else write_logprobs(answer.generation, decode),
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head("chat.completion", exchange.model), "choices": choices, "usage": _usage(answers)}


async def stream_chat(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """Stream the completion in chunks: text with its tokens as sampled, calls at the end of the turn."""
    head = _head("chat.completion.chunk", exchange.model)
    table = exchange.session.served.decode if ask.logprobs else None

    def chunk(choice: int, delta: Json, finish: str | None = None, logprobs: Json = None) -> str:
        row = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**head, "choices": [row]})

    for choice in range(ask.choices):
        yield chunk(choice, {"role": "assistant", "content": ""})
    async for part in live.parts():
        entry = write_logprobs(part, table) if table is not None and part.token_ids else None
        if part.text or entry is not None:
            yield chunk(part.choice, {"content": part.text} if part.text else {}, logprobs=entry)
    answers = live.answers()
    for choice, answer in enumerate(answers):
        row = write_message(answer.message)
        delta = {key: row[key] for key in ("reasoning_content", "tool_calls") if key in row}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        if delta:
            yield chunk(choice, delta)
        yield chunk(choice, {}, finish_of(answer))
    if (exchange.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(answers)})
    yield "data: [DONE]\n\n"


def finish_of(answer: Answer) -> str:
    """Return OpenAI's finish reason of a turn."""
    if answer.generation.finish not in ("stop", "stop_string"):
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def write_logprobs(sampled: Generation | SampledPart, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """List each sampled token, also special ones, with its log probability under the sampling distribution."""
    content = []
    for token_id, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
        token = decode([token_id])
        # A token with part of a character decodes to U+FFFD, which does not reveal its bytes.
        raw = None if "\ufffd" in token else list(token.encode())
        content.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}


def chat_error(problem: RequestError) -> dict[str, Json]:
    """Build an error object of OpenAI's interfaces."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    field, found, _ = str(problem).partition(":")
    param = field if found and problem.status == 400 and field.replace(".", "").isidentifier() else None
    return {"error": {"message": str(problem), "type": kind, "param": param, "code": problem.code}}


CHAT = Wire("v1/chat/completions", read_chat, write_chat, stream_chat, chat_error)


def _head(kind: str, model: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answers: Sequence[Answer]) -> dict[str, Json]:
    prompt, sampled = answers[0].used.prompt_tokens, sum(answer.used.sampled_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


# Responses

_RESPONSES: Types = {
    **OPENAI, "include": "a list", "reasoning": "an object", "truncation": "text", "previous_response_id": "text",
}  # fmt: skip
_RESPONSES_FIELDS = "input instructions tool_choice text max_output_tokens seed"
_HARMLESS_RESPONSES: dict[str, Sequence[Json]] = {"background": (False,), "top_logprobs": (0,), "max_tool_calls": ()}
_TEXT = ("input_text", "output_text", "text", "refusal")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_responses(exchange: Exchange) -> Ask:
    """Parse a responses request. Raises RequestError."""
    body = exchange.body
    check_fields(body, _RESPONSES, _RESPONSES_FIELDS, _HARMLESS_RESPONSES)
    if body.get("truncation") == "auto":
        raise RequestError("truncation: only 'disabled' is supported; the recorded history must be the one that was sent")
    tools = client_tools(body, ("function",), "type 'function'", "parameters")
    choice = body.get("tool_choice")
    calls, name = tool_choice(choice, tools)
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
        other=other_sampling(body, exchange.session.served.sampling),
    )


def write_response(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """Build the response of the one answer, which later requests may continue by id."""
    return _response(exchange, ask, answers[0], f"resp_{uuid.uuid4().hex}", _items(answers[0].message))


async def stream_response(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """Stream the response as events: text as sampled, calls at the end of the turn."""
    number, count = f"resp_{uuid.uuid4().hex}", 0
    begun = _head_responses(exchange, number) | {"status": "in_progress", "output": [], "usage": None}

    def send(kind: str, **row: Json) -> str:
        nonlocal count
        count += 1
        return event({"type": kind, "sequence_number": count - 1, **row}, kind)

    yield send("response.created", response=begun)
    yield send("response.in_progress", response=begun)
    item = f"msg_{uuid.uuid4().hex}"
    at = {"item_id": item, "output_index": 0, "content_index": 0}
    opened = False
    async for part in live.parts():
        if part.text and not opened:
            opened = True
            for kind, row in _opening_events(item):
                yield send(kind, **row)
        if part.text:
            yield send("response.output_text.delta", **at, delta=part.text, logprobs=[])
    (answer,) = live.answers()
    items = _items(answer.message, item)
    if items[0]["type"] == "message" and not opened:
        for kind, row in _opening_events(item):
            yield send(kind, **row)
    # The end of the text, and each call as a whole.
    for index, row in enumerate(items):
        if row["type"] == "message":
            part = row["content"][0]
            yield send("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield send("response.content_part.done", **at, part=part)
        else:
            here = {"item_id": row["id"], "output_index": index}
            unsaid = {**row, "arguments": "", "status": "in_progress"}
            yield send("response.output_item.added", output_index=index, item=unsaid)
            yield send("response.function_call_arguments.delta", **here, delta=row["arguments"])
            yield send("response.function_call_arguments.done", **here, arguments=row["arguments"], name=row["name"])
        yield send("response.output_item.done", output_index=index, item=row)
    response = _response(exchange, ask, answer, number, items)
    yield send(f"response.{response['status']}", response=response)


RESPONSES = Wire("v1/responses", read_responses, write_response, stream_response, chat_error, "error")


def _conversation(exchange: Exchange) -> list[Message]:
    """Return all messages: the instructions (valid for one request), the response to continue, and the input."""
    body, kept = exchange.body, exchange.session.kept
    before: list[Message] = []
    if (name := body.get("previous_response_id")) is not None:
        if name not in kept:
            raise RequestError(f"previous_response_id: no response {name!r} in this session", code="previous_response_not_found")
        before = kept[name]
    given = body.get("input")
    rows = [{"role": "user", "content": given}] if isinstance(given, str) else list_field(body, "input")
    if not rows:
        raise RequestError("input: expected text or a non-empty list")
    instructions = text_of(body.get("instructions"), "instructions")
    return [*([Message("system", instructions)] if instructions else []), *before, *_messages(rows)]


def _messages(rows: Sequence[Json]) -> list[Message]:
    """Convert items to messages: an assistant's text and the calls after it are one turn."""
    found: list[Message] = []
    thought = ""  # reasoning before the assistant's turn that it belongs to
    turn: list[ToolCall] | None = None  # calls of the assistant's turn that may continue
    for index, item in enumerate(rows):
        where = f"input[{index}]"
        row = check_types(item, {"type": "text", "role": "text", "call_id": "text"}, where)
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
            found[-1] = replace(found[-1], tool_calls=tuple(turn), reasoning=(found[-1].reasoning or "") + thought or None)
            thought = ""
            continue
        turn = None
        if kind == "function_call_output":
            if row.get("call_id") is None:
                raise RequestError(f"{where}.call_id: expected text")
            found.append(
                Message("tool", text_of(row.get("output"), f"{where}.output", _TEXT, needed=True), tool_call_id=row["call_id"])
            )
        elif kind == "message" and row.get("role") in _ROLES:
            role = _ROLES[row["role"]]
            said = text_of(row.get("content"), f"{where}.content", _TEXT, needed=True)
            found.append(Message(role, said, reasoning=thought or None if role == "assistant" else None))  # type: ignore[arg-type]
            turn, thought = ([] if role == "assistant" else None), ""
        else:
            raise RequestError(f"{where}: items of type {kind!r} are not supported")
    return found


def _items(message: Message, item: str | None = None) -> list[dict[str, Json]]:
    """Build the output items of a turn: its text, unless there are only calls, then each call."""
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


def _opening_events(item: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield the events before a message's text."""
    row = {"id": item, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": 0, "item": row}
    yield "response.content_part.added", {"item_id": item, "output_index": 0, "content_index": 0, "part": _part("")}


def _response(exchange: Exchange, ask: Ask, answer: Answer, number: str, items: Sequence[Json]) -> dict[str, Json]:
    if exchange.body.get("store") is not False:
        instructed = bool(text_of(exchange.body.get("instructions"), "instructions"))
        exchange.session.kept[number] = [*ask.messages[instructed:], answer.message]
    prompt, sampled = answer.used.prompt_tokens, answer.used.sampled_tokens
    whole = answer.generation.finish in ("stop", "stop_string")
    return _head_responses(exchange, number) | {
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


def _head_responses(exchange: Exchange, number: str) -> dict[str, Json]:
    body, own = exchange.body, exchange.session.served.sampling
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
        "temperature": own.temperature,
        "top_p": own.top_p,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
    }


# Anthropic's messages

_ANTHROPIC: Types = {**COMMON, "tool_choice": "an object", "cache_control": "an object", "output_config": "an object"}
_ANTHROPIC_FIELDS = "messages system max_tokens stop_sequences"
_HARMLESS_ANTHROPIC: dict[str, Sequence[Json]] = {  # the policy thinks as it likes, and a client gets no thinking to clear
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}, {"type": "adaptive", "budget_tokens": 0}),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


def read_anthropic(exchange: Exchange) -> Ask:
    """Parse an Anthropic messages request. Raises RequestError."""
    body = exchange.body
    check_fields(body, _ANTHROPIC, _ANTHROPIC_FIELDS, _HARMLESS_ANTHROPIC)
    tools = client_tools(body, (None, "custom"), "the client's own", "input_schema")
    choice = as_dict(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = check_types(choice, {"disable_parallel_tool_use": "true or false"}, "tool_choice").get("type")
    calls, name = tool_choice({"any": "required", "tool": choice}.get(str(kind), kind), tools)
    system = text_of(body.get("system"), "system")
    return Ask(
        messages=in_order([*([Message("system", system)] if system else []), *_messages_anthropic(list_field(body, "messages"))]),
        tools=[] if kind == "none" else tools,
        max_tokens=number(body, "max_tokens"),
        stop=stops(body.get("stop_sequences"), "stop_sequences"),
        stop_field="stop_sequences",
        schema=json_schema(as_dict(body.get("output_config") or {}, "output_config").get("format"), "output_config.format"),
        schema_field="output_config.format",
        calls=calls,
        only=name,
        single=choice.get("disable_parallel_tool_use") is True,
        other=other_sampling(body, exchange.session.served.sampling),
    )


def write_anthropic(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """Build the message of the one answer."""
    (answer,) = answers
    text: list[Json] = [{"type": "text", "text": answer.message.content}] if answer.message.content else []
    calls = [_block(call, call.arguments) for call in answer.message.tool_calls]
    return {**_head_anthropic(exchange), "content": [*text, *calls], **_ending(answer), "usage": _usage_anthropic(answer)}


async def stream_anthropic(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """Stream the message as events: text as sampled, calls at the end of the turn."""

    def send(kind: str, **row: Json) -> str:
        return event({"type": kind, **row}, kind)

    def piece(index: int, **delta: Json) -> str:
        return send("content_block_delta", index=index, delta=delta)

    nothing = {"input_tokens": 0, "output_tokens": 0}
    begun = {**_head_anthropic(exchange), "content": [], "stop_reason": None, "stop_sequence": None, "usage": nothing}
    yield send("message_start", message=begun)
    blocks = 0
    async for part in live.parts():
        if part.text and not blocks:
            blocks = 1
            yield send("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if part.text:
            yield piece(0, type="text_delta", text=part.text)
    (answer,) = live.answers()
    if blocks:
        yield send("content_block_stop", index=0)
    for index, call in enumerate(answer.message.tool_calls, start=blocks):
        yield send("content_block_start", index=index, content_block=_block(call, {}))
        yield piece(index, type="input_json_delta", partial_json=json.dumps(call.arguments, ensure_ascii=False))
        yield send("content_block_stop", index=index)
    yield send("message_delta", delta=_ending(answer), usage=_usage_anthropic(answer))
    yield send("message_stop")


def anthropic_error(problem: RequestError) -> dict[str, Json]:
    """Build an error object of Anthropic's interface."""
    kind = _KINDS.get(problem.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(problem)}}


ANTHROPIC = Wire("v1/messages", read_anthropic, write_anthropic, stream_anthropic, anthropic_error, "error")


def _messages_anthropic(rows: Sequence[Json]) -> list[Message]:
    """Convert turns to messages; tool results in a user's turn become separate messages before its text."""
    found: list[Message] = []
    for index, row in enumerate(rows):
        where = f"messages[{index}]"
        role, content = as_dict(row, where).get("role"), row.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{where}: expected the role 'user' or 'assistant'")
        if content is None and role != "assistant":
            raise RequestError(f"{where}.content: expected text or a list of blocks")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_field(row, "content", where)
        text, thought, calls, answers = list[str](), list[str](), list[ToolCall](), list[Message]()
        for place, item in enumerate(blocks):
            here = f"{where}.content[{place}]"
            block = as_dict(item, here)
            kind = block.get("type")
            if role == "assistant" and kind == "tool_use":
                calls.append(call_of(block.get("name"), block.get("input"), block.get("id"), here))
            elif role == "assistant" and is_thought(block):
                thought.append(thought_of(block))
            elif role != "assistant" and kind == "tool_result":
                said = text_of(block.get("content"), f"{here}.content")
                check_types(block, {"tool_use_id": "text", "is_error": "true or false"}, here)
                if block.get("tool_use_id") is None:
                    raise RequestError(f"{here}.tool_use_id: expected text")
                answers.append(Message("tool", said, tool_call_id=block["tool_use_id"]))
            else:
                text.append(text_of([block], here))
        found += answers
        if text or not answers:
            found.append(Message(role, "".join(text), tuple(calls), reasoning="".join(thought) or None))
    if not found or found[-1].role == "assistant":
        raise RequestError("messages: the last one must be the user's; a turn that the client begins cannot be continued")
    return found


def _block(call: ToolCall, given: Json) -> dict[str, Json]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _head_anthropic(exchange: Exchange) -> dict[str, Json]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": exchange.model}


def _ending(answer: Answer) -> dict[str, Json]:
    reason = "tool_use" if answer.message.tool_calls else "stop_sequence" if answer.stopped else "end_turn"
    if answer.generation.finish not in ("stop", "stop_string"):
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": answer.stopped if reason == "stop_sequence" else None}


def _usage_anthropic(answer: Answer) -> dict[str, Json]:
    return {"input_tokens": answer.used.prompt_tokens, "output_tokens": answer.used.sampled_tokens}
