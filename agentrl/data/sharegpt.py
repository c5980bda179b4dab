"""Two layouts of function calling that write calls as text, in messages `{"from": ..., "value": ...}` under `conversations`:

Hermes (NousResearch/hermes-function-calling-v1): from "system", "human", "gpt", "tool"; a call is `<tool_call>` with an object of
`name` and `arguments` (JSON, or Python's way to write it), a result `<tool_response>`; tools in the key `tools`, or between
`<tools>` and `</tools>` in the system message.

ToolACE (Team-ACE/ToolACE): a key `system`, whose text holds a JSON list of functions; from "user", "assistant", "tool"; calls as
`[name(a=1, b="x"), other()]`, where names may hold spaces; results of all calls as one list.

A system message that tells the model its tools and how to call them is left out of the chat (in ToolACE: from the list of
functions on), since the model's own chat template says both, in its own way.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.data.chats import Chat, checked
from agentrl.data.text_calls import RESULT, TAGGED, Call, bracket_calls, literal, result_names, tagged_calls, thoughts
from agentrl.errors import BadRowError
from agentrl.tool.forms import REASONING, Declaration, arguments_of, declarations, parsed, without_padding
from agentrl.trajectory import Message, ToolCall

T = TypeVar("T")
ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
_TOOLS = re.compile(r"<tools>\s*(\[.*?\])\s*</tools>", re.S)
_LIST = re.compile(r"\[\s*\{\s*\"")


def sharegpt_chat(row: Mapping[str, Any]) -> Chat:
    """A row of either layout. Raises BadRowError, which says what is wrong with it."""
    turns = row.get("conversations")
    if isinstance(turns, str):
        turns = parsed(turns, "conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRowError("conversations: expected a list of messages")
    said = [_said(turn, f"conversations[{number}]") for number, turn in enumerate(turns)]
    given = {word for turn in turns for word, value in turn.items() if value not in (None, [], {})}
    if odd := sorted(given & {"weight", "loss", "tool_calls", *REASONING}):
        raise BadRowError(f"conversations: {odd[0]} is not read in this layout; write the row in OpenAI's, under messages")
    unread = Counter(f"turn.{word}" for turn in turns for word, value in turn.items() if word not in ("from", "value") and value)
    system = row.get("system") if isinstance(row.get("system"), str) else ""
    if said[0][0] == "system":
        system, said = said[0][1], said[1:]
    kept, inside = _split(system or "")
    tools = declarations(row.get("tools")) or declarations(inside)
    tagged = any(tag in text for _, text in [("", system or ""), *said] for tag in ("<tools>", "<tool_call>", "<tool_response>"))
    if tagged:
        messages = [part for role, text in said for part in _hermes(role, text)]
    else:
        messages = [part for role, text in said for part in _toolace(role, text)]
    opening = [Message("system", kept)] if kept else []
    every = tuple(_without_padding(message, tools) for message in (*opening, *_paired(messages)))
    return checked(Chat(every, tuple(message.role == "assistant" for message in every), tools, unread))


def _without_padding(message: Message, tools: tuple[Declaration, ...]) -> Message:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls = (
        replace(call, arguments=without_padding(call.arguments or {}, schemas.get(call.name, {}))) for call in message.tool_calls
    )
    return replace(message, tool_calls=tuple(calls))


def _said(turn: Any, at: str) -> tuple[str, str]:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
        raise BadRowError(f'{at}: expected {{"from": ..., "value": ...}}')
    role = ROLES.get(str(turn.get("from")))
    if role is None:
        raise BadRowError(f"{at}.from: expected one of {', '.join(ROLES)}, got {turn.get('from')!r}")
    return role, turn["value"]


def _split(system: str) -> tuple[str, list[Any] | None]:
    """What is kept of a system message, and the functions in it."""
    if found := _TOOLS.search(system):
        return "", _read(literal, found[1], "the functions of the system message")
    if found := _LIST.search(system):
        try:
            tools, _ = json.JSONDecoder().raw_decode(system, found.start())
        except ValueError as problem:
            raise BadRowError(f"the functions of the system message: not JSON: {problem}") from None
        before = system[: found.start()].rstrip()
        # The sentence that leads over to the list goes with it.
        return before.rpartition("\n")[0].strip() if before.endswith(":") else before, tools
    return system.strip(), None


def _hermes(role: str, text: str) -> list[Message]:
    if role == "tool":
        return [Message("tool", part) for part in RESULT.findall(text) or [text.strip()]]
    if role != "assistant":
        return [Message(role, text)]  # type: ignore[arg-type]
    reasoning, text = thoughts(text)
    calls = _calls(_read(tagged_calls, text, "a <tool_call>"))
    rest = TAGGED.sub("", text).strip()
    if "<tool_call>" in rest:
        raise BadRowError("a <tool_call> that does not end")
    return [Message("assistant", rest, calls, reasoning=reasoning or None)]


def _toolace(role: str, text: str) -> list[Message]:
    if role == "tool":
        try:
            results = json.loads(text)
        except ValueError:
            return [Message("tool", text)]
        if not isinstance(results, list) or not all(isinstance(item, Mapping) and "results" in item for item in results):
            return [Message("tool", text)]
        return [Message("tool", json.dumps(item["results"], ensure_ascii=False), name=item.get("name")) for item in results]
    if role != "assistant":
        return [Message(role, text)]  # type: ignore[arg-type]
    reasoning, text = thoughts(text)
    calls = _calls(_read(bracket_calls, text, "a list of calls"))
    return [Message("assistant", "" if calls else text.strip(), calls, reasoning=reasoning or None)]


def _calls(found: list[Call]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, arguments_of(arguments, f"a call of {name!r}")) for name, arguments in found)


def _read(read: Callable[[str], T], text: str, what: str) -> T:
    try:
        return read(text)
    except ValueError as problem:
        raise BadRowError(f"{what}: {problem}"[:200]) from None


def _paired(messages: list[Message]) -> list[Message]:
    """Results one a call: if one message answers several calls, or several answer one, they are joined."""
    found, at = list[Message](), 0
    while at < len(messages):
        found.append(messages[at])
        calls = [call.name for call in messages[at].tool_calls]
        at += 1
        results = []
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        if len(results) > len(calls) > 0:
            results = [Message("tool", "\n".join(result.content for result in results))]
        names = [result.name for result in results]
        if sorted(map(str, names)) != sorted(calls):
            names = result_names([result.content for result in results], calls)
        results = [replace(result, name=name) for result, name in zip(results, names, strict=True)]
        found += results
    return found
