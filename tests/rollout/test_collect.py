"""The collector under random delays, failures and hangs: nothing lost, nothing trained twice, no deadlock."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Group, StopReason, Task, Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.render.base import Renderer
from agentrl.reward import load_spec
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import Generation, Sampling
from agentrl.rollout.group_ledger import GroupState
from agentrl.rollout.samplers import TaskChoice
from agentrl.utils.errors import EngineError, NothingScoredError, StalledError
from tests.players import tasks_of
from tests.publishing import exchange
from tests.rollout.conftest import LENGTH, FaultyEngine, collecting, only_update, resume, steps, until


def collector(renderer: Renderer, engine: FaultyEngine, **rollout: Any) -> Collector:
    spec = load_spec(EnvRef("key_value").default_reward())
    return collecting(renderer, engine, spec, **{"groups": 2, "group_size": 3, "max_turns": 3, **rollout})


async def batches_of(collect: Collector, updates: int) -> list[list[Group]]:
    """The groups of so many updates; the collector goes on."""
    return [await steps(collect, 1) for _ in range(updates)]


async def run(collect: Collector, updates: int) -> list[list[Group]]:
    batches = await batches_of(collect, updates)
    await collect.close()
    return batches


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 0.4]),
    st.sampled_from([0.0, 0.004]),
    st.integers(0, 2**30),
    st.integers(0, 1),
    st.sampled_from([1.0, 1.5, 3.0]),
    st.sampled_from([1.0, 1.3, 2.0]),
    st.integers(0, 4),
)
async def test_invariants_under_failures_delays_oversampling_and_a_resume(
    renderer: Renderer,
    eta: int,
    fail: float,
    delay: float,
    seed: int,
    retries: int,
    groups_more: float,
    members_more: float,
    killed_at: int,
) -> None:
    def start() -> tuple[FaultyEngine, Collector]:
        engine = FaultyEngine(renderer.stop_token_ids[0], fail=fail, max_delay=delay, seed=seed)
        return engine, collector(renderer, engine, max_staleness=eta, retries=retries, oversample=groups_more,
                                 oversample_members=members_more)  # fmt: skip

    engine, collect = start()
    seen: set[int] = set()
    for update in range(4):
        groups = await collect.collect()
        assert len(groups) == 2
        counts = collect.ledger.counts()
        assert sum(counts.values()) == collect.ledger.total
        assert counts["cancelled"] == 0 or groups_more > 1
        assert collect.stats.cancelled == 0 or members_more > 1
        for group in groups:
            assert group.index not in seen
            seen.add(group.index)
            assert 2 <= len(group.scored()) <= 3
            assert len({member.member for member in group.trajectories}) == len(group.trajectories)
            assert all(member.stop is not StopReason.CANCELLED for member in group.trajectories)
            for member in group.scored():
                versions = member.ledgers[0].versions[member.ledgers[0].sampled]
                assert update - int(versions.min()) <= eta
            for member in group.trajectories:
                assert (member.reward is None) == member.stop.infrastructure
        collect.trained(groups)
        if update == killed_at:
            before = engine, collect
            engine, collect = start()
            await resume(before[1], collect)
            assert before[0].running == 0
        else:
            await exchange(collect)
        assert sum(collect.ledger.counts().values()) == collect.ledger.total
    counts = collect.ledger.counts()
    assert counts["trained"] == len(seen) == 8
    assert set(tasks_of(collect).drawn) == {e.index for e in collect.ledger._entries.values()
                                         if e.state is GroupState.RUNNING} | set(collect.ledger._again)  # fmt: skip
    await collect.close()
    assert engine.running == 0, "a cancelled episode left its request behind"


class Timed(FaultyEngine):
    """One token a tick of the test's own clock, so that a test says what happens between two updates."""

    def __init__(self, stop: int, lengths: dict[str, int]) -> None:
        super().__init__(stop)
        self.lengths, self.tick, self.turn = lengths, 0, asyncio.Condition()

    async def advance(self) -> None:
        async with self.turn:
            self.tick += 1
            self.turn.notify_all()
        for _ in range(20):
            await asyncio.sleep(0)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        length = next((n for prefix, n in self.lengths.items() if request_key.startswith(prefix)), 0)
        versions = []
        for _ in range(length):
            async with self.turn:
                now = self.tick
                await self.turn.wait_for(lambda now=now: self.tick > now)  # type: ignore[misc]
            versions.append(self.version)
        return Generation([260] * length + [self.stop], [-1.0] * (length + 1), [*versions, self.version], "stop")


