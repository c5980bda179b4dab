"""An imperfect scripted policy for the warm start: it looks, and often names another color."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Observation, Task, ToolCall


class Teacher:
    """`wrong`: probability that the color it names is drawn anew from all. `rng` needs only `random()`, uniform in [0, 1)."""

    def __init__(self, colors: Sequence[str], task: Task, rng: Any, *, wrong: float = 0.5) -> None:
        self._colors, self._rng = colors, rng
        guess = rng.random() < wrong
        self._turns = [
            Message("assistant", tool_calls=(ToolCall("look", {}),)),
            Message("assistant", colors[int(rng.random() * len(colors))] if guess else task.gold["answer"]),
        ]

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None after the answer."""
        return self._turns.pop(0) if self._turns else None
