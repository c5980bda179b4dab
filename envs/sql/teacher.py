"""An imperfect scripted policy: reads the tables, tries a query and submits it, sometimes a wrong one."""

from __future__ import annotations

from typing import Any

from agentrl.env import Message, Observation, Task, ToolCall


class Teacher:
    """Reads the tables, tries a query and submits it.

    `wrong`: probability that the query is wrong (a condition is missing). `typo`: probability of a first attempt
    that does not parse. `hasty`: probability of a text answer without a submission. `rng` needs only `random()`.
    """

    def __init__(self, task: Task, rng: Any, *, wrong: float = 0.25, typo: float = 0.1, hasty: float = 0.1) -> None:
        sql = str(task.gold["sql"])
        if rng.random() < wrong:
            sql = sql.replace(" WHERE ", " WHERE 1 OR ", 1)
        calls = [ToolCall("tables", {}), ToolCall("query", {"sql": sql}), ToolCall("submit", {"sql": sql})]
        if rng.random() < typo:
            calls.insert(1, ToolCall("query", {"sql": sql.replace("SELECT", "SELEC", 1)}))
        turns = [Message("assistant", tool_calls=(call,)) for call in calls]
        self._turns = turns
        if rng.random() < hasty:
            self._turns = [turns[0], Message("assistant", "I could not find it.")]

    def act(self, observation: Observation) -> Message | None:
        """The next turn; None after the last."""
        return self._turns.pop(0) if self._turns else None
