"""An imperfect scripted policy: reads the tables, tries a query and submits it, sometimes a wrong one."""

from __future__ import annotations

from typing import Any

from agentrl.env import Message, Task, ToolCall
from agentrl.env.authoring import GoldTeacher, check_shares


class Teacher(GoldTeacher):
    """Reads the tables, tries a query and submits it.

    `wrong`: probability that the query is wrong (a condition is missing). `typo`: probability of a first attempt
    that does not parse. `hasty`: probability of a text answer without a submission. `rng` needs only `random()`.
    """

    def __init__(self, task: Task, rng: Any, *, wrong: float = 0.25, typo: float = 0.1, hasty: float = 0.1) -> None:
        check_shares(wrong=wrong, typo=typo, hasty=hasty)
        sql = str(task.gold["sql"])
        if rng.random() < wrong:
            sql = sql.replace(" WHERE ", " WHERE 1 OR ", 1)
        calls = [ToolCall("tables", {}), ToolCall("query", {"sql": sql}), ToolCall("submit", {"sql": sql})]
        if rng.random() < typo:
            calls.insert(1, ToolCall("query", {"sql": sql.replace("SELECT", "SELEC", 1)}))
        turns = [Message("assistant", tool_calls=(call,)) for call in calls]
        hurries = rng.random() < hasty
        super().__init__([turns[0], Message("assistant", "I could not find it.")] if hurries else turns, rng)
