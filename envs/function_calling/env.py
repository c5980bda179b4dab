"""Function calling in one turn: the correct calls with the correct arguments, or no call if none is correct."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from agentrl.data.trajectory import Json
from agentrl.env import Message, Options, Task, Tool, ToolCall, ToolEnv, content_split, draw, task_rng
from agentrl.env.spaces import sample_arguments
from agentrl.utils.errors import ConfigError, TaskDataError

from .generate import fingerprint, propose
from .readers import read_rows
from .rows import KINDS, MISSING, NO_FUNCTION, Row, history
from .schemas import one_of
from .teacher import Teacher

PROTOCOL = (
    "Make all function calls that the request needs in one turn. If no function fits, make no call and answer "
    f"only: {NO_FUNCTION}. If a required value is not given, make no call and answer only: {MISSING} and the "
    "parameter's name."
)


class FunctionCalling(ToolEnv):
    """The tools are the task's own; a call is recorded, not executed. One turn ends the episode."""

    id = "agentrl/FunctionCalling-v0"
    host_params = frozenset({"data"})
    reward = "function_calling"
    summary = "call the right functions with the right arguments in one turn (own set, BFCL, xLAM, ToolACE, Hermes)"
    order_free = True
    shared = frozenset({"kinds", "calls", "distractors", "rows", "skipped"})

    def __init__(
        self,
        *,
        data: str | None = None,
        layout: str = "auto",
        splits_by: str = "content",
        bad_rows: str = "raise",
        kinds: Sequence[str] | Mapping[str, float] = KINDS,
        calls: int | Sequence[int] = (2, 4),
        distractors: int = 3,
        **base: Any,
    ) -> None:
        """`data`: a local file (or a folder of the Berkeley leaderboard's files) to take tasks from, in a
        `layout` (auto, native, bfcl, xlam, toolace, hermes); seed i is row i of the split. `splits_by`:
        "content" holds out an eighth of the rows, "none" gives every row to both splits (to evaluate on a
        whole file). `bad_rows`: "raise" or "skip".

        Without `data`, tasks are generated: `kinds` (names or name -> weight), `calls` (2..8, a number or
        [low, high]) for the parallel kinds, `distractors` (0..12) additional functions.

        Raises ConfigError for values outside these ranges, TaskDataError for invalid data."""
        super().__init__(**base)
        low, high = (calls, calls) if isinstance(calls, int) else (calls[0], calls[-1])
        if not 2 <= low <= high <= 8:
            raise ConfigError(f"function_calling: calls = {calls!r}; expected a number or [low, high] within 2..8")
        if not 0 <= distractors <= 12:
            raise ConfigError(f"function_calling: distractors = {distractors!r}; expected a number within 0..12")
        for name, value, known in (
            ("splits_by", splits_by, ("content", "none")),
            ("bad_rows", bad_rows, ("raise", "skip")),
        ):
            if value not in known:
                raise ConfigError(f"function_calling: {name} = {value!r}; expected {' or '.join(map(repr, known))}")
        self.kinds, self.calls, self.distractors = _weights(kinds), (low, high), distractors
        self.rows: dict[str, tuple[Row, ...]] | None = None
        self.skipped: tuple[str, ...] = ()
        if data is not None:
            rows, self.skipped = read_rows(data, layout, bad_rows)
            self.rows = _split(rows, splits_by, data)
        self.made: list[Json] = []

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        row = self._row(rng_seed, split)
        return Task(
            id=f"function_calling/{split}/{row.id or rng_seed}",
            seed=rng_seed,
            split=split,
            data={"kind": row.named(), "scoring": row.scoring, "messages": row.messages, "tools": row.tools},
            gold={"calls": row.calls, "answers": row.answers},
        )

    def task_count(self, split: str) -> int | None:
        return None if self.rows is None else len(self.rows.get(split, ()))

    def _row(self, seed: int, split: str) -> Row:
        if self.rows is None:
            return draw(task_rng(self.id, split, seed), split, self._propose, fingerprint)
        if split not in self.rows:
            raise TaskDataError(f"no split {split!r}; expected one of {', '.join(self.rows)}")
        if not (rows := self.rows[split]):
            raise TaskDataError(f'the file has no row in split {split!r}; splits_by = "none" gives every row to both splits')
        return rows[seed % len(rows)]

    def _propose(self, rng: random.Random) -> Row:
        return propose(rng, self.kinds, self.calls, self.distractors)

    def prompt(self, task: Task) -> list[Message]:
        messages = history(list(task.data["messages"]))
        if messages[0].role == "system":
            return [replace(messages[0], content=f"{messages[0].content}\n\n{PROTOCOL}"), *messages[1:]]
        return [Message("system", PROTOCOL), *messages]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.made = []
        for declared in task.data["tools"]:
            self.toolbox.add(_recorder(json.dumps(declared)))
        # The first turn is always the last one: the task is to be solved in one turn.
        self.finish()

    def state(self) -> Json:
        return {"made": list(self.made)}

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        tools = list(task.data["tools"])
        if task.data["scoring"] == "answer":
            return [Message("assistant", task.gold["answers"][0])]
        if task.data["scoring"] == "any":
            chosen = tools[0]["function"]
            arguments = sample_arguments(chosen["parameters"], np.random.default_rng(0))
            return [Message("assistant", tool_calls=(ToolCall(chosen["name"], arguments),))]
        calls = tuple(ToolCall(*one_of(call, tools)) for call in task.gold["calls"])
        return [Message("assistant", tool_calls=calls)]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        names = [tool["function"]["name"] for tool in task.data["tools"]]
        return Teacher(self.gold_turns(task)[0], names, rng, **params)


@lru_cache(maxsize=4096)
def _recorder(declared: str) -> Tool:
    """A tool that only records the call in its environment. Cached by declaration."""
    whole = json.loads(declared)

    async def record(env: FunctionCalling, /, **arguments: Json) -> str:
        env.made.append({"name": whole["function"]["name"], "arguments": arguments})
        return "noted"

    return replace(Tool.from_declaration(whole, record, Options(read_only=True)), method=True)


def _weights(kinds: Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    weights = dict(kinds) if isinstance(kinds, Mapping) else dict.fromkeys([kinds] if isinstance(kinds, str) else kinds, 1.0)
    unknown = [kind for kind in weights if kind not in KINDS]
    if unknown or not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ConfigError(f"function_calling: kinds = {kinds!r}; expected some of {', '.join(KINDS)}, weights >= 0")
    return weights


def _split(rows: tuple[Row, ...], by: str, data: str) -> dict[str, tuple[Row, ...]]:
    """Rows of each split; by the content of request and answer, so that duplicates stay together."""
    if by == "none":
        return {"train": rows, "heldout": rows}
    parts: dict[str, list[Row]] = {"train": [], "heldout": []}
    for row in rows:
        parts[content_split(json.dumps([row.messages, row.calls, row.answers], sort_keys=True))].append(row)
    if not parts["train"]:
        raise TaskDataError(f'{data}: no row left to train on; splits_by = "none" gives every row to both splits')
    return {split: tuple(part) for split, part in parts.items()}