async def test_an_episode_goes_on_over_three_updates_and_each_token_has_its_version(renderer: Renderer) -> None:
    engine = Timed(renderer.stop_token_ids[0], {"g0.": 4})
    collect = collector(renderer, engine, max_staleness=3)
    for version in range(4):
        if version == 3:
            await engine.advance()  # group 0 is now waited for: this update is the last that may train it
        groups = await collect.collect()
        assert (0 in [group.index for group in groups]) == (version == 3)
        collect.trained(groups)
        if version < 3:
            await engine.advance()
        await exchange(collect)
    await collect.close()
    for member in next(group for group in groups if group.index == 0).trajectories:
        [ledger] = member.ledgers
        assert ledger.versions[ledger.sampled].tolist() == [0, 1, 2, 3, 3]


async def test_without_staleness_the_batches_are_those_of_a_plain_loop(renderer: Renderer) -> None:
    stop, rows = renderer.stop_token_ids[0], []
    for engine in (FaultyEngine(stop), FaultyEngine(stop, max_delay=0.01, seed=5)):
        batches = await run(collector(renderer, engine), 3)
        rows.append([[t.ledgers[0].to_json() for t in group.trajectories] for groups in batches for group in groups])
        assert [[group.index for group in groups] for groups in batches] == [[0, 1], [2, 3], [4, 5]]
    assert rows[0] == rows[1]


async def test_when_no_episode_is_ever_scored_the_run_ends_with_an_updates_groups_and_says_why(renderer: Renderer) -> None:
    """Not after 8 times as many groups, as when others were scored."""
    collect = collector(renderer, FaultyEngine(renderer.stop_token_ids[0], fail=1.0), retries=0, groups=5, group_size=3)
    said = r"none of the first \d+ episodes of \d groups.*engine_error.*the replica went away"
    with pytest.raises(NothingScoredError, match=said):
        await collect.collect()
    assert 15 <= collect.stats.episodes <= 30
    await collect.close()


class FirstAreSlow(FaultyEngine):
    """Groups 0 and 1 are sound, and answer only once five others have failed, which all others do."""

    failed = 0

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if request_key.startswith(("g0.", "g1.")):
            await until(lambda: self.failed >= 15)
            return await super().generate(token_ids, sampling, request_key)
        self.failed += 1
        raise EngineError("the replica went away")


async def test_what_fails_at_once_does_not_end_a_run_whose_older_groups_still_play(renderer: Renderer) -> None:
    collect = collector(renderer, FirstAreSlow(renderer.stop_token_ids[0]), retries=0, oversample=2.5)
    assert [group.index for group in await only_update(collect)] == [0, 1]


async def test_a_resumed_run_that_had_scored_episodes_bears_as_many_failures_as_before(renderer: Renderer) -> None:
    """That none of its first episodes was scored would be wrong of it."""
    first = collector(renderer, FaultyEngine(renderer.stop_token_ids[0]))
    await steps(first, 1)
    again = collector(renderer, FaultyEngine(renderer.stop_token_ids[0], fail=1.0), retries=0)
    await resume(first, again)
    with pytest.raises(StalledError, match=r"update 1: 1[78] groups failed \(limit 16\); the last: .*the replica went away"):
        await only_update(again)


