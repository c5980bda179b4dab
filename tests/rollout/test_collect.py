"""The collector under random delays, failures and hangs: nothing lost, nothing trained twice, no deadlock."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.catalog import EnvRef
from agentrl.config import RolloutConfig
from agentrl.errors import StalledError
from agentrl.render.base import Renderer
from agentrl.reward import Scorer, compile_spec, load_spec
from agentrl.rollout.collect import Collector
from agentrl.rollout.episode import Policy
from agentrl.trajectory import Group, StopReason

from .conftest import FaultyEngine

ENV = EnvRef("key_value")


def scorer() -> Scorer:
    return compile_spec(load_spec(ENV.default_reward()))


def collector(renderer: Renderer, engine: FaultyEngine, **rollout: Any) -> Collector:
    config = RolloutConfig(**{"groups": 2, "group_size": 3, "max_turns": 3, "stall_timeout": 20.0, **rollout})
    return Collector(ENV, Policy(engine, renderer), scorer(), config, context=2048, seed=0)


async def run(collect: Collector, updates: int) -> list[list[Group]]:
    batches = []
    for _ in range(updates):
        groups = await collect.collect()
        batches.append(groups)
        collect.trained(groups)
        await collect.publish([])
    await collect.close()
    return batches


def fingerprint(batches: list[list[Group]]) -> list[Any]:
    return [[[t.ledgers[0].to_json() for t in group.trajectories] for group in groups] for groups in batches]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.4]), st.sampled_from([0.0, 0.004]), st.integers(0, 2**30),
    st.integers(0, 1),
)
def test_invariants_under_failures_and_delays(
    renderer: Renderer, eta: int, fail: float, delay: float, seed: int, retries: int
) -> None:
    async def scenario() -> None:
        engine = FaultyEngine(renderer.stop_token_ids[0], fail=fail, max_delay=delay, seed=seed)
        collect = collector(renderer, engine, max_staleness=eta, retries=retries)
        seen: set[int] = set()
        for update in range(4):
            groups = await collect.collect()
            assert len(groups) == 2
            for group in groups:
                assert group.index not in seen
                seen.add(group.index)
                assert len(group.scored()) >= 2
                for member in group.scored():
                    versions = member.ledgers[0].versions[member.ledgers[0].sampled]
                    assert update - int(versions.min()) <= eta
                for member in group.trajectories:
                    assert (member.reward is None) == member.stop.infrastructure
            collect.trained(groups)
            await collect.publish([])
            assert sum(collect.ledger.counts().values()) == collect.ledger.dispatched
        await collect.close()
        assert engine.running == 0, "a cancelled episode left its request behind"

    asyncio.run(scenario())


def test_without_staleness_the_batches_are_those_of_a_plain_loop(renderer: Renderer) -> None:
    stop = renderer.stop_token_ids[0]
    calm = asyncio.run(_batches(renderer, FaultyEngine(stop)))
    jittery = asyncio.run(_batches(renderer, FaultyEngine(stop, max_delay=0.01, seed=5)))
    assert fingerprint(calm) == fingerprint(jittery)
    assert [[group.index for group in groups] for groups in calm] == [[0, 1], [2, 3], [4, 5]]


async def _batches(renderer: Renderer, engine: FaultyEngine) -> list[list[Group]]:
    return await run(collector(renderer, engine), 3)


def test_when_every_group_is_filtered_the_run_says_so(renderer: Renderer) -> None:
    async def scenario() -> None:
        # Random text never scores, so every group has zero variance.
        collect = collector(renderer, FaultyEngine(renderer.stop_token_ids[0]), filter_zero_variance=True)
        try:
            await collect.collect()
        finally:
            await collect.close()

    with pytest.raises(StalledError, match=r"every member scored 0"):
        asyncio.run(scenario())


def test_when_all_but_one_member_fails_the_run_says_why(renderer: Renderer) -> None:
    async def scenario() -> None:
        collect = collector(renderer, FaultyEngine(renderer.stop_token_ids[0], fail=1.0), retries=0)
        try:
            await collect.collect()
        finally:
            await collect.close()

    with pytest.raises(StalledError, match="the replica went away"):
        asyncio.run(scenario())


def test_a_hanging_engine_ends_as_a_typed_outcome_and_not_as_reward_zero(renderer: Renderer) -> None:
    async def scenario() -> list[list[Group]]:
        engine = FaultyEngine(renderer.stop_token_ids[0], hang=0.15, seed=3)
        return await run(collector(renderer, engine, turn_timeout=0.2, retries=0, group_size=4), 3)

    members = [t for groups in asyncio.run(scenario()) for group in groups for t in group.trajectories]
    hung = [t for t in members if t.stop is StopReason.ENGINE_ERROR]
    assert hung and all(t.reward is None and "no answer within" in (t.error or "") for t in hung)


def test_the_watchdog_names_what_it_waits_for(renderer: Renderer) -> None:
    async def scenario() -> None:
        engine = FaultyEngine(renderer.stop_token_ids[0], hang=1.0)
        collect = collector(renderer, engine, stall_timeout=0.3)
        try:
            await collect.collect()
        finally:
            await collect.close()

    with pytest.raises(StalledError, match=r"update 0 waits for group 0, group 1"):
        asyncio.run(scenario())


def test_complete_groups_survive_a_resume_and_none_is_skipped(renderer: Renderer) -> None:
    async def scenario() -> None:
        stop = renderer.stop_token_ids[0]
        first = collector(renderer, FaultyEngine(stop), max_staleness=1)
        groups = await first.collect()
        first.trained(groups)
        state = first.ledger.to_json()
        await first.close()
        again = collector(renderer, FaultyEngine(stop), max_staleness=1)
        again.ledger.load_json(state)
        batches = await run(again, 3)
        indexes = [group.index for groups in batches for group in groups]
        assert sorted(indexes) == [2, 3, 4, 5, 6, 7]

    asyncio.run(scenario())
