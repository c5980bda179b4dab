"""Agents of the frameworks that people use, unchanged: each plays an episode with tools, and is trained for a few updates."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config.schema import AgentConfig
from agentrl.data.trajectory import StopReason
from tests.conftest import proof
from tests.contrib.agents.parts import LIMITS, RENDERER, Script, call, play, says
from tests.contrib.agents.test_runs import warm  # noqa: F401 - a fixture
from tests.e2e.inside import config_of, episodes, execute, updates

AGENTS = Path(__file__).parent / "agents"
# agent, what it needs, how it ends an episode on these turns
ENDS = [says("", call("get", key="tea")), says("There are 3.")]
SMOL = [says("", call("get", key="tea")), says("", call("final_answer", answer="There are 3."))]
KINDS = {
    "openai_agent": ("openai", {}, ENDS), "anthropic_agent": ("anthropic", {}, ENDS),
    "langgraph_agent": ("langgraph", {}, ENDS), "openai_agents": ("agents", {}, ENDS),
    "openai_agents-responses": ("agents", {"KIND": "responses"}, ENDS), "smolagents_agent": ("smolagents", {}, SMOL),
}  # fmt: skip
pytestmark = [pytest.mark.timeout(600), proof]


def agent_of(kind: str) -> AgentConfig:
    needs, env, _ = KINDS[kind]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{kind} needs {needs}: pip install 'agentrl[agents]'")
    return AgentConfig(command=[sys.executable, str(AGENTS / f"{kind.split('-')[0]}.py")], env=env, answer="output")


@pytest.mark.parametrize("kind", KINDS)
def test_it_plays_an_episode_with_tools(kind: str) -> None:
    turns = KINDS[kind][2]
    (trajectory,) = play(Script(turns), agent_of(kind), limits=replace(LIMITS, context=8000, max_episode_tokens=8000))
    assert trajectory.stop is StopReason.DONE, f"{trajectory.error}\n{trajectory.agent}"
    sampled = [turn for turn in trajectory.turns if turn.ledger >= 0]
    assert [[c.name for c in turn.message.tool_calls] for turn in sampled] == [[c.name for c in t.tool_calls] for t in turns]
    assert [(r.name, r.content) for r in trajectory.turns[0].results] == [("get", "3")]
    ids = [i for ledger in trajectory.ledgers for i in ledger.token_ids[ledger.sampled].tolist()]
    assert ids == [i for turn in turns for i in RENDERER.assistant(turn)]
    assert trajectory.reward == 1.0 and trajectory.agent is not None and "3" in trajectory.agent["stdout"]


@pytest.mark.parametrize("kind", ["langgraph_agent", "openai_agents", "smolagents_agent", "anthropic_agent"])
def test_it_is_trained_for_a_few_updates(kind: str, warm: str, tmp_path: Path) -> None:  # noqa: F811
    agent = agent_of(kind)
    small = ["steps=2", "rollout.groups=2", "rollout.group_size=2", "eval.tasks=1", "agent.blame=policy", "agent.concurrency=2"]
    run = execute(config_of(tmp_path, kind, warm, f"agent.command={agent.command}", "agent.answer=output", *small))
    rows = updates(run)
    assert len(rows) == 2 and all(row["unscored"] == 0 for row in rows)
    assert all(e.agent is not None and e.sampled_tokens > 0 for step in (1, 2) for e in episodes(run, step))
