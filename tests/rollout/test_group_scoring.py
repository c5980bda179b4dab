"""Group leaves in a collected group: members get their rank, an unscored one stays unscored and is not compared."""

from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Group, StopReason, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.episode import Policy
from tests.players import collector_of
from tests.rollout.conftest import FaultyEngine, steps

LENGTH = {"use": "cost.tokens", "args": {"max": 100}}


def spec(use: str, **args: Any) -> dict[str, Any]:
    leaf = {"use": use, "id": "place", "args": {"of": {**LENGTH, "id": "length"}, **args}}
    return {"agentrl_reward": 1, "name": "compared", "root": leaf}


async def collected(renderer: Renderer, reward: dict[str, Any], **engine: Any) -> list[Group]:
    """Two updates of groups of six, whose members answer with a text of random length."""
    config = RolloutConfig(groups=2, group_size=6, max_turns=3, stall_timeout=20.0, retries=0, min_survivors=2)
    policy = Policy(FaultyEngine(renderer.stop_token_ids[0], **engine), renderer)
    collect = collector_of(EnvRef("key_value"), policy, compile_spec(reward), config, context=2048, seed=0)
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


async def test_a_member_whose_value_is_null_is_not_compared(renderer: Renderer) -> None:
    reward = spec("group.rank")
    # Null (nothing left to add up) if fewer than three tokens were sampled.
    reward["root"]["args"]["of"] = {"op": "sum", "of": [{**LENGTH, "when": {"$": "/episode/sampled_tokens", "gte": 3}}]}
    members = 0
    for group in await collected(renderer, reward):
        assert [m.reward is None for m in group.trajectories] == [n < 3 for n in lengths(group.trajectories)]
        left = group.scored()
        members += len(left)
        for member, mine in zip(left, lengths(left), strict=True):
            assert member.reward == pytest.approx(rank(mine, lengths(left)))
    assert 0 < members < 24
