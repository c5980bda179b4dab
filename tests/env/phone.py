"""An environment with two sides: the policy has the provider's tools, the user a phone."""

import asyncio
from typing import Any

from agentrl.env import Message, Task, ToolCall, ToolEnv, tool
from agentrl.env.users import Parting, ScriptedUser
from agentrl.utils.errors import ToolError


def line_of(item: Any) -> Any:
    """A line of a script from JSON: a text, a list of [name, arguments], or {"parting": text}."""
    if isinstance(item, dict):
        return Parting(item["parting"])
    return item if isinstance(item, str) else [ToolCall(name, dict(arguments)) for name, arguments in item]


class Phone(ToolEnv):
    """Its state says who did what, in order. `script`: the user's lines; `opens`: the user says the first."""

    id = "tests/Phone-v0"
    reward = "phone"
    summary = "a phone and its provider"

    def __init__(self, *, script: Any = (), opens: bool = False, **base: Any) -> None:
        super().__init__(**base)
        self.script, self.opens = script, opens
        self.done: list[Any] = []

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"phone/{split}/{rng_seed}", rng_seed, split, {"number": rng_seed}, {})

    async def setup(self, task: Task) -> None:
        self.done = []
        self.user = ScriptedUser([line_of(item) for item in self.script])

    async def prompt(self, task: Task) -> list[Message]:
        opening = [Message("system", "You are the provider."), Message("assistant", "Hello, how can I help?")]
        said = await self.ask_user(opening) if self.opens else "My phone is dead."
        return [*opening, Message("user", said or "")]

    def state(self) -> Any:
        return {"done": [list(item) for item in self.done]}

    def gold_turns(self, task: Task) -> list[Message]:
        calls = [ToolCall("line", {"on": True})]
        return [Message("assistant", tool_calls=tuple(calls)), Message("assistant", "It works again.")]

    @tool
    async def line(self, on: bool) -> str:
        """switch the line on or off"""
        self.done.append(("assistant", "line", on))
        return "line on" if on else "line off"

    @tool(by="user")
    async def press(self, button: str) -> str:
        """press a button of the phone"""
        if button == "none":
            raise ToolError("there is no such button")
        if button == "broken":
            raise ZeroDivisionError("the phone exploded")
        self.done.append(("user", "press", button))
        return f"pressed {button}"

    @tool(by="user", timeout=0.02, late="policy")
    async def wait(self) -> str:
        """wait for a signal"""
        await asyncio.sleep(30)
        return "never"
