"""A conversation to train on, and OpenAI's layout of one:

    {"messages": [{"role": "user", "content": "..."},
                  {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
                                                        "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]},
                  {"role": "tool", "tool_call_id": "a", "content": "..."},
                  {"role": "assistant", "content": "...", "weight": 0}],
     "tools": [{"type": "function", "function": {"name": "f", "parameters": {...}}}], "parallel_tool_calls": true}

An assistant's message with `weight` 0 is context. Other keys of a row are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.data.files import BadRowError
from agentrl.plain_data import read_json
from agentrl.trajectory import Message, ToolCall

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class Chat:
    """`trained[i]`: whether message i is an assistant's whose tokens are learned. `tools` in OpenAI's function format."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[dict[str, Any], ...]


def openai_chat(row: Mapping[str, Any]) -> Chat:
    """A row of OpenAI's layout. Raises BadRowError, which says what is wrong with it."""
    tools = tools_of(row.get("tools"))
    if "functions" in row:
        raise BadRowError("functions: the older layout; name them in tools, and call them in tool_calls")
    messages, trained = messages_of(row.get("messages"), "messages")
    if row.get("parallel_tool_calls") is False:
        for number, message in enumerate(messages):
            if len(message.tool_calls) > 1:
                raise BadRowError(
                    f"messages[{number}]: {len(message.tool_calls)} calls at once, and parallel_tool_calls is false"
                )
    return checked(Chat(messages, trained, tools))


def messages_of(given: Any, key: str) -> tuple[tuple[Message, ...], tuple[bool, ...]]:
    """Messages of OpenAI's layout, and which of them are trained. Raises BadRowError."""
    if isinstance(given, str):  # tables often keep them as text
        given = parsed(given, key)
    if not isinstance(given, list) or not given:
        raise BadRowError(f"{key}: expected a list of messages")
    messages, trained = list[Message](), list[bool]()
    for number, item in enumerate(given):
        at = f"{key}[{number}]"
        if not isinstance(item, Mapping):
            raise BadRowError(f"{at}: expected an object with a role and content")
        message = _message(item, at)
        weight = item.get("weight", 1)
        if weight not in (0, 1):
            raise BadRowError(f"{at}.weight: expected 0 or 1, got {weight!r}")
        messages.append(message)
        trained.append(message.role == "assistant" and bool(weight))
    return tuple(messages), tuple(trained)


