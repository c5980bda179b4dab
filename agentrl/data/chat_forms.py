"""Parse call arguments, reasoning and tool results in third-party chat formats.

agentrl/contrib/toolkit/chat_forms.py parses the rest of these formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.data.trajectory import Message, ToolCall
from agentrl.utils.errors import BadRowError
from agentrl.utils.network import strict_json
from agentrl.utils.parsing import parts_of

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that may hold its reasoning."""


class FormError(BadRowError):
    """Unsupported or invalid data: `key` names the place, `problem` the fault and its fix."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key, self.problem = key, problem


def parse_field(text: str, key: str) -> Any:
    """Parse JSON text within a row. Raises FormError."""
    try:
        return strict_json(text, depth=512, rfc=False)
    except ValueError as problem:
        raise FormError(key, f"not JSON: {problem}"[:200]) from None


def arguments_of(given: Any, key: str) -> dict[str, Any]:
    """Parse the arguments of a call: an object, its JSON text, or None or "" for none. Raises FormError."""
    if isinstance(given, str):
        given = parse_field(given, key) if given.strip() else None
    given = {} if given is None else given
    odd = [part for part in parts_of(given) if not isinstance(part, str | int | float | list | dict | None)]  # of a table
    if odd or not isinstance(given, dict):
        raise FormError(key, f"expected an object of JSON values, got {type([*odd, given][0]).__name__}")
    return given


def reasoning_of(item: Mapping[str, Any], key: str) -> str | None:
    """Return the reasoning of an assistant message, by any key of REASONING or from blocks.

    Raises FormError if two keys differ, or a value is not text."""
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
    """Return the text of a reasoning block; "" if it has none, e.g. if it is encrypted."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else ""
    for word in ("thinking", "reasoning", "text", "summary", "content"):
        value = part.get(word)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return "".join(map(thought_of, value))
    return ""


def pair_results(messages: Sequence[Message], *, strict: bool = True) -> tuple[Message, ...]:
    """Give each turn's results the names, ids and order of their calls.

    Templates without ids need this. Results are matched by id, then by name, then by order. `strict` (data sets): each result
    must answer a call, in the order of calls without a gap, and missing or repeated ids are replaced. Raises FormError.
    """
    found = list(messages)
    taken = {call.id for message in messages for call in message.tool_calls}
    fresh = (name for name in (f"call_{number}" for number in range(1, len(taken) + 10**6)) if name not in taken)
    seen, turn = set[str](), _Turn((), [])
    for number, message in enumerate(messages):
        if message.role == "assistant":
            turn.settle(found, strict)
            turn = _Turn(message.tool_calls, list(message.tool_calls))
            if strict:
                for place, call in enumerate(message.tool_calls):
                    if not call.id or call.id in seen:
                        turn.calls[place] = replace(call, id=next(fresh))
                    seen.add(turn.calls[place].id)
                found[number] = replace(message, tool_calls=tuple(turn.calls))
        elif message.role == "tool" and not turn.take(number, message) and strict:
            answers = message.tool_call_id or message.name or "without an id"
            raise FormError(f"messages[{number}]", f"a tool's result ({answers}) that answers no call before it")
    turn.settle(found, strict)
    return tuple(found)


@dataclass(slots=True)
class _Turn:
    """A turn's calls, as given and with new ids, and their results. `places`: positions of the result messages."""

    given: Sequence[ToolCall]
    calls: list[ToolCall]
    results: dict[int, Message] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    def take(self, place: int, result: Message) -> bool:
        """Assign a result to a call without one. Returns False if it answers none of them."""
        fitting = [number for number in range(len(self.calls)) if number not in self.results]
        if result.tool_call_id and any(call.id for call in self.given):
            fitting = [number for number in fitting if self.given[number].id == result.tool_call_id]
            # The name decides between calls with one id; otherwise the id alone, as programs name results arbitrarily.
            fitting = [number for number in fitting if self.calls[number].name == result.name] or fitting
        elif result.name:
            fitting = [number for number in fitting if self.calls[number].name == result.name]
        if not fitting:
            return False
        self.results[fitting[0]] = result
        self.places.append(place)
        return True

    def settle(self, messages: list[Message], strict: bool) -> None:
        """Put the results into the order of the calls, with their names and ids."""
        order = sorted(self.results)
        if strict and order and order[-1] >= len(order):
            missing = next(number for number in range(len(self.calls)) if number not in self.results)
            at, name = f"messages[{self.places[0]}]", self.calls[missing].name
            raise FormError(at, f"results of later calls, and none of call {missing} ({name!r})")
        for place, number in zip(self.places, order, strict=True):
            call, result = self.calls[number], self.results[number]
            name = call.name if strict or not result.name else result.name
            messages[place] = replace(result, tool_call_id=call.id or result.tool_call_id, name=name)
