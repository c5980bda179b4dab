"""The official side of `toolsandbox.py`, run by ToolSandbox's own Python: its runner, its roles and its evaluator.

Only the two models are replaced: `model_inference` of its OpenAI agent and user gives the next scripted turn.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

INSIDE = sys.argv[3]
spec = importlib.util.spec_from_file_location("toolsandbox_inside", INSIDE)
assert spec is not None and spec.loader is not None
# For the clock, so that both sides see the same time; and for its gold.
inside: Any = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = inside
spec.loader.exec_module(inside)
catalog, gold = inside.catalog, inside.gold

from tool_sandbox.common.execution_context import DatabaseNamespace, RoleType, get_current_context  # noqa: E402
from tool_sandbox.roles.execution_environment import ExecutionEnvironment  # noqa: E402
from tool_sandbox.roles.openai_api_agent import OpenAIAPIAgent  # noqa: E402
from tool_sandbox.roles.openai_api_user import OpenAIAPIUser  # noqa: E402


def answer(turn: Any, number: int) -> Any:
    """A turn as OpenAI's client gives it: a text, or a list of [name, arguments]."""
    calls = None
    if not isinstance(turn, str):
        functions = [SimpleNamespace(name=name, arguments=json.dumps(arguments)) for name, arguments in turn]
        calls = [SimpleNamespace(id=f"call_{number}_{place}", function=one) for place, one in enumerate(functions)]
    message = SimpleNamespace(content=turn if calls is None else None, tool_calls=calls)
    return SimpleNamespace(choices=[SimpleNamespace(message=message)])


class ScriptedAgent(OpenAIAPIAgent):
    model_name = "scripted"

    def __init__(self, turns: list[Any]) -> None:
        self.turns, self.number = list(turns), 0

    def model_inference(self, openai_messages: Any, openai_tools: Any) -> Any:
        self.number += 1
        return answer(self.turns.pop(0) if self.turns else "", self.number)


class ScriptedUser(OpenAIAPIUser):
    model_name = "scripted"

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def model_inference(self, openai_messages: Any, openai_tools: Any) -> Any:
        self.lines -= 1
        return answer("OK, go on." if self.lines >= 0 else [["end_conversation", {}]], abs(self.lines))


def official(name: str, turns: list[Any], lines: int) -> dict[str, Any]:
    """What its command writes of a scenario (`run_scenario`: 0 if the play raises), and what the tools answered."""
    inside.ANEW()
    scenario = inside.SCENARIOS[name]
    roles = {
        RoleType.USER: ScriptedUser(lines),
        RoleType.EXECUTION_ENVIRONMENT: ExecutionEnvironment(),
        RoleType.AGENT: ScriptedAgent(turns),
    }
    raised, similarity, turn_count = None, 0.0, scenario.max_messages
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = scenario.play_and_evaluate(roles=roles, output_directory=Path(folder), scenario_name=name)
            similarity, turn_count = found.evaluation_result.similarity, found.evaluation_result.turn_count
        except Exception as fault:
            raised = type(fault).__name__
    rows = get_current_context().get_database(DatabaseNamespace.SANDBOX, get_all_history_snapshots=True).to_dicts()
    told = [row["content"] for row in rows if (row["sender"], row["recipient"]) == ("EXECUTION_ENVIRONMENT", "AGENT")]
    return {"similarity": similarity, "turn_count": turn_count, "raised": raised, "told": told}
