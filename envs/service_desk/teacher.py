"""An imperfect scripted policy: gold turns, with random omissions, wrong rules and early stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl.env import Message, Observation
from agentrl.env.authoring import check_shares

_RULES = ("R2", "R3", "R4", "R5", "R6", "R7", "R8", "R9")


class Teacher:
    """`careless`: probability that a question to the customer is left out. `wrong`: probability that a refusal names
    a random rule. `stop`: probability that an episode ends early. `rng` needs only `random()`."""

    def __init__(
        self,
        rng: Any,
        gold: Sequence[Message],
        *,
        careless: float = 0.05,
        wrong: float = 0.3,
        stop: float = 0.2,
    ) -> None:
        check_shares(careless=careless, wrong=wrong, stop=stop)
        self._rng, self._careless, self._wrong = rng, careless, wrong
        self._left = list(gold)
        if rng.random() < stop:
            self._left = self._left[: 1 + int(rng.random() * (len(gold) - 1))]

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None if none is left."""
        while self._left:
            message = self._left.pop(0)
            if "?" in message.content and self._rng.random() < self._careless:
                continue
            if message.tool_calls and message.tool_calls[0].name == "log_refusal":
                return self._maybe_wrong(message)
            return message
        return None

    def _maybe_wrong(self, message: Message) -> Message:
        if self._rng.random() >= self._wrong:
            return message
        call = message.tool_calls[0]
        rule = _RULES[int(self._rng.random() * len(_RULES))]
        return replace(message, tool_calls=(replace(call, arguments={**(call.arguments or {}), "rule": rule}),))
