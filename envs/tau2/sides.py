"""A solution of two sides: the agent's turns, and a user by script that makes the user's calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from agentrl.contrib.suites.benchmarks import calling
from agentrl.env import Message, ToolCall

Asked = Mapping[str, Any]
"""A call of a task's solution: {"name", "arguments", "by"}, by "assistant" or "user"."""


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
