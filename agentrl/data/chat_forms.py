"""Arguments, reasoning and results of calls that other people's files and programs write.

The rest of their forms is read by agentrl/contrib/toolkit/chat_forms.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.data.trajectory import Message, ToolCall
from agentrl.utils.errors import BadRowError
from agentrl.utils.network import strict_json

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold its reasoning."""


class FormError(BadRowError):
    """Something whose form is not read: `key` names the place, `problem` the fault and its fix."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


def parse_field(text: str, key: str) -> Any:
    """JSON text within a row. Raises FormError."""
    try:
        return strict_json(text, depth=512, rfc=False)
    except ValueError as problem:
        raise FormError(key, f"not JSON: {problem}"[:200]) from None


def arguments_of(given: Any, key: str) -> dict[str, Any]:
    """The arguments of a call: an object, or one as JSON text. Raises FormError."""
    if isinstance(given, str):
        given = parse_field(given, key) if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise FormError(key, f"expected an object, got {type(given).__name__}")
    return given


def reasoning_of(item: Mapping[str, Any], key: str) -> str | None:
    """The reasoning of an assistant's message, under whichever key. Raises FormError if two differ, or one is no text."""
    found: dict[str, str] = {}
    for word in REASONING:
        value = item.get(word)
        if isinstance(value, list | Mapping):
            value = "".join(thought_of(part) for part in (value if isinstance(value, list) else [value]))
        if not isinstance(value, str | None):
            raise FormError(f"{key}.{word}", f"expected text, got {type(value).__name__}")
        if value:
            found[word] = value
    if not found:
        for word in ("thinking_blocks", "reasoning_details"):
            parts = item.get(word)
            if text := "".join(map(thought_of, parts)) if isinstance(parts, list) else "":
                found[word] = text
                break
    if len(set(found.values())) > 1:
        raise FormError(key, f"{' and '.join(found)} differ. Leave one of them out")
    return next(iter(found.values()), None)


def thought_of(part: Any) -> str:
    """The text of a part of a message that holds reasoning; "" if it shows none, as an encrypted one."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else ""
    for word in ("thinking", "reasoning", "text", "summary", "content"):
        value = part.get(word)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "".join(map(thought_of, value))
    return ""


def pair_results(messages: Sequence[Message], key: str = "messages", *, strict: bool = True) -> tuple[Message, ...]:
    """The messages with each turn's results named as their calls and in the order of these: templates that write no ids would
    show one as another's. An id decides before a name, a name before the order.

    `strict`: of a data set, where each result must answer a call, in a turn's order without a gap, and where ids that are missing
    or repeated are made anew. Raises FormError.
    """
    found = list(messages)
    taken = {call.id for message in messages for call in message.tool_calls}
    fresh = (name for name in (f"call_{number}" for number in range(1, len(taken) + 10**6)) if name not in taken)
    seen, turn = set[str](), _Turn((), [])
    for number, message in enumerate(messages):
        if message.role == "assistant":
            turn.settle(found, key, strict)
            turn = _Turn(message.tool_calls, list(message.tool_calls))
            if strict:
                for place, call in enumerate(message.tool_calls):
                    if not call.id or call.id in seen:
                        turn.calls[place] = replace(call, id=next(fresh))
                    seen.add(turn.calls[place].id)
                found[number] = replace(message, tool_calls=tuple(turn.calls))
        elif message.role == "tool" and not turn.take(number, message) and strict:
            answers = message.tool_call_id or message.name or "without an id"
            raise FormError(f"{key}[{number}]", f"a tool's result ({answers}) that answers no call before it")
    turn.settle(found, key, strict)
    return tuple(found)


@dataclass(slots=True)
class _Turn:
    """The calls of a turn, as given and with their ids made anew, and the results that came for them. `places`: of these
    messages."""

    given: Sequence[ToolCall]
    calls: list[ToolCall]
    results: dict[int, Message] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    def take(self, place: int, result: Message) -> bool:
        """Return True if a call of the turn that has no result yet is the one that it answers."""
        fitting = [number for number in range(len(self.calls)) if number not in self.results]
        if result.tool_call_id and any(call.id for call in self.given):
            fitting = [number for number in fitting if self.given[number].id == result.tool_call_id]
            # Calls of one id are told apart by name; else the id alone decides, since programs name results as they like.
            fitting = [number for number in fitting if self.calls[number].name == result.name] or fitting
        elif result.name:
            fitting = [number for number in fitting if self.calls[number].name == result.name]
        if not fitting:
            return False
        self.results[fitting[0]] = result
        self.places.append(place)
        return True

    def settle(self, messages: list[Message], key: str, strict: bool) -> None:
        """Put the results into the order of the calls, named as they are."""
        order = sorted(self.results)
        if strict and order and order[-1] >= len(order):
            missing = next(number for number in range(len(self.calls)) if number not in self.results)
            raise FormError(
                f"{key}[{self.places[0]}]", f"results of later calls, and none of call {missing} ({self.calls[missing].name!r})"
            )
        for place, number in zip(self.places, order, strict=True):
            call, result = self.calls[number], self.results[number]
            name = call.name if strict or not result.name else result.name
            messages[place] = replace(result, tool_call_id=call.id or result.tool_call_id, name=name)
