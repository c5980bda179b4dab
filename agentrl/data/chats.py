"""A conversation to train on, and OpenAI's layout of one:

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                                                        "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]},
                  {"role": "tool", "tool_call_id": "a", "content": "..."},
                  {"role": "assistant", "content": "...", "weight": 0}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {...}}}], "parallel_tool_calls": true}

An assistant's message with `weight` 0 is context. Other keys of a row are not looked at; tools, calls and reasoning may have
other forms (agentrl/tool/forms.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.errors import BadRowError
from agentrl.tool.forms import (
    REASONING,
    Declaration,
    FormError,
    calls_of,
    declarations,
    is_thought,
    paired,
    parsed,
    reasoning_of,
    result_of,
    thought_of,
)
from agentrl.trajectory import Message

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = {"role", "content", "tool_calls", "tool_call_id", "tool_use_id", "call_id", "name", "tool_name", "weight", "refusal",
         "function_call", "thinking_blocks", "reasoning_details", *REASONING}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """`trained[i]`: whether message i is an assistant's whose tokens are learned. `tools` in OpenAI's function format. `unread`:
    how often a key of a message was there that nothing is made of."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Declaration, ...]
    unread: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def content(self) -> str:
        """What is said, however its row writes it: equal for equal conversations."""
        parts = [
            (one.role, one.content, one.reasoning, [(call.name, call.arguments) for call in one.tool_calls])
            for one in self.messages
        ]
        return json.dumps(parts, sort_keys=True)


def openai_chat(row: Mapping[str, Any], *, table: bool = False) -> Chat:
    """A row of OpenAI's layout. `table`: of a file that has each column in each row. Raises BadRowError."""
    tools = declarations(row.get("tools"), table=table)
    if row.get("functions") is not None:
        raise BadRowError("functions: the older layout; name them in tools, and call them in tool_calls")
    chat = messages_of(row.get("messages"), "messages", tools, table=table)
    if row.get("parallel_tool_calls") is False:
        for number, message in enumerate(chat.messages):
            if len(message.tool_calls) > 1:
                raise BadRowError(
                    f"messages[{number}]: {len(message.tool_calls)} calls at once, and parallel_tool_calls is false"
                )
    return checked(chat)


def messages_of(given: Any, key: str, tools: tuple[Declaration, ...] = (), *, table: bool = False) -> Chat:
    """Messages of OpenAI's layout as a chat that is not checked yet. Raises BadRowError."""
    if isinstance(given, str):  # tables often keep them as text, which has only the nulls that were written
        given, table = parsed(given, key), False
    if not isinstance(given, list) or not given:
        raise FormError(key, "expected a list of messages")
    messages, trained, unread = list[Message](), list[bool](), Counter[str]()
    for number, item in enumerate(given):
        at = f"{key}[{number}]"
        if not isinstance(item, Mapping):
            raise FormError(at, "expected an object with a role and content")
        message = message_of(item, at, tools, table=table)
        weight = item.get("weight")
        if weight not in (None, 0, 1):
            raise FormError(f"{at}.weight", f"expected 0 or 1, got {weight!r}")
        messages.append(message)
        trained.append(message.role == "assistant" and weight != 0)
        unread.update(
            f"{message.role}.{word}" for word, value in item.items() if word not in _READ and value not in (None, [], {})
        )
        if message.role in ("system", "user") and item.get("name"):
            unread[f"{message.role}.name"] += 1
    return Chat(tuple(messages), tuple(trained), tools, unread)


def message_of(item: Mapping[str, Any], at: str, tools: tuple[Declaration, ...] = (), *, table: bool = False) -> Message:
    """A message of OpenAI's layout. Raises BadRowError."""
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise FormError(f"{at}.role", f"expected one of {', '.join(ROLES)}, got {role!r}")
    if item.get("function_call") is not None:
        raise FormError(f"{at}.function_call", "the older layout; write it as tool_calls")
    calls = calls_of(item.get("tool_calls"), f"{at}.tool_calls", tools, table=table)
    if calls and role != "assistant":
        raise FormError(f"{at}.tool_calls", "expected a list, of an assistant's message")
    content, thought = _text(item.get("content") or item.get("refusal"), at)
    if role == "tool":
        return result_of(item, content, at)
    if role != "assistant":
        return Message(ROLES[role], content)  # type: ignore[arg-type]
    if not (content or calls):
        raise FormError(at, "an assistant's message without content and calls")
    return Message("assistant", content, calls, reasoning=reasoning_of(item, at) or thought or None)


def _text(content: Any, at: str) -> tuple[str, str]:
    """The text of a content, and the reasoning in it."""
    if content is None or isinstance(content, str):
        return content or "", ""
    given = content if isinstance(content, list) else [content]
    parts = [part for part in given if not is_thought(part)]
    if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts), "".join(thought_of(part) for part in given if is_thought(part))
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
    raise FormError(f"{at}.content", f"only text can be trained on, got {', '.join(sorted(kinds - {'text'}))}")


def checked(chat: Chat) -> Chat:
    """The chat with ids of calls and names of results filled in, results in the order of their calls, and without what follows
    its last trained message.

    Raises BadRowError if nothing of it is trained, a call names no tool of its, or a result answers no call.
    """
    if not any(chat.trained):
        raise BadRowError("no assistant's message to learn")
    end = max(number for number, trained in enumerate(chat.trained) if trained) + 1
    names = [tool["function"]["name"] for tool in chat.tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FormError("tools", f"two are called {twice!r}. Leave one of them out")
    for number, message in enumerate(chat.messages[:end]):
        for call in message.tool_calls:
            if call.name not in names:
                raise BadRowError(f"messages[{number}]: a call of {call.name!r}, which its tools do not have")
    return replace(chat, messages=paired(chat.messages[:end]), trained=chat.trained[:end])
