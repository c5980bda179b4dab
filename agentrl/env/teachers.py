"""The default teacher of environments with gold turns: its turns are correct, but it may give up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.trajectory import Message

GIVES_UP = "I do not know."


class GoldTeacher:
    """Plays the gold turns; before each turn but the first it gives up with probability `stop`.

    `stop` above 0 leaves something for reinforcement learning to improve after training on this teacher.
    """

    def __init__(self, turns: Sequence[Message], rng: Any, stop: float = 0.0) -> None:
        """`rng.random()` is the only source of randomness. Raises ValueError for a `stop` outside 0..1."""
        if not 0.0 <= stop <= 1.0:
            raise ValueError(f"teacher: stop = {stop!r}; expected a share within 0..1")
        self._turns, self._rng, self._stop = iter(turns), rng, stop
        self._begun = False

    def act(self, observation: list[Message]) -> Message | None:
        """The next gold turn, or the turn that gives up; None afterwards."""
        turn = next(self._turns, None)
        if turn is not None and self._begun and self._rng.random() < self._stop:
            self._turns = iter(())
            return Message("assistant", GIVES_UP)
        self._begun = True
        return turn
