"""Conversations, preferences and function calls in the layouts of public data sets."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any, TypeVar

from agentrl.contrib.offline.text_calls import (
    TAGGED,
    Call,
    bracket_calls,
    literal,
    result_names,
    tagged_calls,
    tagged_results,
    thoughts,
)
from agentrl.contrib.toolkit.chat_forms import Declaration, calls_of, declarations, is_thought, result_of, without_padding
from agentrl.data.chat_forms import REASONING, FormError, arguments_of, pair_results, parse_field, reasoning_of, thought_of
from agentrl.data.trajectory import Message, ToolCall
from agentrl.utils.errors import BadRowError
from agentrl.utils.parsing import read_json

# A conversation to train on, and OpenAI's layout of one:
#
# {"messages": [{"role": "user", "content": "..."},
# {"role": "assistant", "tool_calls": [{"id": "a", "type": "function",
# "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
# {"role": "tool", "tool_call_id": "a", "content": "..."},
# {"role": "assistant", "content": "...", "weight": 0}],
# "tools": [{"type": "function", "function": {"name": "f", "parameters": {...}}}], "parallel_tool_calls": true}
#
# An assistant message with `weight` 0 is context. Other keys of a row are ignored; tools, calls and reasoning may have other
# forms (agentrl/data/chat_forms.py).

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ_KEYS = {"role", "content", "tool_calls", "tool_call_id", "tool_use_id", "call_id", "name", "tool_name", "weight", "refusal",
         "function_call", "thinking_blocks", "reasoning_details", *REASONING}  # fmt: skip

_TOOL_KEY = re.compile(r"tools?(_?(def|definition|schema|spec)s?)?$", re.I)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `trained[i]`: message i is an assistant message whose tokens are learned. `tools` in OpenAI's function
    format. `unread`: number of occurrences of each ignored message key."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[Declaration, ...]
    unread: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def content(self) -> str:
        """Return the conversation as canonical text, equal for equal conversations in any layout."""
        parts = [
            (one.role, one.content, one.reasoning, [(call.name, call.arguments) for call in one.tool_calls])
            for one in self.messages
        ]
        return json.dumps(parts, sort_keys=True)


def openai_chat(row: Mapping[str, Any], *, table: bool = False) -> Chat:
    """Convert a row of OpenAI's layout. `table`: the file has every column in every row. Raises BadRowError."""
    tools = declarations(row.get("tools"), table=table)
    if row.get("functions") is not None:
        raise BadRowError("functions: this older layout is not read. Declare them in tools, and call them in tool_calls")
    _check_unread_keys(row)
    chat = messages_of(row.get("messages"), "messages", tools, table=table)
    if row.get("parallel_tool_calls") is False:
        for number, message in enumerate(chat.messages):
            if len(message.tool_calls) > 1:
                raise BadRowError(
                    f"messages[{number}]: {len(message.tool_calls)} calls at once, and parallel_tool_calls is false"
                )
    return check_chat(chat)


def _check_unread_keys(row: Mapping[str, Any]) -> None:
    if row.get("system"):
        raise BadRowError("system: it is not read outside of messages. Make it the first message")
    _check_tools(row)


def _check_tools(row: Mapping[str, Any]) -> None:
    for key, value in row.items() if not row.get("tools") else ():
        if _TOOL_KEY.search(key) and re.search(r"""["']name["']\s*:""", str(value)):
            raise BadRowError(f"{key}: is not read, but looks like tools. Rename it to tools, or remove it")


def messages_of(given: Any, key: str, tools: tuple[Declaration, ...] = (), *, table: bool = False) -> Chat:
    """Convert messages of OpenAI's layout to an unchecked chat. Raises BadRowError."""
    if isinstance(given, str):  # tables often store messages as JSON text, whose nulls are all meant
        given, table = parse_field(given, key), False
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
            f"{message.role}.{word}" for word, value in item.items() if word not in _READ_KEYS and value not in (None, [], {})
        )
        if message.role in ("system", "user") and item.get("name"):
            unread[f"{message.role}.name"] += 1
    return Chat(tuple(messages), tuple(trained), tools, unread)


