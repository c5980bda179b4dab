"""Questions over a SQLite database, answered by submitting a query and scored by its result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from agentrl.contrib.toolkit.sqlite import QueryLimits, Table, query
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ConfigError, ToolError

from .questions import FORMS, Question
from .results import canonical
from .teacher import Teacher
from .worlds import WORLDS, World, database, schema

SYSTEM = "Answer the question with one SQL query: try queries with query, then submit the final one."
ANSWER_ROWS = 200


class Sql(ToolEnv):
    """The database is bytes; every query opens its own copy, so that an episode has no open connection."""

    id = "agentrl/Sql-v0"
    reward = "sql"
    summary = "answer questions over generated SQLite databases with a query"
    shared = frozenset({"levels", "limits", "rows", "show_schema", "twins"})

    def __init__(
        self,
        *,
        level: int | Sequence[int] = (1, 3),
        rows: int = 120,
        twins: int = 1,
        show_schema: bool = True,
        result_rows: int = 30,
        **base: Any,
    ) -> None:
        """`level`: a number or [lowest, highest] within 1..5. `rows` (50..1000) of the largest table. `twins`
        (0..3): additional databases with the same tables and other rows on which the submitted query must be
        correct too, so that a constant is not enough. `show_schema`: whether the prompt shows the tables.
        `result_rows` (5..200) shown of a query result. Raises ConfigError for values outside these ranges."""
        super().__init__(**base)
        low, high = (level, level) if isinstance(level, int) else (level[0], level[-1])
        if not 1 <= low <= high <= max(FORMS):
            raise ConfigError(f"sql: level = {level!r}; expected a number or [low, high] within 1..5")
        bounds = {"rows": (rows, 50, 1000), "twins": (twins, 0, 3), "result_rows": (result_rows, 5, 200)}
        for name, (value, least, most) in bounds.items():
            if not least <= value <= most:
                raise ConfigError(f"sql: {name} = {value!r}; expected a number within {least}..{most}")
        self.levels, self.rows, self.twins, self.show_schema = range(low, high + 1), rows, twins, show_schema
        self.limits = QueryLimits(rows=result_rows)
        self.images: tuple[bytes, ...] = ()
        self.queries = 0
        self.results: list[Json] | None = None

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        rng = task_rng(self.id, split, rng_seed)
        while True:
            # The same question over other rows is the same problem, so the question alone decides the split.
            world, question = draw(rng, split, self._propose, lambda drawn: drawn[1].sql)
            if (filled := self._fill(world, question, rng)) is not None:
                break
        seeds, answers = filled
        return Task(
            id=f"sql/{split}/{rng_seed}",
            seed=rng_seed,
            split=split,
            data={
                "question": question.text,
                "world": world.name,
                "databases": seeds,
                "rows": self.rows,
                "ordered": question.ordered,
            },
            gold={"sql": question.sql, "results": answers},
        )

    def _propose(self, rng: random.Random) -> tuple[World, Question]:
        world = WORLDS[rng.choice(list(WORLDS))]
        return world, rng.choice(FORMS[rng.choice(self.levels)])(world, rng)

    def _fill(self, world: World, question: Question, rng: random.Random) -> tuple[list[int], list[list[Json]]] | None:
        """Databases on which the answer is not empty, with a different answer on each twin than on the first; None
        if a few tries found none."""
        for _ in range(5):
            seeds = [rng.randrange(2**32) for _ in range(1 + self.twins)]
            tables = [query(database(world.name, seed, self.rows), question.sql, QueryLimits(rows=ANSWER_ROWS)) for seed in seeds]
            answers = [canonical(table, question.ordered) for table in tables]
            empty = any(not rows or rows in ([[0]], [[None]]) for rows in answers)
            apart = all(answers[0] != other for other in answers[1:])
            if not empty and apart and not any(table.more for table in tables):
                return seeds, answers
        return None

    def prompt(self, task: Task) -> list[Message]:
        text = task.data["question"]
        if self.show_schema:
            text = f"{schema(WORLDS[task.data['world']])}\n\n{text}"
        return [Message("system", SYSTEM), Message("user", text)]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        world, rows = task.data["world"], task.data["rows"]
        self.images = tuple(database(world, seed, rows) for seed in task.data["databases"])
        self.queries, self.results = 0, None

    def state(self) -> Json:
        return {"queries": self.queries, "results": self.results}

    @tool(inline=True, read_only=True)
    def tables(self) -> str:
        """The tables of the database, as CREATE statements."""
        return schema(WORLDS[self.task.data["world"]])

    @tool(name="query", read_only=True, concurrency=4, timeout=60)
    def run_query(self, sql: str) -> str:
        """Run one SELECT statement (SQLite) and see its result.

        Args:
            sql: the statement
        """
        self.queries += 1
        return query(self.images[0], sql, self.limits).text()

    @tool(parallel=False, concurrency=4, timeout=60)
    def submit(self, sql: str) -> str:
        """Submit the final query; this ends the task. A query that fails is not taken.

        Args:
            sql: one SELECT statement with the asked columns in the asked order
        """
        if self.results is not None:
            raise ToolError("a query was submitted already")
        tables = [query(image, sql, QueryLimits(rows=ANSWER_ROWS)) for image in self.images]
        self.results = [self._judged(table) for table in tables]
        self.finish()
        return "submitted"

    def _judged(self, table: Table) -> Json:
        """A result as the reward compares it; too many rows never match a gold answer."""
        return "too many rows" if table.more else canonical(table, self.task.data["ordered"])

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        sql = task.gold["sql"]
        calls = [ToolCall("query", {"sql": sql}), ToolCall("submit", {"sql": sql})]
        return [Message("assistant", tool_calls=(call,)) for call in calls]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        return Teacher(task, rng, **params)
