"""Samplers and evaluation under rewards that a cost, a scale or a comparison shapes: they ask for success."""

from typing import Any

import pytest

from agentrl.config import Choice, RolloutConfig
from agentrl.data.trajectory import Task, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv, run_tasks, success_rate, summarize
from agentrl.run.evaluate import make_report
from tests.players import collector_of
from tests.rollout.conftest import FaultyEngine, steps

ANY = {"use": "format.regex", "args": {"pattern": "(?s).*", "where": "all"}}
TOKENS = {"use": "cost.tokens", "args": {"max": 100}}
SHAPED = {
    "a cost": {"op": "sum", "of": [ANY, {**TOKENS, "weight": -0.5}]},
    "a scale": {"op": "sum", "of": [ANY, {**TOKENS, "weight": -0.5}], "scale": [-1, 1]},
    "a comparison": {"op": "sum", "of": [ANY, {"use": "group.rank", "scope": "group", "weight": -0.5, "args": {"of": TOKENS}}]},
}
STAGED = Choice(name="staged", args={"stages": [{"calls": 2}, {"calls": 4}], "threshold": 0.9, "window": 3, "review": 0.0})


@pytest.mark.parametrize("root", SHAPED.values(), ids=SHAPED)
async def test_a_curriculum_goes_on_though_nothing_earns_the_highest_reward(renderer: Renderer, root: dict[str, Any]) -> None:
    """All 12 groups succeed: the first window of three fills the first stage."""
    config = RolloutConfig(groups=3, group_size=2, max_turns=2, sampler=STAGED)
    scorer = compile_spec({"agentrl_reward": 1, "name": "shaped", "root": root})
    policy = Policy(FaultyEngine(renderer.stop_token_ids[0]), renderer)
    collect = collector_of(EnvRef("key_value"), policy, scorer, config, context=2048, seed=0)
    await steps(collect, 4)
    await collect.close()
    found = collect.metrics()
    assert (found["sampler/stage"], found["sampler/stage_success"]) == (1.0, 1.0)


@pytest.mark.parametrize(("name", "reward"), [("a cost", 1.0), ("a comparison", None)])
async def test_an_evaluation_counts_successes(renderer: Renderer, name: str, reward: float | None) -> None:
    engine = FaultyEngine(renderer.stop_token_ids[0])
    scorer = compile_spec({"agentrl_reward": 1, "name": "shaped", "root": SHAPED[name]})
    part = RunEnv("kv", EnvRef("key_value"), Policy(engine, renderer), scorer, Limits.of(RolloutConfig(), 2048))
    found = summarize(await run_tasks(LocalPlayer([part]), "kv", [(0, 0), (1, 0), (2, 0)], seed=0, max_episodes=4))
    assert (found.success, found.scored, found.unscored) == (1.0, 3, 0)
    assert (found.reward is None) if reward is None else (found.reward is not None and 0.5 < found.reward < reward)


async def test_an_evaluations_seed_moves_the_sampling_and_not_the_tasks() -> None:
    asked: list[tuple[int, str, int]] = []

    class Stub(Player):
        async def play_all(self, job: Job, watch: Watch) -> list[Trajectory]:
            asked.append((job.spec.task_seed, job.spec.split, job.spec.seed))
            return [rated("x", 1.0, True)]

    for seed in (3, 4):
        await run_tasks(Stub(), "kv", [(0, 0), (1, 0)], seed=seed, max_episodes=4)
    assert asked == [(task, "heldout", derive(seed, "heldout", task, 0)) for seed in (3, 4) for task in (0, 1)]


def rated(task: str, reward: float | None, success: bool | None) -> Trajectory:
    return Trajectory("x", Task(task, 0), reward=reward, success=success)


def test_rates_are_over_what_is_known() -> None:
    """An outage knows neither; a success node without a value leaves a reward; a group leaf leaves a success."""
    rows = [("a", 0.5, True), ("a", 0.9, False), ("b", None, None), ("b", 0.7, None), ("c", None, True)]
    episodes = [rated(*row) for row in rows]
    assert success_rate(episodes) == pytest.approx(2 / 3) and success_rate(episodes[2:4]) is None
    found = summarize(episodes)
    assert (found.success, found.scored, found.unscored) == (pytest.approx(2 / 3), 4, 1)
    assert found.reward == pytest.approx(0.7)
    report = make_report(episodes, samples=2)
    assert report["pass@1"]["mean"] == pytest.approx((0.5 + 1.0) / 2) and report["pass@2"]["mean"] == 1.0
    assert report["unscored"] == 1
