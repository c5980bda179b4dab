"""An imperfect scripted policy: runs a solution and reports its result, sometimes wrongly."""

from __future__ import annotations

from typing import Any

from agentrl.env import Message, Observation, Task, ToolCall
from agentrl.env.authoring import check_shares


class Teacher:
    """Runs the reference solution and reports the last printed number.

    `wrong`: probability that the answer is slightly off. `hasty`: probability of an answer without running anything.
    `broken`: probability that the first attempt has a syntax error. `rng` needs only `random()`.
    """

    def __init__(self, task: Task, rng: Any, *, wrong: float = 0.2, hasty: float = 0.1, broken: float = 0.1) -> None:
        check_shares(wrong=wrong, hasty=hasty, broken=broken)
        self._rng, self._wrong = rng, wrong
        self._codes = [str(task.gold["solution"])]
        if rng.random() < broken:
            self._codes.insert(0, self._codes[0] + "\nprint(")
        if rng.random() < hasty:
            self._codes = []
        self._over = False

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None after the answer."""
        if self._over:
            return None
        if self._codes:
            return Message("assistant", tool_calls=(ToolCall("run", {"code": self._codes.pop(0)}),))
        self._over = True
        words = observation[-1].content.split() if observation and observation[-1].role == "tool" else []
        number = int(words[-1]) if words and words[-1].lstrip("-").isdigit() else 0
        if self._rng.random() < self._wrong:
            number += 1 + int(self._rng.random() * 9)
        return Message("assistant", f"The answer is {number}.")
