"""An imperfect scripted policy: gold turns, of which some are skipped, or an early stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message
from agentrl.env.authoring import GoldTeacher, check_shares


class Teacher(GoldTeacher):
    """`skip`: probability that a call is left out. `stop`: probability that "Done." comes before the last call. `rng` needs only
    `random()`."""

    def __init__(self, gold: Sequence[Message], rng: Any, *, skip: float = 0.03, stop: float = 0.2) -> None:
        check_shares(skip=skip, stop=stop)
        *calls, done = gold
        if len(calls) > 1 and rng.random() < stop:
            calls = calls[: 1 + int(rng.random() * (len(calls) - 1))]
        super().__init__([*(call for call in calls if rng.random() >= skip), done], rng)
