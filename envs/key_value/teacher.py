"""An imperfect scripted policy for the warm start: it copies well, makes random errors and stops too early."""

from __future__ import annotations

from typing import Any

from agentrl.env import Message, Observation, Task, ToolCall
from agentrl.env.authoring import check_shares

LETTERS = "abcdefghij"


class Teacher:
    """Works through the goal item by item, using the actual tool results.

    `wrong`: probability that a turn's decision is wrong (key, number or answer). `malformed`: probability
    that a turn is a call that cannot be parsed; it is then repeated correctly. `stop`: probability that an episode
    with more than one item ends before the last one, with the total so far. `rng` needs only
    `random()`, uniform in [0, 1).
    """

    def __init__(self, task: Task, rng: Any, *, wrong: float = 0.2, malformed: float = 0.01, stop: float = 0.55) -> None:
        check_shares(wrong=wrong, malformed=malformed, stop=stop)
        self._rng, self._wrong, self._malformed = rng, wrong, malformed
        self._sets: list[tuple[str, int]] = list(task.gold["sets"].items())
        self._list: bool = task.gold["listed"]
        self._keys: list[str] = [] if self._list else list(task.gold["reads"])
        self._count = len(task.gold["reads"])
        early = self._count > 1 and self._chance(stop)
        self._stop_after = 1 + self._below(self._count - 1) if early else None
        self._done = 0
        self._step = "start"
        self._retry: Message | None = None
        self._over = False

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None after the answer."""
        if self._over:
            return None
        if self._retry is not None:
            message, self._retry = self._retry, None
            return message
        seen = observation[-1].content if observation and observation[-1].role == "tool" else ""
        message = self._decide(seen)
        if message.tool_calls and self._chance(self._malformed):
            self._retry = message
            return Message("assistant", _broken(message.tool_calls[0]))
        return message

    def _decide(self, seen: str) -> Message:
        if self._step == "list":
            self._keys = seen.split()
        if self._sets:
            key, x = self._sets.pop(0)
            self._step = "set"
            return _call("set", {"key": key, "x": self._number(x)})
        if self._list:
            self._list, self._step = False, "list"
            return _call("list", {})
        if self._step == "get":
            self._step = "add"
            self._done += 1
            return _call("add", {"x": self._number(int(seen) if seen.isdigit() else 0)})
        if not self._keys or self._done == self._stop_after:
            self._over = True
            total = seen if seen.isdigit() else "0"
            return Message("assistant", str(self._number(int(total))))
        self._step = "get"
        return _call("get", {"key": self._letter(self._keys.pop(0))})

    def _letter(self, correct: str) -> str:
        return LETTERS[self._below(len(LETTERS))] if self._chance(self._wrong) else correct

    def _number(self, correct: int) -> int:
        return 1 + self._below(9) if self._chance(self._wrong) else correct

    def _chance(self, share: float) -> bool:
        return bool(self._rng.random() < share)

    def _below(self, n: int) -> int:
        return int(self._rng.random() * n)


def _call(name: str, arguments: dict[str, Any]) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


def _broken(call: ToolCall) -> str:
    """The call's text without its closing braces."""
    arguments = ", ".join(f'"{key}": "{value}' for key, value in call.arguments.items()) if call.arguments else ""
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {{{arguments}\n</tool_call>'