def message_of(item: Mapping[str, Any], at: str, tools: tuple[Declaration, ...] = (), *, table: bool = False) -> Message:
    """Convert a message of OpenAI's layout. Raises BadRowError."""
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise FormError(f"{at}.role", f"expected one of {', '.join(ROLES)}, got {role!r}")
    if item.get("function_call") is not None:
        raise FormError(f"{at}.function_call", "the older layout; write it as tool_calls")
    calls = calls_of(item.get("tool_calls"), f"{at}.tool_calls", tools, table=table)
    if calls and role != "assistant":
        raise FormError(f"{at}.tool_calls", "expected a list, of an assistant's message")
    content, thought = _text(item.get("refusal") if item.get("content") in (None, "", []) else item["content"], at)
    if role == "tool":
        return result_of(item, content, at)
    if role != "assistant":
        if item.get("content") is None:
            raise FormError(
                f"{at}.content", f"is missing, of a message of role {role!r}. Write it there, or leave the message out"
            )
        return Message(ROLES[role], content)  # type: ignore[arg-type]
    if TAGGED.search(content):
        raise FormError(f"{at}.content", "a <tool_call> as text; write it as tool_calls")
    inside = content.lstrip().startswith("<think>") or ("</think>" in content and "<think>" not in content)
    said, content = thoughts(content) if inside else ("", content)
    if content.lstrip().startswith("<think>"):
        raise FormError(f"{at}.content", "a <think> that does not end. Close it, or leave the message out")
    found = list(filter(None, (reasoning_of(item, at), thought, said)))
    if len({part.strip() for part in found}) > 1:
        raise FormError(at, "the reasoning in its content and the one next to it differ. Leave one of them out")
    return Message("assistant", content, calls, reasoning=found[0] if found else None)


def _text(content: Any, at: str) -> tuple[str, str]:
    """Return the text and the reasoning of a message content."""
    if content is None or isinstance(content, str):
        return content or "", ""
    given = content if isinstance(content, list) else [content]
    parts = [part for part in given if not is_thought(part)]
    if all(isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts), "".join(thought_of(part) for part in given if is_thought(part))
    kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
    raise FormError(f"{at}.content", f"only text can be trained on, got {', '.join(sorted(kinds - {'text'}))}")


