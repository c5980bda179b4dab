"""Errands: a list of small jobs in plain English, each done by one call or two."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError, ToolError

from .jobs import LISTS, Job, draw_jobs, final_state, in_order, order_number
from .teacher import Teacher

SYSTEM = "Do the jobs with the functions, in the given order, one call per turn. Then reply: Done."
MOST_CALLS = 50


class Errands(ToolEnv):
    """Book tables, order goods, write mails, set reminders. `calls` is the number of calls in the shortest solution."""

    id = "agentrl/Errands-v0"
    reward = "errands"
    summary = "book, order, mail and remind as a list in English asks (1 to 50 calls)"

    def __init__(self, *, calls: int | Sequence[int] = (1, 5), lookups: float = 0.2, cancels: float = 0.1, **base: Any) -> None:
        """`calls`: a number or [lowest, highest] of required calls, 1..50. `lookups`, `cancels`: shares of the jobs of two calls,
        which need an address that is looked up first, or the number that an earlier order was given. Raises ConfigError for
        values outside these ranges."""
        super().__init__(**base)
        pair = list(calls) if isinstance(calls, Sequence) else [calls, calls]
        if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 1 <= pair[0] <= pair[1] <= MOST_CALLS:
            raise ConfigError(f"errands: calls = {calls!r}; expected a number or [low, high] within 1..{MOST_CALLS}")
        if not (lookups >= 0 and cancels >= 0 and lookups + cancels <= 0.9):
            raise ConfigError("errands: lookups and cancels must be shares with a sum of at most 0.9")
        self.calls, self.lookups, self.cancels = pair, lookups, cancels
        self.addresses: dict[str, str] = {}
        self.done: dict[str, list[list[Any]]] = {}

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        rng = task_rng(self.id, split, rng_seed)
        jobs = draw(rng, split, self._propose, lambda drawn: json.dumps([job.values for job in drawn]))
        calls = [call for job in jobs for call in job.calls()]
        lookups = [job.calls() for job in jobs if job.kind == "mail"]
        return Task(
            id=f"errands/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={
                "jobs": [job.text(rng) for job in jobs],
                "addresses": {find["arguments"]["name"]: send["arguments"]["to"] for find, send in lookups},
            },
            gold={"calls": calls, "state": final_state(jobs)},
        )

    def _propose(self, rng: random.Random) -> list[Job]:
        return draw_jobs(rng, rng.randint(*self.calls), self.lookups, self.cancels)

    def prompt(self, task: Task) -> list[Message]:
        jobs = "\n".join(f"{number}. {text}" for number, text in enumerate(task.data["jobs"], 1))
        return [Message("system", SYSTEM), Message("user", jobs)]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.addresses = dict(task.data["addresses"])
        self.done = {name: [] for name in LISTS.values()}

    def state(self) -> Json:
        return in_order(self.done)

    @tool(parallel=False)
    async def book_table(self, restaurant: str, day: str, guests: int) -> str:
        """Book a table."""
        self.done["tables"].append([restaurant, day, guests])
        return "booked"

    @tool(parallel=False)
    async def order(self, item: str, quantity: int) -> str:
        """Order goods."""
        self.done["orders"].append([item, quantity])
        return f"order {order_number(item, quantity)}"

    @tool(parallel=False)
    async def cancel_order(self, number: int) -> str:
        """Cancel an order."""
        entry = next((entry for entry in self.done["orders"] if order_number(*entry) == number), None)
        if entry is None:
            raise ToolError(f"no order {number}")
        self.done["orders"].remove(entry)
        self.done["cancelled"].append(entry)
        return "cancelled"

    @tool(read_only=True)
    async def find_email(self, name: str) -> str:
        """Look up an address."""
        if name not in self.addresses:
            raise ToolError(f"no person {name!r}")
        return self.addresses[name]

    @tool(parallel=False)
    async def send_email(self, to: str, text: str) -> str:
        """Send an email."""
        self.done["mails"].append([to, text])
        return "sent"

    @tool(parallel=False)
    async def remind(self, day: str, text: str) -> str:
        """Set a reminder."""
        self.done["reminders"].append([day, text])
        return "set"

    # No job needs the next two.

    @tool(read_only=True)
    async def weather(self, city: str) -> str:
        """Ask for the weather."""
        return f"it is sunny in {city}"

    @tool(read_only=True)
    async def play_music(self, title: str) -> str:
        """Play a song."""
        return f"playing {title}"

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        turns = [Message("assistant", tool_calls=(ToolCall(call["name"], call["arguments"]),)) for call in task.gold["calls"]]
        return [*turns, Message("assistant", "Done.")]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(self.gold_turns(task), rng, **params)
