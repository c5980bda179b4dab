"""Chat requests and messages in OpenAI's format: readers that check each field and name the field at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from agentrl.data.chat_forms import REASONING, arguments_of, reasoning_of
from agentrl.data.trajectory import Json, Message, ToolCall
from agentrl.render.tool_calls import write_call
from agentrl.utils.errors import BadRowError, UserError


class RequestError(UserError):
    """Rejected request; the message begins with the field at fault, if any.

    `status`: HTTP status. `code`: OpenAI's error code, where clients read one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


# Types of fields

Types = Mapping[str, str]
"""Field -> "text", "a number", "true or false", "a list" or "an object"."""
_IS: dict[str, type | tuple[type, ...]] = {
    "text": str,
    "a number": (int, float),
    "true or false": bool,
    "a list": list,
    "an object": dict,
}
RANGES: Mapping[str, tuple[float, float]] = {"temperature": (0, 1e6), "top_p": (0, 1), "top_k": (-1, 2**31 - 1)}
"""Numeric field -> allowed range, both ends included; other values are rejected."""


def check_types(row: Any, types: Types, where: str = "") -> dict[str, Json]:
    """Check an object's fields against `types` (null or missing is allowed) and return it. `where`: its name, "" for a body.

    Raises RequestError."""
    if not isinstance(row, dict):
        raise RequestError(f"{where}: expected an object")
    for key, kind in types.items():
        value = row.get(key)
        if value is not None and (not isinstance(value, _IS[kind]) or (isinstance(value, bool) and kind == "a number")):
            raise RequestError(f"{f'{where}.' if where else ''}{key}: expected {kind}")
        least, most = RANGES.get(key, (None, None))
        if isinstance(value, int | float) and least is not None and most is not None and not least <= value <= most:
            raise RequestError(f"{key}: expected a number from {least:g} to {most:g}, got {repr(value)[:80]}")
    return row


def list_field(body: Mapping[str, Json], key: str, where: str = "") -> list[Json]:
    """Return a list field of a body or object `where`; empty if missing. Raises RequestError for anything else."""
    value = body.get(key)
    if value is not None and not isinstance(value, list):
        raise RequestError(f"{f'{where}.' if where else ''}{key}: expected a list")
    return list(value or [])


@contextmanager
def read_by_form() -> Iterator[None]:
    """Turn the BadRowError of a row reader into a RequestError."""
    try:
        yield
    except BadRowError as problem:
        raise RequestError(str(problem)) from None


def text_of(content: Json, where: str, kinds: Sequence[str] = ("text",), *, needed: bool = False) -> str:
    """Return the text of a content: a string or a list of text parts. Raises RequestError for anything else (images, audio), and
    for null if a text is `needed`."""
    if isinstance(content, str) or (content is None and not needed):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") in kinds for part in content):
        texts = [part.get("refusal" if part["type"] == "refusal" else "text") for part in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise RequestError(f"{where}: expected text")


# Messages


def number_calls(message: Message, turn: int) -> Message:
    """Return the turn with call ids that are unique in the session."""
    calls = tuple(replace(call, id=f"call_{turn}_{i}") for i, call in enumerate(message.tool_calls))
    return replace(message, tool_calls=calls)


def call_of(name: Json, arguments: Json, number: Json, where: str) -> ToolCall:
    """Read a call of a history. Raises RequestError if it is invalid."""
    if not isinstance(name, str) or not isinstance(number, str) or arguments is None:
        raise RequestError(f"{where}: expected a call with a name, an id and arguments")
    with read_by_form():
        return ToolCall(name, arguments_of(arguments, f"{where}.arguments"), id=number)


def as_dict(value: Any, where: str) -> dict[str, Json]:
    """Return a value that must be an object. Raises RequestError for any other."""
    if not isinstance(value, dict):
        raise RequestError(f"{where}: expected an object")
    return value


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(rows: Json) -> list[Message]:
    """Read messages. Raises RequestError for other formats (images, unknown roles, arguments that are not JSON)."""
    if not isinstance(rows, list) or not rows:
        raise RequestError("messages: expected a non-empty list")
    found = []
    for place, row in enumerate(rows):
        where = f"messages[{place}]"
        check_types(row, dict.fromkeys(("role", "tool_call_id", "name", "refusal", *REASONING), "text"), where)
        if row.get("role") not in _ROLES:
            raise RequestError(f"{where}: expected an object with a role among {', '.join(_ROLES)}")
        if row.get("function_call") is not None:
            raise RequestError(f"{where}.function_call: the older layout. Send it as tool_calls")
        with read_by_form():
            reasoning = reasoning_of(row, where)
        calls = []
        for index, item in enumerate(list_field(row, "tool_calls", where)):
            here = f"{where}.tool_calls[{index}]"
            function = as_dict(as_dict(item, here).get("function"), here)
            calls.append(call_of(function.get("name"), function.get("arguments"), item.get("id"), here))
        said = row.get("content") or row.get("refusal") or row.get("content")  # a refusal comes with null content
        needed = row["role"] != "assistant" or not (calls or reasoning or "content" in row)
        message = Message(
            role=_ROLES[row["role"]],  # type: ignore[arg-type]
            content=text_of(said, f"{where}.content", ("text", "refusal"), needed=needed),
            tool_calls=tuple(calls),
            tool_call_id=row.get("tool_call_id"),
            name=row.get("name"),
            reasoning=reasoning,
        )
        found.append(message)
    return found


def write_message(message: Message) -> dict[str, Json]:
    """Write an assistant's message."""
    row: dict[str, Json] = {"role": "assistant", "content": message.content or None}
    if message.reasoning is not None:
        row["reasoning_content"] = message.reasoning
    if message.tool_calls:
        row["tool_calls"] = [write_call(call) for call in message.tool_calls]
    return row
