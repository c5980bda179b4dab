"""Small environments for the tests of the contract."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

from agentrl.data.trajectory import Trajectory
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ToolError


class Notes(ToolEnv):
    """Write the two words of the prompt, in order; records what its hooks saw."""

    id = "tests/Notes-v0"

    def __init__(self, **base: Any) -> None:
        super().__init__(**base)
        self.log: list[str] = []
        self.notes: list[str] = []

    def make_task(self, rng_seed: int, split: str) -> Task:
        def propose(rng: random.Random) -> list[str]:
            return [f"w{rng.randrange(1000)}" for _ in range(2)]

        words = draw(task_rng(self.id, split, rng_seed), split, propose, " ".join)
        return Task(f"{split}/{rng_seed}", rng_seed, split, {"words": words}, {"secret": "x" + words[1]})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "write " + " ".join(task.data["words"]))]

    async def setup(self, task: Task) -> None:
        self.log.append("setup")
        self.notes = []

    async def teardown(self) -> None:
        await asyncio.sleep(0)
        self.log.append("teardown")

    def state(self) -> Any:
        return {"notes": list(self.notes)}

    @tool
    async def write(self, text: str) -> int:
        """write a note"""
        if text == "boom":
            raise ZeroDivisionError("boom")
        if text == "no":
            raise ToolError("not allowed")
        self.notes.append(text)
        return len(self.notes)

    @tool(timeout=0.02)
    async def hang(self) -> None:
        await asyncio.sleep(30)

    @tool
    async def quit(self) -> str:
        self.finish()
        return "bye"

    def gold_turns(self, task: Task) -> list[Message]:
        return [*(call("write", text=word) for word in task.data["words"]), Message("assistant", "done")]


def call(name: str, /, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=(ToolCall(name, arguments),))


class Constant:
    """A scorer that gives one value and remembers what it was shown."""

    def __init__(self, value: float | None) -> None:
        self.value = value
        self.seen: list[Trajectory] = []

    async def ascore(self, trajectory: Trajectory) -> Any:
        self.seen.append(trajectory)
        return SimpleNamespace(value=self.value, success=None)