async def test_attempts_that_came_to_no_score_are_counted_wherever_they_ended(renderer: Renderer) -> None:
    """One of a member that was tried again, six of a group that was dropped: none of them is a member of the update."""
    engine = FaultyEngine(renderer.stop_token_ids[0], lost=("g0.m0.a0", "g1."))
    collect = collector(renderer, engine, retries=1)
    rows = []
    for _ in range(2):
        await steps(collect, 1)
        rows.append(collect.metrics())
    await collect.close()
    [first, second], trouble, fault = rows, collect.stats.trouble(), collect.stats.fault
    assert first["faults/engine_error"] == 1 + 3 * 2, "since the last update"
    assert (first["episodes_played"], first["episodes_unscored"]) == (3 * 3, 3), "also those of the dropped group"
    assert (second["episodes_played"], second["episodes_unscored"]) == (3 * 2, 0)
    assert fault is not None and "engine_error: the replica went away" in fault
    assert not any(key.startswith("faults/") for key in second)
    assert trouble.startswith("7 episodes came to no score; the first: ")
    assert trouble.endswith(": engine_error: the replica went away")


async def test_a_collector_says_how_far_the_next_update_is(renderer: Renderer) -> None:
    engine = FaultyEngine(renderer.stop_token_ids[0], stuck=("g1.m2.",))
    collect = collector(renderer, engine)
    said = [collect.ahead()]
    engine.open.clear()
    collecting = asyncio.create_task(collect.collect())
    await asyncio.sleep(0.02)
    said.append(collect.ahead())
    engine.open.set()
    await until(lambda: collect.ahead() == "5/6 episodes")  # three of a complete group, two of one that still runs
    said.append(collect.watch.waiting())
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    await collect.close()
    before, begun, waits = said
    assert before == begun == "0/6 episodes"
    assert waits.startswith("episode g1.m2.a0 for 0 s on ")


class Solved(FaultyEngine):
    """Every episode of the groups in `varied` differs in length; those of all others are alike."""

    def __init__(self, stop: int, varied: frozenset[int] = frozenset(), **faults: Any) -> None:
        super().__init__(stop, **faults)
        self.varied = varied

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        if self.fail or self.max_delay:
            await super().generate(token_ids, sampling, request_key)
        group, member = (int(part[1:]) for part in request_key.split(".")[:2])
        length = 2 + 3 * (member % 2) if group in self.varied else 2
        return Generation([260] * length + [self.stop], [-1.0] * (length + 1), [self.version] * (length + 1), "stop")


def solved(
    renderer: Renderer, varied: frozenset[int] = frozenset(), kind: type[Solved] = Solved, *, delay: float = 0.0, seed: int = 0,
    **rollout: Any,
) -> Collector:  # fmt: skip
    engine = kind(renderer.stop_token_ids[0], varied, max_delay=delay, seed=seed)
    config = {"groups": 2, "group_size": 2, "max_turns": 1, "filter_zero_variance": True, **rollout}
    return collecting(renderer, engine, LENGTH, **config)


async def rows(collect: Collector, updates: int, close: bool = True) -> list[tuple[list[int], float, float]]:
    """Of each update: its groups, how many were filtered for it, and how many of those taken have no variance."""
    found = []
    for _ in range(updates):
        groups = await steps(collect, 1)
        numbers = collect.metrics()
        found.append(([group.index for group in groups], numbers["groups_filtered"], numbers["groups_zero_variance"]))
    if close:
        await collect.close()
    return found


async def test_the_bound_on_filtering_is_per_update_and_leaves_groups_that_teach(renderer: Renderer) -> None:
    """Only 1 and 7 of the first ten groups have variance. By hand, in the order of their numbers: update 0 filters 0
    and 2, takes 1 and then 3 as it is; update 1 filters 4 and 5, takes 6 as it is, and 7. A bound of 0 filters none."""
    varied = frozenset({1, 7})
    assert await rows(solved(renderer, varied, max_filtered=1.0), 2) == [([1, 3], 2.0, 1.0), ([6, 7], 2.0, 1.0)]
    for seed in range(3):  # which of the groups without variance are taken hangs on who came first, nothing else does
        first, second = await rows(solved(renderer, varied, max_filtered=1.0, delay=0.004, seed=seed), 2)
        assert 1 in first[0] and 7 in second[0] and first[1:] == second[1:] == (2.0, 1.0)
    assert await rows(solved(renderer, max_filtered=0.0), 2) == [([0, 1], 0.0, 2.0), ([2, 3], 0.0, 2.0)]


