"""Thermostat: read the temperatures of a house and warm up the cold rooms."""

import random

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ToolError

ROOMS = ["hall", "kitchen", "bath", "study", "cellar", "attic", "bedroom", "studio", "office", "lounge", "porch", "pantry"]


class Thermostat(ToolEnv):
    """Set every named room that is below 18 degrees to 20. At least one is, so doing nothing is never correct."""

    id = "examples/Thermostat-v0"
    reward = "reward.json"
    summary = "warm up the cold rooms"
    order_free = True

    def __init__(self, *, rooms: int = 2, **base):
        super().__init__(**base)
        self.rooms = rooms
        self.degrees = {}

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            cold, *others = rng.sample(ROOMS, self.rooms)
            degrees = {cold: rng.choice([14, 16]), **{room: rng.choice([14, 16, 19, 21]) for room in others}}
            return dict(sorted(degrees.items()))

        # A task's split depends on its content, so train and held-out tasks never coincide.
        degrees = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        warm = {room: 20 if value < 18 else value for room, value in degrees.items()}
        return Task(f"thermostat/{split}/{rng_seed}", rng_seed, split, {"degrees": degrees}, {"state": warm})

    def prompt(self, task):
        return [Message("user", f"Check {' and '.join(task.data['degrees'])}. Set what is below 18 to 20.")]

    async def setup(self, task):
        self.degrees = dict(task.data["degrees"])

    @tool(read_only=True)
    async def read(self, room: str) -> int:
        """degrees in a room"""
        return self.degrees[self._known(room)]

    @tool
    async def warm(self, room: str) -> str:
        """set a room to 20 degrees"""
        self.degrees[self._known(room)] = 20
        return "ok"

    def _known(self, room):
        if room not in self.degrees:
            raise ToolError(f"there is no {room}")
        return room

    def state(self):
        return self.degrees

    def gold_turns(self, task):
        turns = []
        for room, value in task.data["degrees"].items():
            turns.append(Message("assistant", tool_calls=(ToolCall("read", {"room": room}),)))
            if value < 18:
                turns.append(Message("assistant", tool_calls=(ToolCall("warm", {"room": room}),)))
        return [*turns, Message("assistant", "done")]
