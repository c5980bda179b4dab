"""OpenAI's chat completions: a request to `Ask`, and answers to a completion or its chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence

from agentrl.backends.endpoint.ask import (
    CHOICES,
    Ask,
    as_dict,
    chosen,
    in_order,
    json_schema,
    listed,
    number,
    only,
    other_sampling,
    stops,
    tool,
)
from agentrl.backends.endpoint.errors import RequestError
from agentrl.backends.endpoint.fields import COMMON, typed
from agentrl.backends.endpoint.live import Live
from agentrl.backends.endpoint.messages import read_messages, write_message
from agentrl.backends.endpoint.session import Answer
from agentrl.backends.endpoint.wire import Decode, Exchange, Wire, event
from agentrl.trajectory import Json

_KNOWN = {
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens",
    "parallel_tool_calls", "response_format", "seed", "stream", "stream_options", "n", "user", "stop", "logprobs",
    "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier",
}  # fmt: skip
_HARMLESS: dict[str, Sequence[Json]] = {
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}


def read_chat(exchange: Exchange) -> Ask:
    """Raises RequestError."""
    body = exchange.body
    if body.get("top_logprobs"):
        raise RequestError("top_logprobs: only 0 is supported; the engine reports only the log probability of the sampled token")
    only(body, _KNOWN, _HARMLESS)
    typed(body, COMMON)
    choice = body.get("tool_choice")
    tools = [] if choice == "none" else [_tool(row, f"tools[{i}]") for i, row in enumerate(listed(body, "tools"))]
    calls, name = chosen(as_dict(choice.get("function"), "tool_choice.function") if isinstance(choice, dict) else choice, tools)
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
        other=other_sampling(body, exchange.own),
    )


def write_chat(exchange: Exchange, ask: Ask, answers: Sequence[Answer]) -> dict[str, Json]:
    """A completion with one choice for each answer."""
    choices = [
        {
            "index": index,
            "message": write_message(answer.message),
            "finish_reason": finish_of(answer),
            "logprobs": _table(answer, exchange.decode) if ask.logprobs and exchange.decode is not None else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {**_head("chat.completion", exchange.model), "choices": choices, "usage": _usage(answers)}


async def stream_chat(exchange: Exchange, ask: Ask, live: Live) -> AsyncIterator[str]:
    """The same in chunks, as it is sampled: text with the tokens that settle it, calls once their turn is over."""
    head = _head("chat.completion.chunk", exchange.model)
    table = exchange.decode if ask.logprobs else None

    def chunk(choice: int, delta: Json, finish: str | None = None, logprobs: Json = None) -> str:
        row = {"index": choice, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return event({**head, "choices": [row]})

    for choice in range(ask.choices):
        yield chunk(choice, {"role": "assistant", "content": ""})
    async for heard in live.heard():
        told = None if table is None else write_logprobs(heard.token_ids, heard.logprobs, table)
        if heard.text or told is not None:
            yield chunk(heard.choice, {"content": heard.text} if heard.text else {}, logprobs=told)
    answers = live.answers()
    for choice, (answer, rest) in enumerate(answers):
        row = write_message(answer.message)
        delta = {key: row[key] for key in ("reasoning_content", "tool_calls") if key in row}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        if rest or delta:
            yield chunk(choice, {**({"content": rest} if rest else {}), **delta})
        yield chunk(choice, {}, finish_of(answer))
    if (exchange.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage([answer for answer, _ in answers])})
    yield "data: [DONE]\n\n"


def finish_of(answer: Answer) -> str:
    """OpenAI's word for why a turn ended."""
    if answer.generation.finish not in ("stop", "stop_string"):
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def write_logprobs(token_ids: Sequence[int], logprobs: Sequence[float], decode: Decode) -> dict[str, Json]:
    """One entry per sampled token, special ones included: log pi under the distribution that was sampled from."""
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        token = decode([token_id])
        # A token that holds only part of a character decodes to U+FFFD, which does not reveal its bytes.
        raw = None if "\ufffd" in token else list(token.encode())
        content.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}


def _table(answer: Answer, decode: Decode) -> dict[str, Json]:
    return write_logprobs(answer.generation.token_ids, answer.generation.logprobs, decode)


def chat_error(problem: RequestError) -> dict[str, Json]:
    """An error of OpenAI's interfaces."""
    kind = "server_error" if problem.status >= 500 else "invalid_request_error"
    field, found, _ = str(problem).partition(":")
    param = field if found and problem.status == 400 and field.replace(".", "").isidentifier() else None
    return {"error": {"message": str(problem), "type": kind, "param": param, "code": problem.code}}


CHAT = Wire("v1/chat/completions", read_chat, write_chat, stream_chat, chat_error)


def _head(kind: str, model: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def _usage(answers: Sequence[Answer]) -> dict[str, Json]:
    prompt, sampled = answers[0].prompt_tokens, sum(len(answer.generation.token_ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _tool(row: Json, where: str) -> dict[str, Json]:
    if not isinstance(row, dict) or row.get("type", "function") != "function":
        raise RequestError(f"{where}: only tools of type 'function' are supported")
    return tool(row, as_dict(row.get("function"), where).get("parameters"), where)