@pytest.mark.parametrize(("eta", "more"), [(0, 1.0), (0, 2.0), (2, 1.0), (1, 1.5)])
async def test_the_bound_on_filtering_with_staleness_oversampling_and_a_resume(renderer: Renderer, eta: int, more: float) -> None:
    """However far ahead groups run: no update has more than 2 x 2 groups filtered for it, and none stalls."""

    def start(seed: int) -> Collector:
        return solved(renderer, max_filtered=2.0, max_staleness=eta, oversample=more, delay=0.003, seed=seed)

    first = start(0)
    found = await rows(first, 3, close=False)
    before = first.ledger.counts()["filtered"]
    again = start(1)
    state = await resume(first, again)
    assert sum(row[1] for row in found) + state["filtered"] == before
    resumed = await rows(again, 3)
    assert all(row[1] <= 4.0 and row[2] == 2.0 for row in found + resumed)
    # Groups that ran ahead may come back after an update has all it needs: the next then has them already.
    assert eta or all(row[1] == 4.0 for row in found + resumed)
    indices = [index for row in found + resumed for index in row[0]]
    assert len(set(indices)) == 12


async def test_failed_groups_have_a_limit_of_their_own(renderer: Renderer) -> None:
    """Of all groups but the first 40, which are filtered, every episode fails: the limit of 2 x 8 counts those alone."""

    class Lost(Solved):
        async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
            if int(request_key.split(".")[0][1:]) >= 40:
                raise EngineError("the replica went away")
            return await super().generate(token_ids, sampling, request_key)

    collect = solved(renderer, kind=Lost, max_filtered=100.0, retries=0)
    with pytest.raises(StalledError, match=r"1[78] groups failed \(limit 16\).*the replica went away"):
        await collect.collect()
    await collect.close()
    counts = collect.ledger.counts()
    assert counts["filtered"] == 40 and counts["failed"] in (17, 18) and counts["stale"] == 0


@pytest.mark.parametrize(("stuck", "survives"), [(("g0.m0.",), True), (("g0.m0.", "g0.m1."), False)])
async def test_a_group_lives_with_min_survivors_and_not_with_one_fewer(
    renderer: Renderer, stuck: tuple[str, ...], survives: bool
) -> None:
    engine = FaultyEngine(renderer.stop_token_ids[0], stuck=stuck)
    collect = collector(renderer, engine, turn_timeout=0.6, retries=0, groups=1, min_survivors=2)
    [group] = await only_update(collect)
    counts = collect.ledger.counts()
    assert (group.index == 0) is survives and counts["failed"] == (0 if survives else 1)
    assert len(group.trajectories) == 3 and len(group.scored()) == (2 if survives else 3)


async def test_groups_that_are_too_old_after_a_resume_are_replaced_at_once(renderer: Renderer) -> None:
    stop = renderer.stop_token_ids[0]
    first = collector(renderer, FaultyEngine(stop), max_staleness=1)
    groups = await first.collect()
    await until(lambda: first.ledger.counts()["complete"] == 4)
    first.trained(groups)
    # The config was changed between the two: what was sampled one version ago may not be trained any more.
    again = collector(renderer, FaultyEngine(stop), max_staleness=0)
    await resume(first, again)
    groups = await only_update(again)
    assert [group.index for group in groups] == [4, 5]


async def test_complete_groups_survive_a_resume_and_none_is_skipped(renderer: Renderer) -> None:
    stop = renderer.stop_token_ids[0]
    first = collector(renderer, FaultyEngine(stop, stuck=("g2.",)), max_staleness=1)
    groups = await first.collect()
    await until(lambda: first.ledger.counts()["complete"] == 3)
    first.trained(groups)
    # Group 3 is complete and untrained, group 2 still runs.
    engine = FaultyEngine(stop)
    again = collector(renderer, engine, max_staleness=1)
    waiting = (await resume(first, again))["complete"]
    batches = await run(again, 3)
    assert sorted(group.index for groups in batches for group in groups) == [2, 3, 4, 5, 6, 7]
    assert [row["index"] for row in waiting] == [3]
    assert not [key for key in engine.keys if key.startswith("g3.")], "a complete group was run again"
    assert [key for key in engine.keys if key.startswith("g2.")], "the one that ran was forgotten"
    [replayed] = [group for groups in batches for group in groups if group.index == 3]
    assert json.loads(json.dumps([m.to_json() for m in replayed.trajectories])) == waiting[0]["trajectories"]