def check_chat(chat: Chat) -> Chat:
    """Complete and check a chat: fill in call ids and result names, and order results as their calls.

    Messages after the last trained one are dropped. Raises BadRowError if no message is trained, a call names an undeclared
    tool, or a result answers no call.
    """
    if not any(chat.trained):
        raise BadRowError("no assistant message to train on")
    end = max(number for number, trained in enumerate(chat.trained) if trained) + 1
    names = [tool["function"]["name"] for tool in chat.tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise FormError("tools", f"two are called {twice!r}. Leave one of them out")
    for number, message in enumerate(chat.messages[:end]):
        if message.role == "assistant" and not (message.content.strip() or message.tool_calls):
            raise FormError(f"messages[{number}]", "an assistant's message without content and calls")
        for call in message.tool_calls:
            if call.name not in names:
                raise BadRowError(f"messages[{number}]: a call of {call.name!r}, which is not in tools")
    return replace(chat, messages=pair_results(chat.messages[:end]), trained=chat.trained[:end])


# Preference pairs of conversations, in two layouts.
#
# TRL's: `{"prompt": [messages], "chosen": [messages], "rejected": [messages], "tools": [...]}`; the default `prompt` is the
# common prefix of both. OpenAI's: `{"input": {"messages": [...], "tools": [...]}, "preferred_output": [...],
# "non_preferred_output": [...]}`.
#
# Messages and tools are as in the conversations above. Only assistant messages after the prompt are trained.


def preference(row: Mapping[str, Any], *, table: bool = False) -> tuple[Chat, Chat]:
    """Return the chosen and the rejected conversation of a row. `table`: the file has every column in every row.
    Raises BadRowError."""
    _check_unread_keys(row)
    if row.get("preferred_output") is not None:
        given = row.get("input")
        if not isinstance(given, Mapping):
            raise BadRowError("input: expected an object with messages")
        _check_unread_keys(given)
        row = {"prompt": given.get("messages"), "tools": given.get("tools"), "chosen": row["preferred_output"],
               "rejected": row.get("non_preferred_output")}  # fmt: skip
    for key in ("prompt", "chosen", "rejected"):
        if isinstance(row.get(key), str) and not row[key].lstrip().startswith("["):
            raise BadRowError(f"{key}: is text; only conversations, lists of messages, can be trained on")
    tools = declarations(row.get("tools"), table=table)
    shared = Chat((), (), tools) if row.get("prompt") is None else messages_of(row["prompt"], "prompt", tools, table=table)
    sides = [messages_of(row.get(key), key, tools, table=table) for key in ("chosen", "rejected")]
    prompt, begun = shared.messages, 0
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        if prompt and side.messages[: len(prompt)] == prompt:
            raise BadRowError(f"{key}: begins with the prompt, which is in `prompt` too; leave one of the two out")
    asked = [[*takewhile(lambda one: one.role != "assistant", side.messages)] for side in sides]
    if asked[0] != asked[1]:
        raise BadRowError("chosen and rejected answer different messages. Begin both with the same ones, or put these in prompt")
    if row.get("prompt") is None:
        both = zip(sides[0].messages, sides[1].messages, strict=False)
        prompt = tuple(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))
        begun = len(prompt)
    made = list[Chat]()
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        trained = (False,) * len(prompt) + side.trained[begun:]
        try:
            made.append(check_chat(Chat(prompt + side.messages[begun:], trained, tools, shared.unread + side.unread)))
        except BadRowError as problem:
            raise BadRowError(f"{key}: {problem}") from None
    return made[0], made[1]


# Two function-calling layouts with calls as text, in messages `{"from": ..., "value": ...}` under `conversations`:
#
# Hermes (NousResearch/hermes-function-calling-v1): from "system", "human", "gpt", "tool"; a call is `<tool_call>` with an
# object of `name` and `arguments` (JSON or a Python literal), a result `<tool_response>`; tools in the key `tools`, or
# between `<tools>` and `</tools>` in the system message.
#
# ToolACE (Team-ACE/ToolACE): a key `system`, whose text holds a JSON list of functions; from "user", "assistant", "tool";
# calls as `[name(a=1, b="x"), other()]`, where names may hold spaces; results of all calls as one list.
#
# The part of a system message that describes the tools and the call syntax is removed (in ToolACE: from the list of functions
# on), because the model's chat template describes both in its own format.

T = TypeVar("T")
SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
                  "tool": "tool", "function_response": "tool", "observation": "tool"}  # fmt: skip
_TOOLS = re.compile(r"<tools>\s*(\[.*?\])\s*</tools>", re.S)
_LIST = re.compile(r"\[\s*\{\s*\"")


