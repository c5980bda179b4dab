"""A key-value store whose user asks again until the answer is a number: even a model that knows nothing plays many turns."""

import random
import threading
from collections.abc import Sequence
from typing import Any

from agentrl.env import Message, Task, ToolEnv
from agentrl.env.catalog import EnvRef

KeyValue: Any = type(EnvRef("key_value").build())


class Patient(KeyValue):
    """`broken`: the forks of one copy are numbered, and those of these numbers fail at their first turn. What the user says has
    a number in it, which the state of `rng` decides. With `holds` there is something that cannot be copied."""

    id = "tests/Patient-v0"
    reward = "key_value"
    summary = "look numbers up for a user who asks again"

    def __init__(self, *, broken: Sequence[int] = (), holds: bool = False, **params: Any) -> None:
        super().__init__(**params)
        self.held = threading.Lock() if holds else None
        self.broken, self.number, self.forks = list(broken), -1, 0

    async def setup(self, task: Task) -> None:
        await super().setup(task)
        self.rng = random.Random(task.seed)

    async def user_reply(self, message: Message) -> list[Message] | None:
        if self.number in self.broken:
            raise RuntimeError("this copy is broken")
        return None if message.content.isdigit() else [Message("user", f"go on: {self.rng.randrange(1000)}")]

    def fork(self) -> ToolEnv:
        made: Any = super().fork()
        made.number, made.forks, self.forks = self.forks, 0, self.forks + 1
        return made  # type: ignore[no-any-return]