async def test_a_task_s_outcome_counts_episodes_from_the_beginning_alone(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed root with three successful branches failed: branches begin where the root had come."""
    collect = collector(renderer, FaultyEngine(renderer.stop_token_ids[0]), groups=1, group_size=4)
    told: list[float | None] = []
    monkeypatch.setattr(collect.tasks, "finish", lambda index, success, tokens: told.append(success))
    members = [Trajectory("x", Task("t", 0), reward=0.0, success=False)]
    members += [Trajectory("x", Task("t", 0), reward=1.0, success=True, parent=0, member=n) for n in (1, 2, 3)]
    index = collect.ledger.admit()
    assert index is not None
    [env] = collect.envs
    collect._names[index] = env
    monkeypatch.setattr(collect, "_group", AsyncMock(return_value=Group(index, index, members, env=env)))
    await collect._run_group(index, TaskChoice(0, env=env))
    await collect.close()
    assert told == [0.0]


# -- oversampling: the slowest are cancelled, and never in a batch ---------------------------------


async def played(
    renderer: Renderer, stuck: tuple[str, ...], updates: int = 2, **rollout: Any
) -> tuple[list[list[Group]], Collector, FaultyEngine]:
    engine = FaultyEngine(renderer.stop_token_ids[0], stuck=stuck)
    collect = collector(renderer, engine, stall_timeout=3.0, **rollout)
    batches = await batches_of(collect, updates)
    # Counted before the end: what was given up lets go of the engine.
    await until(lambda: engine.running == 3 * collect.ledger.counts()["running"])
    await collect.close()
    assert engine.running == 0
    return batches, collect, engine


async def test_a_group_that_hangs_is_cancelled_and_the_update_goes_on_without_it(renderer: Renderer) -> None:
    batches, collect, engine = await played(renderer, ("g1.",), oversample=1.5)
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


async def test_cancelled_groups_do_not_count_as_dropped(renderer: Renderer) -> None:
    """Replaced groups end a run after a while (StalledError); cancelled ones are no sign of trouble."""
    _, collect, _ = await played(renderer, (), updates=5, oversample=8.0)
    assert collect.ledger.counts()["cancelled"] == 5 * 14 and not collect.stats._dropped


async def test_a_stale_bound_gives_up_no_more_than_the_spare_groups(renderer: Renderer) -> None:
    batches, collect, _ = await played(renderer, ("g0.",), updates=3, max_staleness=1, oversample=1.5)
    assert 0 not in [group.index for groups in batches for group in groups]
    assert collect.ledger.counts()["cancelled"] >= 1


async def test_a_member_that_hangs_is_cancelled_once_its_group_has_enough(renderer: Renderer) -> None:
    batches, collect, _ = await played(renderer, ("g0.m1.",), updates=1, oversample_members=1.3)
    group = batches[0][0]
    assert group.index == 0 and [member.member for member in group.trajectories] == [0, 2, 3]
    assert all(member.reward is not None for member in group.trajectories)
    assert collect.metrics()["members_cancelled"] == 2  # that one, and the fourth of the other group
    assert collect.ledger.counts()["cancelled"] == 0


async def test_a_spare_member_takes_the_place_of_one_that_failed(renderer: Renderer) -> None:
    batches, _, _ = await played(renderer, ("g0.m1.",), updates=1, oversample_members=1.3, turn_timeout=0.6, retries=0)
    assert len(batches[0][0].scored()) == 3
    without, _, _ = await played(renderer, ("g0.m1.",), updates=1, turn_timeout=0.6, retries=0)
    assert len(without[0][0].scored()) == 2
