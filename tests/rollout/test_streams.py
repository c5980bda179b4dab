"""Every request has a random stream of its own, greedy ones are greedy, and groups start when the bound has room."""

import asyncio
import itertools
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import pytest

from agentrl.config import RolloutConfig
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import compile_spec
from agentrl.rollout.context import Compact
from agentrl.rollout.engine import Sampling
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from tests.players import collector_of, run_tasks
from tests.publishing import exchange
from tests.rollout.conftest import steps, until
from tests.rollout.test_blame import DONE, Actor, play
from tests.rollout.test_blame import room as room  # the fixture

Where = tuple[str, int]
"""A request: its episode's key, and its number within the episode."""

TALK = [("call", "wait", {"seconds": 0.0}), ("call", "wait", {"seconds": 0.0}), "bye"]
LIMITS = Limits(8, 24, 4000, 10.0, 60.0, 4000)


def stream(path: str) -> int:
    """The seed of a path, worked out here."""
    return int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "big") // 2


async def collected(env: EnvRef, renderer: Renderer, seed: int, updates: int = 2, **config: Any) -> dict[Where, Sampling]:
    """What the engine was asked for two updates of two groups, each with two members and a greedy episode; the second
    member's tool server is dead, so it is tried twice."""
    engine = Actor(renderer, {-1: TALK, 0: TALK, 1: [*TALK[:2], ("call", "ask", {})], 2: TALK})
    settings = RolloutConfig(groups=2, group_size=3, temperature=0.7, **config)
    policy = Policy(engine, renderer, settings.temperature)
    collect = collector_of(env, policy, compile_spec(DONE), settings, context=4000, seed=seed, greedy=True)
    await steps(collect, updates)
    await collect.close()
    numbers: dict[str, itertools.count[int]] = {}
    return {(key, next(numbers.setdefault(key, itertools.count()))): sampling for key, sampling in engine.asked}


async def test_no_two_requests_share_a_stream(room: Callable[..., EnvRef], renderer: Renderer) -> None:
    """By group, member (the greedy one too, which alone is at temperature 0), attempt and turn: 4 x (3 + 3 + 3 x 2 + 3) requests
    and as many seeds."""
    asked = await collected(room(), renderer, seed=5)
    assert len(asked) == 4 * 15
    seeds = {where: sampling.seed for where, sampling in asked.items()}
    assert len(set(seeds.values())) == len(seeds)
    for (key, turn), seed in seeds.items():
        group, member, attempt = (int(part[1:]) for part in key.split("."))
        assert seed == stream(f"{stream(f'5/episode/{group}/{member}/{attempt}')}/turn/{turn}")
    assert {key for key, _ in seeds if key.startswith("g0.m1.")} == {"g0.m1.a0", "g0.m1.a1"}
    temperatures = {(key.split(".")[1], sampling.temperature) for (key, _), sampling in asked.items()}
    assert temperatures == {("m-1", 0.0), ("m0", 0.7), ("m1", 0.7), ("m2", 0.7)}
    again = {where: sampling.seed for where, sampling in (await collected(room(), renderer, seed=5, updates=1)).items()}
    assert len(again) == 2 * 15 and again.items() <= seeds.items()
    others = await collected(room(), renderer, seed=6, updates=1)
    assert not {sampling.seed for sampling in others.values()} & set(seeds.values())


async def test_a_summary_has_another_stream_than_the_turn_that_it_comes_before(room: Any, renderer: Renderer) -> None:
    engine = Actor(renderer, {0: [("call", "wait", {"seconds": 0.0})]})
    policy = Policy(engine, renderer, context=Compact(tokens=170, summary_tokens=16, prompt="Sum up.", keep=1))
    spec = EpisodeSpec(1, "train", 99, 0, "g0.m0.a0")
    trajectory = await run_episode(room().build(), policy, spec, LIMITS, compile_spec(DONE))
    assert len(trajectory.rewrites) >= 2
    seeds = [sampling.seed for _, sampling in engine.asked]
    turns = {stream(f"99/turn/{turn}") for turn in range(len(trajectory.turns))}
    summaries = {stream(f"99/summary/{rewrite['turn']}") for rewrite in trajectory.rewrites}
    assert len(set(seeds)) == len(seeds) and set(seeds) == turns | summaries and not turns & summaries


async def test_evaluation_has_streams_of_its_own(room: Callable[..., EnvRef], renderer: Renderer) -> None:
    """By split, task and member; none of them is one of training, whatever the seed."""
    engine, pairs, more = Actor(renderer, {0: TALK, 1: TALK}), [(0, 0), (0, 1), (1, 0)], {"seed": 5, "max_episodes": 4}
    for split in ("heldout", "train"):
        await run_tasks(room(), Policy(engine, renderer), compile_spec(DONE), LIMITS, pairs, split=split, **more)
    seeds = {sampling.seed for _, sampling in engine.asked}
    assert len(seeds) == 18
    training = {sampling.seed for sampling in (await collected(room(), renderer, seed=5, updates=1)).values()}
    assert not training & seeds


@pytest.mark.parametrize(("staleness", "started"), [(0, 0), (1, 1), (2, 1)])
async def test_a_publish_starts_what_the_bound_has_room_for(
    room: Callable[..., EnvRef], renderer: Renderer, staleness: int, started: int
) -> None:
    """`staleness` further groups run while the trainer works; a publish makes room for one more at once."""
    engine = Actor(renderer, {0: ["bye"], 1: ["bye"]})
    config = RolloutConfig(groups=1, group_size=2, max_staleness=staleness)
    collect = collector_of(room(), Policy(engine, renderer), compile_spec(DONE), config, context=4000, seed=0)

    async def asked(most: int) -> set[str]:
        """The groups that asked, once so many did and others had time to."""
        await until(lambda: len({key.split(".")[0] for key in engine.keys}) >= most)
        await asyncio.sleep(0.2)
        return {key.split(".")[0] for key in engine.keys}

    groups = await collect.collect()
    before = await asked(1 + staleness)
    collect.trained(groups)
    trained = await asked(1 + staleness)
    await exchange(collect)
    after = await asked(1 + staleness + started)
    await collect.close()
    assert before == trained == {f"g{number}" for number in range(1 + staleness)}
    assert after - trained == {f"g{1 + staleness}" for _ in range(started)}


async def test_training_episodes_are_of_one_task_of_the_train_split(room: Callable[..., EnvRef], renderer: Renderer) -> None:
    members, _ = await play(room(), renderer, {0: ["bye"], 1: ["bye"]})
    assert {(member.task.split, member.task.seed) for member in members} == {("train", members[0].task.seed)}
