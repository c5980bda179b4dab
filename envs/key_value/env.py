"""Key-value store: look up hidden numbers, add them, store others, and report the total."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError

from .teacher import Teacher

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_TOTAL = 99


@dataclass(frozen=True, slots=True)
class Problem:
    """The content of a prompt: numbers to store, keys to report, and whether the keys must be listed first."""

    store: dict[str, int]
    sets: dict[str, int]
    reads: tuple[str, ...]
    listed: bool

    def fingerprint(self) -> str:
        """Everything that a policy has to do and look up, in any order; keys that are not in the goal do not count."""
        values = sorted((key, {**self.store, **self.sets}[key]) for key in self.reads)
        return json.dumps([sorted(self.sets.items()), values, self.listed])


class KeyValue(ToolEnv):
    """Report the sum of stored values. `calls` is the number of calls in the shortest solution."""

    id = "agentrl/KeyValue-v0"
    reward = "key_value"
    summary = "look numbers up in a store, add them, report the total (2 to 50 calls)"
    order_free = True

    def __init__(
        self,
        *,
        calls: int | Sequence[int] = (2, 4),
        set_share: float = 0.1,
        list_share: float = 0.0,
        keys: int = 10,
        max_value: int = 9,
        **base: Any,
    ) -> None:
        """`calls`: a number or [lowest, highest] of required calls, 2..50. `set_share`, `list_share`: share
        of tasks that first store numbers, or that first list the keys. `keys`: size of the key alphabet
        (larger if a task needs more). `max_value`: largest stored value, lowered so that no total exceeds
        99. Raises ConfigError for values outside these ranges."""
        super().__init__(**base)
        pair = list(calls) if isinstance(calls, Sequence) else [calls, calls]
        if len(pair) != 2 or not all(isinstance(n, int) for n in pair) or not 2 <= pair[0] <= pair[1] <= 50:
            raise ConfigError(f"key_value: calls = {calls!r}; expected a number or [low, high] within 2..50")
        low, high = pair
        if not (set_share >= 0 and list_share >= 0 and set_share + list_share <= 1):
            raise ConfigError("key_value: set_share and list_share must be shares with a sum of at most 1")
        if not (2 <= keys <= 26 and 1 <= max_value <= MAX_TOTAL):
            raise ConfigError(f"key_value: expected keys in 2..26 and max_value in 1..99, got {keys}, {max_value}")
        self.shapes = _shapes(low, high, set_share, list_share)
        if not self.shapes:
            raise ConfigError(f"key_value: no task has {low}..{high} calls; an odd number needs set_share or list_share above 0")
        self.keys, self.max_value = keys, max_value
        self.values: dict[str, int] = {}
        self.total = 0

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        problem = draw(task_rng(self.id, split, rng_seed), split, self._propose, Problem.fingerprint)
        calls = gold_calls(problem)
        total = sum({**problem.store, **problem.sets}[key] for key in problem.reads)
        return Task(
            id=f"key_value/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={"goal": _goal(problem), "store": problem.store, "items": len(problem.reads)},
            gold={
                "answer": str(total),
                "calls": [{"name": call.name, "arguments": call.arguments} for call in calls],
                "state": {"store": {**problem.store, **problem.sets}, "total": total},
                "sets": problem.sets,
                "reads": list(problem.reads),
                "listed": problem.listed,
            },
        )

    def _propose(self, rng: random.Random) -> Problem:
        weights = [weight for *_, weight in self.shapes]
        sets, listed, reads, _ = rng.choices(self.shapes, weights)[0]
        spare = 0 if listed else 2
        alphabet = LETTERS[: min(26, max(self.keys, reads + sets + spare))]
        names = rng.sample(alphabet, min(len(alphabet), reads + sets + spare))
        top = min(self.max_value, MAX_TOTAL // reads)
        chosen = names[:reads]
        stored = names[reads : reads + sets]
        if sets and reads > 1 and rng.random() < 0.5:
            # One of the stored keys is reported too, but at least one other key has to be looked up.
            stored = [chosen[-1], *stored[1:]]
        values = {key: rng.randint(1, top) for key in [*chosen, *names[reads + sets :]] if key not in stored}
        wanted = sorted(values) if listed else chosen
        return Problem(dict(sorted(values.items())), {key: rng.randint(1, top) for key in stored}, tuple(wanted), listed)

    def prompt(self, task: Task) -> list[Message]:
        return [
            Message("system", "get each key, add its value, report the total."),
            Message("user", task.data["goal"]),
        ]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.values = dict(task.data["store"])
        self.total = 0

    def state(self) -> Json:
        return {"store": dict(self.values), "total": self.total}

    @tool(read_only=True)
    async def get(self, key: str) -> int | str:
        """value of a key"""
        return self.values.get(key, "none")

    @tool(name="set")
    async def set_value(self, key: str, x: int) -> str:
        """store x under a key"""
        self.values[key] = x
        return "ok"

    @tool(name="list", read_only=True)
    async def list_keys(self) -> str:
        """all keys"""
        return " ".join(sorted(self.values))

    @tool
    async def add(self, x: int) -> int:
        """add x to the total"""
        self.total += x
        return self.total

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        calls = task.gold["calls"]
        turns = [Message("assistant", tool_calls=(ToolCall(call["name"], call["arguments"]),)) for call in calls]
        return [*turns, Message("assistant", task.gold["answer"])]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(task, rng, **params)


def gold_calls(problem: Problem) -> list[ToolCall]:
    """The calls of the shortest solution, in the order of the goal."""
    calls = [ToolCall("set", {"key": key, "x": x}) for key, x in problem.sets.items()]
    if problem.listed:
        calls.append(ToolCall("list", {}))
    values = {**problem.store, **problem.sets}
    for key in problem.reads:
        calls += [ToolCall("get", {"key": key}), ToolCall("add", {"x": values[key]})]
    return calls


def _goal(problem: Problem) -> str:
    stores = "".join(f"store {x} under {key}, then " for key, x in problem.sets.items())
    return stores + "report " + ("all" if problem.listed else " + ".join(problem.reads))


def _shapes(low: int, high: int, set_share: float, list_share: float) -> list[tuple[int, bool, int, float]]:
    """(stores, listed, reads, weight) of every kind of task within the range; each kind's weight is spread
    evenly over the numbers of calls it can have."""
    kinds: list[list[tuple[int, bool, int]]] = [[], [], []]
    for calls in range(low, high + 1):
        if calls % 2 == 0:
            kinds[0].append((0, False, calls // 2))
        sets = 1 if calls % 2 else 2
        if calls >= sets + 2:
            kinds[1].append((sets, False, (calls - sets) // 2))
        if calls % 2:
            kinds[2].append((0, True, (calls - 1) // 2))
    weights = (1 - set_share - list_share, set_share, list_share)
    return [(*shape, weight / len(kind)) for kind, weight in zip(kinds, weights, strict=True) for shape in kind if weight > 0]
