"""The members of a group as trees: roots that begin at the beginning, and branches that leave them at their turns."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from agentrl.config.schema import BranchConfig
from agentrl.contrib.branching.forks import BranchHook, Fork, Places
from agentrl.data.trajectory import StopReason, Task, Trajectory
from agentrl.rollout.collector import MEMBERS, GroupRun
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Job, LocalPlayer, Script


@dataclass(frozen=True, slots=True)
class TreeScript(Script):
    """A tree of episodes that one process plays: a job's own is the root.

    `branches`: what identifies each attempt at each, in order. The next is made if one ends by a fault of the infrastructure.
    """

    config: BranchConfig
    branches: tuple[tuple[EpisodeSpec, ...], ...]

    def specs(self) -> Iterable[EpisodeSpec]:
        return itertools.chain(*self.branches)

    async def play(self, job: Job, player: LocalPlayer, watch: Watch) -> list[Trajectory]:
        """The root, then every attempt at every branch, in the order of `branches`, but of those for which it has no turn to
        branch at; the root alone if it ended by a fault of the infrastructure. Every fork that was kept is closed."""
        places = Places(self.config, len(self.branches))
        try:
            root = await player.episode(job, watch, places)
            if root.stop.infrastructure:
                return [root]
            forks = await places.choose(root)
            async with asyncio.TaskGroup() as tasks:
                begun = [(fork, of) for fork, of in zip(forks, self.branches, strict=True) if fork is not None]
                playing = [tasks.create_task(_attempt_branch(job, fork, of, player, watch)) for fork, of in begun]
            return [root, *(trajectory for task in playing for trajectory in task.result())]
        finally:
            await places.close()


async def _attempt_branch(
    job: Job, fork: Fork, attempts: Sequence[EpisodeSpec], player: LocalPlayer, watch: Watch
) -> list[Trajectory]:
    found: list[Trajectory] = []
    for spec in attempts:
        try:
            env = fork.env.fork()
        except Exception as fault:  # whatever an author's class raises: a fault of the infrastructure, as in an episode
            made = Trajectory(fork.env.id, Task("", spec.task_seed, spec.split), spec.seed, spec.member, parent=fork.member)
            made.error = f"no fork of environment {fork.env.id}: {type(fault).__name__}: {fault}"
            made.stop, made.cause, made.branch_turn = StopReason.ENV_ERROR, {"blame": "infrastructure"}, fork.turn
            found.append(made)
            continue
        found.append(await player.episode(replace(job, spec=spec, script=None), watch, BranchHook(fork), env))
        if not found[-1].stop.infrastructure:
            break
    return found


def plant_trees(numbers: Sequence[int], roots: int) -> dict[int, list[int]]:
    """The members of each tree, by number: of each root its branches. The first `roots` are roots, and the others are dealt
    out to them, so that trees are as equal as may be."""
    first = numbers[:roots]
    return {root: list(numbers[len(first) + place :: len(first)]) for place, root in enumerate(first)}


@MEMBERS.register("branch")
class Forest:
    """All members of a group, by number. A branch that its tree lacks, since its root failed or offers no place, is played from
    the beginning, so a group has as many members as any other."""

    def __init__(self, config: BranchConfig) -> None:
        self.config = config
        self._waiting = asyncio.Lock()

    async def __call__(self, run: GroupRun, numbers: Sequence[int]) -> list[Trajectory]:
        async with asyncio.TaskGroup() as tasks:
            trees = [tasks.create_task(self._tree(run, *tree)) for tree in plant_trees(numbers, self.config.roots).items()]
        found = {number: trajectory for task in trees for number, trajectory in task.result().items()}
        return [found[number] for number in sorted(found)]

    async def _tree(self, run: GroupRun, root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        """The members of a tree: the last attempt at each."""
        found = await self._grow(run, root, branches) if branches else {root: await run.member(root)}
        async with asyncio.TaskGroup() as tasks:
            instead = {one: tasks.create_task(run.member(one)) for one in branches if one not in found}
        return found | {one: task.result() for one, task in instead.items()}

    async def _grow(self, run: GroupRun, root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        """A root and what branched off it. A tree whose root fails is played again as a whole."""
        attempts = range(run.retries + 1)
        specs = tuple(tuple(run.job(member, attempt).spec for attempt in attempts) for member in branches)
        for attempt in attempts:
            # As many as may be open at once, from the start: forks are environments too.
            async with self.take(run.slots, 1 + len(branches)):
                job = replace(run.job(root, attempt), script=TreeScript(self.config, specs))
                first, *others = await run.player.play_all(job, run.watch)
            if run.attempted(first, attempt):
                break
        tried, found = Counter[int](), {root: first}
        for trajectory in others:
            run.attempted(trajectory, tried[trajectory.member])
            tried[trajectory.member] += 1
            found[trajectory.member] = trajectory
        for member in found:
            run.over(member)
        return found

    @asynccontextmanager
    async def take(self, slots: asyncio.Semaphore, count: int) -> AsyncIterator[None]:
        """Wait for `count` slots, and have them until the end: at most as many as there are, or this never ends."""
        had = 0
        try:
            async with self._waiting:  # two trees with a half of what they need each would wait for each other
                while had < count:
                    await slots.acquire()
                    had += 1
            yield
        finally:
            for _ in range(had):
                slots.release()
