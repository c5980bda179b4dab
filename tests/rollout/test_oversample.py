"""Oversampling: the slowest are cancelled, which is neither a failure nor a reward, and never in a batch."""

import asyncio
import contextlib
from typing import Any

import pytest

from agentrl.data.trajectory import Group
from agentrl.render.base import Renderer
from agentrl.rollout.collector import Collector
from agentrl.utils.errors import StalledError
from tests.rollout.conftest import FaultyEngine
from tests.rollout.test_collect import batches_of, collector


def played(renderer: Renderer, stuck: tuple[str, ...], updates: int = 2, **rollout: Any) -> tuple[Any, Collector, FaultyEngine]:
    async def scenario() -> tuple[list[list[Group]], Collector, FaultyEngine]:
        engine = FaultyEngine(renderer.stop_token_ids[0], stuck=stuck)
        collect = collector(renderer, engine, stall_timeout=3.0, **rollout)
        batches = await batches_of(collect, updates)
        # Counted before the end: what was given up lets go of the engine.
        async with asyncio.timeout(60):
            while engine.running != 3 * collect.ledger.counts()["running"]:
                await asyncio.sleep(0.01)
        await collect.close()
        assert engine.running == 0
        return batches, collect, engine

    return asyncio.run(scenario())


def test_a_group_that_hangs_is_cancelled_and_the_update_goes_on_without_it(renderer: Renderer) -> None:
    batches, collect, engine = played(renderer, ("g1.",), oversample=1.5)
    assert [[group.index for group in groups] for groups in batches] == [[0, 2], [3, 4]]
    counts = collect.ledger.counts()
    # Group 5 was the spare one of the second update: complete or not, it was one too many.
    assert counts["cancelled"] == 2 and counts["trained"] == 4 and counts["failed"] == counts["stale"] == 0
    assert sum(counts.values()) == collect.ledger.total == 6
    assert "g1.m0.a0" in engine.keys and "g1.m0.a1" not in engine.keys, "a cancelled episode is not retried"


async def test_a_teardown_that_hangs_is_named_and_not_waited_for(renderer: Renderer) -> None:
    collect = collector(renderer, FaultyEngine(renderer.stop_token_ids[0]), stall_timeout=0.2)
    free = asyncio.Event()

    async def stubborn() -> None:
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    collect._ending.add(task := asyncio.create_task(stubborn(), name="group 7"))
    with pytest.raises(StalledError, match=r"group 7 did not end within 0\.2 s"):
        await asyncio.wait_for(collect.rest(), 20)
    await asyncio.wait_for(collect.close(), 20)
    free.set()
    await task


def test_cancelled_groups_do_not_count_as_dropped(renderer: Renderer) -> None:
    """Replaced groups end a run after a while (StalledError); cancelled ones are no sign of trouble."""
    _, collect, _ = played(renderer, (), updates=5, oversample=8.0)
    assert collect.ledger.counts()["cancelled"] == 5 * 14 and not collect.stats._dropped


def test_a_stale_bound_gives_up_no_more_than_the_spare_groups(renderer: Renderer) -> None:
    batches, collect, _ = played(renderer, ("g0.",), updates=3, max_staleness=1, oversample=1.5)
    assert 0 not in [group.index for groups in batches for group in groups]
    assert collect.ledger.counts()["cancelled"] >= 1


def test_a_member_that_hangs_is_cancelled_once_its_group_has_enough(renderer: Renderer) -> None:
    batches, collect, _ = played(renderer, ("g0.m1.",), updates=1, oversample_members=1.3)
    group = batches[0][0]
    assert group.index == 0 and [member.member for member in group.trajectories] == [0, 2, 3]
    assert all(member.reward is not None for member in group.trajectories)
    assert collect.metrics()["members_cancelled"] == 2  # that one, and the fourth of the other group
    assert collect.ledger.counts()["cancelled"] == 0


def test_a_spare_member_takes_the_place_of_one_that_failed(renderer: Renderer) -> None:
    batches, _, _ = played(renderer, ("g0.m1.",), updates=1, oversample_members=1.3, turn_timeout=0.6, retries=0)
    assert len(batches[0][0].scored()) == 3
    without, _, _ = played(renderer, ("g0.m1.",), updates=1, turn_timeout=0.6, retries=0)
    assert len(without[0][0].scored()) == 2
