"""An imperfect scripted policy: it follows the gold turns, opens wrong pages and stops too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Observation, Task, ToolCall
from agentrl.env.authoring import check_shares


class Teacher:
    """`wrong`: probability that a wrong page is opened before the correct one. `stop`: probability that an
    episode ends early, with an entity on the way as its answer. `rng` needs only `random()`."""

    def __init__(self, task: Task, rng: Any, gold: Sequence[Message], *, wrong: float = 0.15, stop: float = 0.4) -> None:
        check_shares(wrong=wrong, stop=stop)
        self._rng, self._wrong = rng, wrong
        self._left = list(gold)
        self._documents = int(task.data["documents"])
        pages = len(task.gold["steps"])
        if rng.random() < stop:
            done = int(rng.random() * pages)
            trail = task.gold["trail"]
            self._left = [*self._left[: 2 * done], Message("assistant", trail[min(done, len(trail) - 1)])]

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None after the answer."""
        if not self._left:
            return None
        message = self._left[0]
        if message.tool_calls and message.tool_calls[0].name == "open" and self._rng.random() < self._wrong:
            page = f"p{1 + int(self._rng.random() * self._documents)}"
            return Message("assistant", tool_calls=(ToolCall("open", {"page": page}),))
        return self._left.pop(0)
