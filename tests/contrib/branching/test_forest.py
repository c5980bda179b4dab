"""The members of a group as trees: which slots they take, what is tried again, and who is told what of each attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agentrl.config.schema import BranchConfig
from agentrl.contrib.branching.trees import Forest, TreeScript
from agentrl.data.trajectory import StopReason, Task, Trajectory
from agentrl.rollout.collector import GroupRun
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Job, Player


def ended(spec: EpisodeSpec, failed: bool = False) -> Trajectory:
    stop = StopReason.ENGINE_ERROR if failed else StopReason.DONE
    return Trajectory("", Task(spec.key, 0), member=spec.member, stop=stop)


class Made(Player):
    """Plays by a rule: `fails` says of a key whether that attempt ends by a fault. `most` is how many were open at once, from
    the moment in which a tree began."""

    def __init__(self, fails: Callable[[str], bool] = lambda key: False) -> None:
        self.fails, self.open, self.most, self.trees = fails, 0, 0, list[str]()

    async def held(self, count: int) -> None:
        self.open += count
        self.most = max(self.most, self.open)
        for _ in range(5):
            await asyncio.sleep(0)
        self.open -= count

    async def play_all(self, job: Job, watch: Watch) -> list[Trajectory]:
        if not isinstance(job.script, TreeScript):
            await self.held(1)
            return [ended(job.spec)]
        self.trees.append(job.spec.key)
        await self.held(1 + len(job.script.branches))
        if self.fails(job.spec.key):
            return [ended(job.spec, True)]
        found = [ended(job.spec)]
        for attempts in job.script.branches:
            for spec in attempts:
                found.append(ended(spec, self.fails(spec.key)))
                if not self.fails(spec.key):
                    break
        return found


def job(member: int, attempt: int) -> Job:
    return Job("kv", EpisodeSpec(0, "train", 0, member, f"m{member}.a{attempt}"))


def group(
    player: Made, slots: asyncio.Semaphore, told: list[tuple[str, int, bool]], over: list[int], retries: int = 1
) -> GroupRun:
    def attempted(trajectory: Trajectory, attempt: int) -> bool:
        last = not trajectory.stop.infrastructure or attempt == retries
        told.append((trajectory.task.id, attempt, last))
        return last

    async def alone(member: int) -> Trajectory:
        async with slots:
            return await player.play(job(member, 0), Watch())

    return GroupRun(player, slots, Watch(), retries, job, attempted, over.append, alone)


async def grown(
    player: Made, size: int, roots: int, slots: int
) -> tuple[list[Trajectory], list[tuple[str, int, bool]], list[int]]:
    told, over = list[tuple[str, int, bool]](), list[int]()
    async with asyncio.timeout(10):
        play = Forest(BranchConfig(roots=roots))
        return await play(group(player, asyncio.Semaphore(slots), told, over), range(size)), told, over


@pytest.mark.parametrize("slots", [3, 4, 6, 20])
async def test_no_more_episodes_are_open_than_there_are_slots_and_all_come_to_an_end(slots: int) -> None:
    player = Made()
    found, _, over = await grown(player, 9, 3, slots)
    assert [trajectory.member for trajectory in found] == sorted(over) == list(range(9))
    assert player.most == min(slots // 3, 3) * 3, "a tree of three takes three from the start, and none waits without need"


async def test_two_trees_that_wait_for_slots_do_not_have_half_of_them_each() -> None:
    """All slots are taken, and come free one after the other while both trees wait."""
    slots, player, play = asyncio.Semaphore(4), Made(), Forest(BranchConfig(roots=1))
    run, gates = group(player, slots, [], []), [asyncio.Event() for _ in range(4)]

    async def single(gate: asyncio.Event) -> None:
        async with slots:
            await gate.wait()

    singles = [asyncio.create_task(single(gate)) for gate in gates]
    await asyncio.sleep(0)
    both = [asyncio.ensure_future(play(run, [0, 1, 2])), asyncio.ensure_future(play(run, [3, 4, 5]))]
    for gate in gates:
        for _ in range(3):
            await asyncio.sleep(0)
        gate.set()
    async with asyncio.timeout(10):
        assert [[one.member for one in found] for found in await asyncio.gather(*both)] == [[0, 1, 2], [3, 4, 5]]
        await asyncio.gather(*singles)
    assert player.most == 3


async def test_who_gives_up_waiting_gives_back_what_it_had_and_no_more() -> None:
    slots, forest = asyncio.Semaphore(2), Forest(BranchConfig())

    async def hold(count: int, gate: asyncio.Event) -> None:
        async with forest.take(slots, count):
            await gate.wait()

    gate = asyncio.Event()
    first, second = asyncio.create_task(hold(1, gate)), asyncio.create_task(hold(2, gate))
    for _ in range(3):
        await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    inside = [asyncio.create_task(hold(1, asyncio.Event())) for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    gate.set()
    await first
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), slots:
                pass
    for task in inside:
        task.cancel()
    async with asyncio.timeout(10), forest.take(slots, 2):
        pass


async def test_a_tree_whose_root_fails_is_played_again_as_a_whole_and_its_branches_with_it() -> None:
    player = Made(lambda key: key == "m0.a0")
    found, told, over = await grown(player, 4, 2, 8)
    assert sorted(player.trees) == ["m0.a0", "m0.a1", "m1.a0"] and sorted(over) == [0, 1, 2, 3]
    assert [trajectory.task.id for trajectory in found] == ["m0.a1", "m1.a0", "m2.a0", "m3.a0"]
    of_root = [entry for entry in told if entry[0].startswith("m0")]
    assert of_root == [("m0.a0", 0, False), ("m0.a1", 1, True)]


async def test_each_attempt_at_a_branch_is_told_with_its_number_and_the_last_one_stays() -> None:
    player = Made(lambda key: key in ("m1.a0", "m2.a0", "m2.a1"))
    found, told, over = await grown(player, 3, 1, 8)
    assert [(trajectory.task.id, trajectory.stop) for trajectory in found] == [
        ("m0.a0", StopReason.DONE),
        ("m1.a1", StopReason.DONE),
        ("m2.a1", StopReason.ENGINE_ERROR),
    ]
    assert told == [("m0.a0", 0, True), ("m1.a0", 0, False), ("m1.a1", 1, True), ("m2.a0", 0, False), ("m2.a1", 1, True)]
    assert sorted(over) == [0, 1, 2]


async def test_a_root_that_fails_for_good_leaves_its_branches_to_begin_at_the_beginning() -> None:
    player = Made(lambda key: key.startswith("m0"))
    found, told, _ = await grown(player, 3, 1, 8)
    assert player.trees == ["m0.a0", "m0.a1"] and [entry[0] for entry in told] == ["m0.a0", "m0.a1"]
    assert [(trajectory.task.id, trajectory.stop.infrastructure) for trajectory in found] == [
        ("m0.a1", True),
        ("m1.a0", False),
        ("m2.a0", False),
    ]
