"""An imperfect scripted policy for the warm start: it looks, and often names another color."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Task, ToolCall
from agentrl.env.authoring import GoldTeacher, check_shares


class Teacher(GoldTeacher):
    """`wrong`: probability that the color it names is drawn anew from all. `rng` needs only `random()`, uniform in [0, 1)."""

    def __init__(self, colors: Sequence[str], task: Task, rng: Any, *, wrong: float = 0.5) -> None:
        check_shares(wrong=wrong)
        guess = rng.random() < wrong
        answer = colors[int(rng.random() * len(colors))] if guess else task.gold["answer"]
        super().__init__([Message("assistant", tool_calls=(ToolCall("look", {}),)), Message("assistant", answer)], rng)
