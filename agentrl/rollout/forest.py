"""The members of a group as trees (`rollout.branch`): which are roots and which are branches, played under the run's slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentrl.rollout.clock import Watch
from agentrl.rollout.player import Job, Player
from agentrl.trajectory import Trajectory

PlayTree = Callable[[int, Sequence[int]], Awaitable[dict[int, Trajectory]]]
PlayMember = Callable[[int], Coroutine[Any, Any, Trajectory]]


def planted(numbers: Sequence[int], roots: int) -> dict[int, list[int]]:
    """The members of each tree, by number: of each root its branches. The first `roots` are roots, and the others are dealt
    out to them, so that trees are as equal as may be."""
    first = numbers[:roots]
    return {root: list(numbers[len(first) + place :: len(first)]) for place, root in enumerate(first)}


async def forest(numbers: Sequence[int], roots: int, tree: PlayTree, member: PlayMember) -> list[Trajectory]:
    """All members, by number. `tree` plays a root with its branches, and returns what came of them; a branch that it lacks, since
    its root failed or offers no place, is played from the beginning by `member`. So a group has as many members as any other."""

    async def grown(root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        found = await tree(root, branches) if branches else {root: await member(root)}
        async with asyncio.TaskGroup() as tasks:
            instead = {one: tasks.create_task(member(one)) for one in branches if one not in found}
        return found | {one: task.result() for one, task in instead.items()}

    async with asyncio.TaskGroup() as tasks:
        trees = [tasks.create_task(grown(root, branches)) for root, branches in planted(numbers, roots).items()]
    found = {number: played for task in trees for number, played in task.result().items()}
    return [found[number] for number in sorted(found)]


@dataclass(slots=True)
class Trees:
    """Plays the trees of one group. `job`: that of an attempt at a member. `attempted` is told of each attempt (its number counts
    from 0) and says whether it was the last; `over` of each member that has ended."""

    player: Player
    slots: EpisodeSlots
    watch: Watch
    retries: int
    job: Callable[[int, int], Job]
    attempted: Callable[[Trajectory, int], bool]
    over: Callable[[int], None]

    async def play(self, root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        """A root and what branched off it, by member: its last attempt. A tree whose root fails is played again as a whole."""
        attempts = range(self.retries + 1)
        specs = tuple(tuple(self.job(member, attempt).spec for attempt in attempts) for member in branches)
        for attempt in attempts:
            # As many as may be open at once, from the start: forks are environments too.
            async with self.slots.take(1 + len(branches)):
                first, *others = await self.player.play_tree(replace(self.job(root, attempt), branches=specs), self.watch)
            if self.attempted(first, attempt):
                break
        tried, found = Counter[int](), {root: first}
        for trajectory in others:
            self.attempted(trajectory, tried[trajectory.member])
            tried[trajectory.member] += 1
            found[trajectory.member] = trajectory
        for member in found:
            self.over(member)
        return found


class EpisodeSlots:
    """So many episodes at once; who asks first gets first."""

    def __init__(self, count: int) -> None:
        self._free, self._several = asyncio.Semaphore(count), asyncio.Lock()

    @asynccontextmanager
    async def take(self, count: int = 1) -> AsyncIterator[None]:
        """Wait for `count` of them, and have them until the end: at most as many as there are, or this never ends."""
        had = 0
        try:
            if count == 1:
                await self._free.acquire()
                had = 1
            else:
                async with self._several:  # two with a half of what they need each would wait for each other
                    while had < count:
                        await self._free.acquire()
                        had += 1
            yield
        finally:
            for _ in range(had):
                self._free.release()