def sharegpt_chat(row: Mapping[str, Any]) -> Chat:
    """Convert a row of either layout. Raises BadRowError."""
    turns = row.get("conversations")
    if isinstance(turns, str):
        turns = parse_field(turns, "conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRowError("conversations: expected a list of messages")
    said = list[tuple[str, str]]()
    for number, turn in enumerate(turns):
        at = f"conversations[{number}]"
        if not isinstance(turn, Mapping) or not isinstance(turn.get("value"), str):
            raise BadRowError(f'{at}: expected {{"from": ..., "value": ...}}')
        if (role := SHAREGPT_ROLES.get(str(turn.get("from")))) is None:
            raise BadRowError(f"{at}.from: expected one of {', '.join(SHAREGPT_ROLES)}, got {turn.get('from')!r}")
        said.append((role, turn["value"]))
    given = {word for turn in turns for word, value in turn.items() if value not in (None, [], {})}
    if odd := sorted(given & {"weight", "loss", "tool_calls", *REASONING}):
        raise BadRowError(f"conversations: {odd[0]} is not read in this layout; write the row in OpenAI's, under messages")
    unread = Counter(f"turn.{word}" for turn in turns for word, value in turn.items() if word not in ("from", "value") and value)
    if not isinstance(system := row.get("system"), str | None):
        raise BadRowError(f"system: expected text, got {type(system).__name__}")
    if said[0][0] == "system":
        if system and system != said[0][1]:
            raise BadRowError("system: it differs from the system message in conversations; leave one of the two out")
        system, said = said[0][1], said[1:]
    kept, inside = _split(system or "", bool(row.get("tools")))
    tools = declarations(row.get("tools")) or declarations(inside)
    if not tools:
        _check_tools(row)
    tagged = any(tag in text for _, text in [("", system or ""), *said] for tag in ("<tools>", "<tool_call>", "<tool_response>"))
    read = _hermes if tagged else _toolace
    every = [Message("system", kept)] if kept else []
    plain = ("system", "user")
    parts = ([Message(role, text)] if role in plain else read(role, text) for role, text in said)  # type: ignore[arg-type]
    every += _pair_results(list(chain.from_iterable(parts)))
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for place, message in enumerate(every):
        calls = (
            replace(call, arguments=without_padding(call.arguments or {}, schemas.get(call.name, {})))
            for call in message.tool_calls
        )
        every[place] = replace(message, tool_calls=tuple(calls))
    return check_chat(Chat(tuple(every), tuple(message.role == "assistant" for message in every), tools, unread))


def _split(system: str, given: bool) -> tuple[str, list[Any] | None]:
    """Split a system message into the part to keep and its functions. `given`: the row has its own list of them."""
    if found := _TOOLS.search(system):
        before = system[: found.start()].rpartition("\n\n")[0]  # the paragraphs before the list's
        return before.strip(), _read(literal, found[1], "the functions of the system message")
    if not given and (found := _LIST.search(system)):
        try:
            tools, _ = json.JSONDecoder().raw_decode(system, found.start())
        except (ValueError, RecursionError) as problem:
            raise BadRowError(f"the functions of the system message: not JSON: {problem}") from None
        before = system[: found.start()].rstrip()
        # The sentence that introduces the list is removed with it.
        return before.rpartition("\n")[0].strip() if before.endswith(":") else before, tools
    return system.strip(), None


def _hermes(role: str, text: str) -> list[Message]:
    if role == "tool":
        return [Message("tool", part) for part in tagged_results(text)]
    reasoning, text = thoughts(text)
    calls = _calls(_read(tagged_calls, text, "a <tool_call>"))
    rest = TAGGED.sub("", text).strip()
    if "<tool_call>" in rest:
        raise BadRowError("a <tool_call> that does not end")
    return [Message("assistant", rest, calls, reasoning=reasoning or None)]


def _toolace(role: str, text: str) -> list[Message]:
    if role == "tool":
        try:
            results = read_json(text)
        except ValueError:
            return [Message("tool", text)]
        if not isinstance(results, list) or not all(isinstance(item, Mapping) and "results" in item for item in results):
            return [Message("tool", text)]
        return [Message("tool", json.dumps(item["results"], ensure_ascii=False), name=item.get("name")) for item in results]
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


def _pair_results(messages: list[Message]) -> list[Message]:
    """Join results that outnumber the calls before them, and give results the names of calls."""
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
        if not set(names) <= set(calls):
            said = result_names([result.content for result in results], calls)
            names = [name if name in calls else other for name, other in zip(names, said, strict=True)]
        results = [replace(result, name=name) for result, name in zip(results, names, strict=True)]
        found += results
    return found
