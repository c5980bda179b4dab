"""Scripted agents and users made from what a benchmark's tasks say: messages, the calls that solve them, of one side or of two.

They need no model: an episode of any suite can be played, checked and scored with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from agentrl.trajectory import Json, Message, ToolCall

Asked = Mapping[str, Any]
"""A call of a task's solution: {"name", "arguments"}, and "by", "assistant" or "user", if there are two sides."""


def calling(calls: Iterable[tuple[str, Mapping[str, Json]]]) -> Message:
    """An assistant turn that makes calls, each (name, arguments)."""
    return Message("assistant", "", tuple(ToolCall(name, dict(arguments)) for name, arguments in calls))


def round_turns(rounds: Iterable[Sequence[Asked]]) -> list[Message]:
    """The turns of a solution by rounds of a conversation: the calls of each round at once, if it has some, and then a text, to
    which the user answers."""
    pairs = [(calling((call["name"], call["arguments"]) for call in calls), Message("assistant", "done")) for calls in rounds]
    return [turn for pair in pairs for turn in pair if turn.tool_calls or turn.content]


def message_of(row: Mapping[str, Any]) -> Message:
    """A message as benchmarks write it: {"role", "content"}, of an assistant or user with "tool_calls" ({"name", "arguments",
    "id"}), of a tool with the "id" of the call that it answers."""
    calls = tuple(ToolCall(call["name"], call["arguments"], id=call["id"]) for call in row.get("tool_calls") or ())
    return Message(row["role"], row.get("content") or "", calls, tool_call_id=row.get("id"))


def two_sided_turns(calls: Iterable[Asked]) -> list[Message]:
    """The agent's turns of a solution of two sides: its own calls, one a turn, and a text that names the tools of the user's next
    calls (see `AskedUser`)."""
    turns = []
    for by, run in groupby(calls, lambda call: call["by"]):
        if by == "user":
            turns.append(Message("assistant", "Please use " + ", ".join(call["name"] for call in run)))
        else:
            turns += [calling([(call["name"], call["arguments"])]) for call in run]
    return turns


class AskedUser:
    """A user by script: says its opening; makes its next calls of a solution once the agent's text names all their tools; to
    anything else it leaves."""

    def __init__(self, opening: str, calls: Iterable[Asked]) -> None:
        runs = groupby(calls, lambda call: call["by"])
        self.opening: str | None = opening
        self.runs = [tuple(ToolCall(call["name"], call["arguments"]) for call in run) for by, run in runs if by == "user"]

    async def reply(self, conversation: Sequence[Message]) -> str | Message | None:
        """See `agentrl.env.users.User`."""
        last = conversation[-1]
        if self.opening is not None:
            said, self.opening = self.opening, None
            return said
        if last.role == "tool":
            return "I have done that."
        if self.runs and all(call.name in last.content for call in self.runs[0]):
            return Message("user", "", self.runs.pop(0))
        return None
