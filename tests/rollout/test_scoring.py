"""Scores in the loop: success as samplers and evaluation ask for it, members that are compared, and rewards on their tokens."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentrl.config import Choice, RolloutConfig
from agentrl.data.rows import collate
from agentrl.data.trajectory import Group, StopReason, Task, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec, token_rewards
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.player import Job, LocalPlayer, Player, RunEnv, run_tasks, success_rate, summarize
from agentrl.run.evaluate import make_report
from tests.players import Script
from tests.rollout.conftest import FaultyEngine, collecting, steps

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
    spec = {"agentrl_reward": 1, "name": "shaped", "root": root}
    collect = collecting(
        renderer, FaultyEngine(renderer.stop_token_ids[0]), spec, groups=3, group_size=2, max_turns=2, sampler=STAGED
    )
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
        async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
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


# -- from spec over evidence to the token, through the real loop -----------------------------------


REF = EnvRef("key_value", {"calls": 4, "set_share": 0.0})
LIMITS = Limits(max_turns=8, max_turn_tokens=64, max_episode_tokens=2000, turn_timeout=5, episode_timeout=20, context=4096)
GOLD = {"expect": {"$": "/task/gold/calls"}, "compare": "subset", "credit": "matched"}
PER_CALL = {"use": "calls.match", "id": "calls", "args": GOLD, "scope": "call", "emit": "step", "weight": 0.5}
PER_TURN = {
    "use": "calls.match", "id": "turns", "args": GOLD, "scope": "turn", "reduce": "sum", "emit": "step",
    "weight": 0.25, "when": {"$": "/turn/calls", "ne": []},
}  # fmt: skip
OUTCOME = {"use": "number.close", "id": "success", "args": {"expect": {"$": "/task/gold/answer"}}}

# The episode: get, (add, a wrong get), get, add, answer. Four of the five calls are gold calls.
CASES = {
    "call": ([PER_CALL], {0: 0.1, 1: 0.1, 2: 0.1, 3: 0.1}),
    "turn": ([PER_TURN], {0: 0.25, 1: 0.125, 2: 0.25, 3: 0.25}),
    "terminal": ([OUTCOME], {4: 1.0}),
    "all": ([PER_CALL, PER_TURN, OUTCOME], {0: 0.35, 1: 0.225, 2: 0.35, 3: 0.35, 4: 1.0}),
}


def played(renderer: Renderer, root: dict[str, Any]) -> tuple[Trajectory, Any]:
    env = REF.build()
    env.reset(seed=1)
    turns = env.gold_turns(env.task)
    env.close()
    wrong = ToolCall("get", {"key": "z"})
    turns[1] = replace(turns[1], tool_calls=(*turns[1].tool_calls, wrong))
    scorer = compile_spec({"agentrl_reward": 1, "name": "credit", "root": root})
    policy = Policy(Script([renderer.assistant(turn) for turn in turns]), renderer)
    trajectory = asyncio.run(run_episode(REF.build(), policy, EpisodeSpec(1, "train", 0, 0, "k"), LIMITS, scorer))
    return trajectory, scorer.score(trajectory)


@pytest.mark.parametrize("emission", list(CASES))
def test_rewards_lie_on_the_last_sampled_token_of_their_turn(renderer: Renderer, emission: str) -> None:
    parts, wanted = CASES[emission]
    trajectory, score = played(renderer, {"op": "sum", "of": parts})
    assert trajectory.reward == score.value == pytest.approx(sum(wanted.values())) and trajectory.evidence == score.evidence
    assert [turn.reward for turn in trajectory.turns] == [score.turns.get(turn) for turn in range(5)]
    [ledger] = trajectory.ledgers
    # Found from the ledger's own columns, not from where the turns say that they end.
    ends = {turn: int(np.flatnonzero(ledger.sampled & (ledger.turns == turn))[-1]) for turn in range(5)}
    for rewards in (token_rewards(trajectory, score), [collate([trajectory])["rewards"].values().numpy()]):
        [column] = rewards
        there = np.flatnonzero(np.abs(column) > 1e-12)  # what sums of floats leave over is not a reward
        assert {int(i): float(column[i]) for i in there} == pytest.approx({ends[turn]: amount for turn, amount in wanted.items()})
    assert all(ledger.token_ids[end] in renderer.stop_token_ids for end in ends.values())


# -- group leaves in a collected group -------------------------------------------------------------


LENGTH = {"use": "cost.tokens", "args": {"max": 100}}


def spec(use: str, **args: Any) -> dict[str, Any]:
    leaf = {"use": use, "id": "place", "args": {"of": {**LENGTH, "id": "length"}, **args}}
    return {"agentrl_reward": 1, "name": "compared", "root": leaf}


async def collected(renderer: Renderer, reward: dict[str, Any], **engine: Any) -> list[Group]:
    """Two updates of groups of six, whose members answer with a text of random length."""
    config: dict[str, Any] = {"groups": 2, "group_size": 6, "max_turns": 3, "retries": 0, "min_survivors": 2}
    collect = collecting(renderer, FaultyEngine(renderer.stop_token_ids[0], **engine), reward, **config)
    groups = await steps(collect, 2)
    await collect.close()
    return groups


def lengths(members: list[Trajectory]) -> list[int]:
    return [member.sampled_tokens for member in members]


def rank(mine: int, sizes: list[int]) -> float:
    """The documented formula: (members below + ties / 2) / (scored members - 1)."""
    below, ties = sum(size < mine for size in sizes), sizes.count(mine) - 1
    return (below + ties / 2) / (len(sizes) - 1)


async def test_a_member_that_failed_is_not_compared(renderer: Renderer) -> None:
    groups = await collected(renderer, spec("group.rank"), fail=0.15, seed=1)
    lost = [m for group in groups for m in group.trajectories if m.stop is StopReason.ENGINE_ERROR]
    assert lost and all(member.reward is None for member in lost)
    for group in groups:
        left = group.scored()
        assert all((member.reward is None) == member.stop.infrastructure for member in group.trajectories)
        sizes = lengths(left)
        for member, mine in zip(left, sizes, strict=True):
            assert member.reward == pytest.approx(rank(mine, sizes))
            assert member.evidence["root"]["members"] == len(left)
