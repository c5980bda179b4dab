"""Chat messages of OpenAI's form, read and written."""

from __future__ import annotations

from agentrl.backends.endpoint.ask import as_dict, call_of, listed, read_by_form, text_of
from agentrl.backends.endpoint.errors import RequestError
from agentrl.backends.endpoint.fields import typed
from agentrl.render.toolcalls import write_call
from agentrl.tool.forms import REASONING, reasoning_of
from agentrl.trajectory import Json, Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(rows: Json) -> list[Message]:
    """Raises RequestError for a message of another form (images, unknown roles, arguments that are not JSON)."""
    if not isinstance(rows, list) or not rows:
        raise RequestError("messages: expected a non-empty list")
    return [_message(row, f"messages[{index}]") for index, row in enumerate(rows)]


def write_message(message: Message) -> dict[str, Json]:
    """An assistant's message."""
    row: dict[str, Json] = {"role": "assistant", "content": message.content or None}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [write_call(call) for call in message.tool_calls]
    return row


def _message(row: Json, where: str) -> Message:
    typed(row, {"role": "text", "tool_call_id": "text", "name": "text", **dict.fromkeys(REASONING, "text")}, where)
    if row.get("role") not in _ROLES:
        raise RequestError(f"{where}: expected an object with a role among {', '.join(_ROLES)}")
    if row.get("function_call") is not None:
        raise RequestError(f"{where}.function_call: the older layout. Send it as tool_calls")
    with read_by_form():
        reasoning = reasoning_of(row, where)
    calls = []
    for index, item in enumerate(listed(row, "tool_calls", where)):
        here = f"{where}.tool_calls[{index}]"
        function = as_dict(as_dict(item, here).get("function"), here)
        calls.append(call_of(function.get("name"), function.get("arguments"), item.get("id"), here))
    return Message(
        role=_ROLES[row["role"]],  # type: ignore[arg-type]
        content=text_of(row.get("content"), f"{where}.content", ("text", "refusal")),
        tool_calls=tuple(calls),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        reasoning=reasoning,
    )
