"""Converts OpenAI chat messages to agentrl's and back; what cannot be converted is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import UserError
from agentrl.rollout.engine import Sampling
from agentrl.trajectory import Json, Message, ToolCall

_KNOWN = {
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens",
    "seed", "stream", "stream_options", "n", "user", "parallel_tool_calls", "store", "metadata", "stop", "logprobs",
    "top_logprobs",
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RequestError(UserError):
    """A request asks for something that this server does not support; names the field."""


def read_messages(rows: Json) -> list[Message]:
    """Raises RequestError for a message of another form (images, unknown roles, arguments that are not JSON)."""
    if not isinstance(rows, list) or not rows:
        raise RequestError("messages: expected a non-empty list")
    return [_message(row, f"messages[{index}]") for index, row in enumerate(rows)]


def read_sampling(body: Mapping[str, Json], default: Sampling, stops: tuple[int, ...]) -> Sampling:
    """The defaults, overridden by the request's options. Raises RequestError for options the ledger could not record."""
    unknown = sorted(key for key, value in body.items() if key not in _KNOWN and value is not None)
    if unknown:
        raise RequestError(f"not supported: {', '.join(unknown)}")
    if body.get("n") not in (None, 1):
        raise RequestError("n: only 1 is supported")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise RequestError("tool_choice: only 'auto' and 'none' are supported")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    changes: dict[str, Any] = {"stop_token_ids": stops}
    if limit is not None:
        changes["max_tokens"] = min(int(limit), default.max_tokens)
    for name in ("temperature", "top_p", "seed"):
        if body.get(name) is not None:
            changes[name] = body[name]
    return replace(default, **changes)


def read_stops(body: Mapping[str, Json]) -> tuple[str, ...]:
    """The request's stop strings. Raises RequestError if they are not valid."""
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(text, str) and text for text in stops):
        raise RequestError("stop: expected a string or up to 4 of them, none of them empty")
    return tuple(stops)


def wants_logprobs(body: Mapping[str, Json]) -> bool:
    """Whether the request asks for log probabilities. Raises RequestError if it asks for those of other tokens too."""
    if body.get("top_logprobs"):
        raise RequestError("top_logprobs: only 0 is supported; the engine reports only the log probability of the sampled token")
    return bool(body.get("logprobs"))


def unique_ids(message: Message, turn: int) -> Message:
    """The same turn with call ids that are unique in the conversation."""
    calls = tuple(replace(call, id=f"call_{turn}_{i}") for i, call in enumerate(message.tool_calls))
    return replace(message, tool_calls=calls)


def write_message(message: Message) -> dict[str, Json]:
    """The assistant message of a response. A malformed call can only be shown as text."""
    broken = [call.raw for call in message.tool_calls if call.arguments is None]
    content = "\n".join(part for part in (message.content, *broken) if part)
    row: dict[str, Json] = {"role": "assistant", "content": content or None}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    calls = [call for call in message.tool_calls if call.arguments is not None]
    if calls:
        row["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in calls
        ]
    return row


def identity(row: Mapping[str, Json]) -> str:
    """A key that is equal for equal messages of a history, however a client re-encodes them on the way back."""
    calls = [
        (call["id"], call["function"]["name"], _loads(call["function"]["arguments"])) for call in row.get("tool_calls") or []
    ]
    role = _ROLES.get(str(row.get("role")), "")
    return json.dumps([role, _text(row.get("content"), ""), calls, row.get("tool_call_id")], sort_keys=True)


def _message(row: Json, where: str) -> Message:
    if not isinstance(row, dict) or row.get("role") not in _ROLES:
        raise RequestError(f"{where}: expected an object with a role among {', '.join(_ROLES)}")
    calls = []
    for index, call in enumerate(row.get("tool_calls") or []):
        arguments = _loads(call["function"]["arguments"])
        if not isinstance(arguments, dict):
            raise RequestError(f"{where}.tool_calls[{index}]: arguments are not a JSON object")
        calls.append(ToolCall(call["function"]["name"], arguments, id=call["id"]))
    return Message(
        role=_ROLES[row["role"]],  # type: ignore[arg-type]
        content=_text(row.get("content"), where),
        tool_calls=tuple(calls),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        reasoning=row.get("reasoning_content"),
    )


def _text(content: Json, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(part["text"] for part in content)
    raise RequestError(f"{where}.content: expected text")


def _loads(text: Json) -> Json:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
