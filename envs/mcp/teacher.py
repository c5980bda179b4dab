"""An imperfect scripted policy: the gold turns, with mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message


class Teacher:
    """Plays the gold turns; with probability `stop`, before each further call, it gives up early."""

    def __init__(self, turns: Sequence[Message], rng: Any, stop: float = 0.2) -> None:
        """`rng.random()` is the only source of chance. Raises ValueError for a `stop` outside 0..1."""
        if not 0.0 <= stop <= 1.0:
            raise ValueError(f"stop = {stop!r}; expected a share within 0..1")
        self._turns, self._rng, self._stop, self._at = list(turns), rng, stop, 0

    def act(self, observation: list[Message]) -> Message | None:
        """The next turn; None after the last."""
        if self._at >= len(self._turns):
            return None
        if self._at and self._rng.random() < self._stop:
            self._at = len(self._turns)
            return Message("assistant", "I do not know.")
        self._at += 1
        return self._turns[self._at - 1]