def _message(item: Mapping[str, Any], at: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRowError(f"{at}.role: expected one of {', '.join(ROLES)}, got {role!r}")
    if "function_call" in item:
        raise BadRowError(f"{at}.function_call: the older layout; write it as tool_calls")
    given = item.get("tool_calls") or []
    if not isinstance(given, list) or (given and role != "assistant"):
        raise BadRowError(f"{at}.tool_calls: expected a list, of an assistant's message")
    calls = tuple(_call(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(given))
    content = _text(item.get("content"), at)
    if role == "assistant" and not (content or calls):
        raise BadRowError(f"{at}: an assistant's message without content and calls")
    reasoning = item.get("reasoning_content")
    return Message(
        ROLES[role],  # type: ignore[arg-type]
        content,
        calls,
        tool_call_id=_id(item.get("tool_call_id"), f"{at}.tool_call_id") or None if role == "tool" else None,
        name=item.get("name") if isinstance(item.get("name"), str) and role == "tool" else None,
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
    )


def _text(content: Any, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
    raise BadRowError(f"{at}.content: only text can be trained on, got {', '.join(sorted(kinds - {'text'}))}")


def _call(item: Any, at: str) -> ToolCall:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRowError(f"{at}: expected an object with function.name and function.arguments")
    return ToolCall(function["name"], arguments_of(function.get("arguments"), at), _id(item.get("id"), f"{at}.id"))


def _id(given: Any, at: str) -> str:
    """The id of a call, which some data sets have as a number; "" if there is none."""
    if given is not None and not isinstance(given, str | int):
        raise BadRowError(f"{at}: expected text, got {type(given).__name__}")
    return "" if given is None else str(given)


def arguments_of(given: Any, at: str) -> dict[str, Any]:
    """The arguments of a call: an object, or one as JSON text. Raises BadRowError."""
    if isinstance(given, str):
        given = parsed(given or "{}", f"{at}.arguments")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRowError(f"{at}.arguments: expected an object, got {type(given).__name__}")
    return given


def parsed(text: str, at: str) -> Any:
    """JSON text within a row. Raises BadRowError."""
    try:
        return read_json(text)
    except (ValueError, RecursionError) as problem:
        raise BadRowError(f"{at}: not JSON: {problem}"[:200]) from None


def tools_of(given: Any, key: str = "tools") -> tuple[dict[str, Any], ...]:
    """Tools in OpenAI's function format, also from bare functions and from JSON text. Raises BadRowError."""
    if isinstance(given, str):
        given = parsed(given, key) if given.strip() else None
    if given is None:
        return ()
    if not isinstance(given, list):
        raise BadRowError(f"{key}: expected a list of tools")
    found = []
    for number, item in enumerate(given):
        function = item.get("function", item) if isinstance(item, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRowError(f"{key}[{number}]: expected a function with a name")
        found.append({"type": "function", "function": _function(function)})
    return tuple(found)


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """A function of OpenAI's format. Other layouts call its schema `arguments`, and an object "dict"."""
    schema = given.get("parameters", given.get("arguments"))
    schema = _json_schema(schema) if isinstance(schema, Mapping) else {}
    return {
        "name": given["name"],
        "description": given.get("description") or "",
        "parameters": {"type": "object", "properties": {}, **schema},
    }


_TYPES = {"dict": "object", "float": "number", "double": "number", "int": "integer", "list": "array", "tuple": "array",
          "str": "string", "bool": "boolean"}  # fmt: skip


def _json_schema(given: Any) -> Any:
    """A schema with JSON Schema's names of types, where data sets have Python's."""
    if isinstance(given, Mapping):
        return {
            key: _TYPES.get(item, item) if key == "type" and isinstance(item, str) else _json_schema(item)
            for key, item in given.items()
            if item is not None
        }
    return [_json_schema(item) for item in given] if isinstance(given, list) else given


def checked(chat: Chat) -> Chat:
    """The chat with ids of calls and names of results filled in, and without what follows its last assistant's message.

    Raises BadRowError if nothing of it is trained, a call names no tool of its, or a result answers no call.
    """
    if not any(chat.trained):
        raise BadRowError("no assistant's message to learn")
    end = max(number for number, message in enumerate(chat.messages) if message.role == "assistant") + 1
    names = [tool["function"]["name"] for tool in chat.tools]
    for number, message in enumerate(chat.messages[:end]):
        for call in message.tool_calls:
            if call.name not in names:
                raise BadRowError(f"messages[{number}]: a call of {call.name!r}, which its tools do not have")
    return replace(chat, messages=_answered(chat.messages[:end]), trained=chat.trained[:end])


def _answered(messages: Sequence[Message]) -> tuple[Message, ...]:
    found, waiting, made = list[Message](), dict[str, str](), 0
    for number, message in enumerate(messages):
        if message.role == "assistant":
            calls = []
            for call in message.tool_calls:
                made += 1
                calls.append(replace(call, id=call.id or f"call_{made}"))
            waiting = {call.id: call.name for call in calls}
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool":
            answers = message.tool_call_id or next(iter(waiting), None)
            if answers not in waiting:
                raise BadRowError(
                    f"messages[{number}]: a tool's result ({answers or 'without an id'}) that answers no call before it"
                )
            message = replace(message, tool_call_id=answers, name=waiting.pop(answers))
        found.append(message)
    return tuple(found)
