"""An imperfect scripted policy: gold turns, of which some are skipped or replaced, or an early stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Observation
from agentrl.env.authoring import check_shares


class Teacher:
    """`skip`: probability that a call is left out. `hasty`: probability that a question or a CANNOT is replaced by
    "Done.". `stop`: probability that the rest of an episode after some turn is only "Done.". `rng` needs only
    `random()`."""

    def __init__(self, rng: Any, gold: Sequence[Message], *, skip: float = 0.03, hasty: float = 0.2, stop: float = 0.2) -> None:
        check_shares(skip=skip, hasty=hasty, stop=stop)
        self._rng, self._skip, self._hasty = rng, skip, hasty
        self._left = list(gold)
        if rng.random() < stop:
            keep = 1 + int(rng.random() * len(gold))
            ends = sum(not message.tool_calls for message in gold[keep:])
            self._left = [*gold[:keep], *[Message("assistant", "Done.")] * ends]

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None if none is left."""
        while self._left:
            message = self._left.pop(0)
            if message.tool_calls and self._rng.random() < self._skip:
                continue
            tricky = "?" in message.content or message.content.startswith("CANNOT")
            if tricky and self._rng.random() < self._hasty:
                return Message("assistant", "Done.")
            return message
        return None
