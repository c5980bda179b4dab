"""Trees of episodes: forks of an episode before its turns, branches that continue them, and groups as trees."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentrl.config.schema import BranchConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Blame, StopReason, Task, Trajectory, Turn
from agentrl.env import ToolEnv
from agentrl.rollout.collector import MEMBERS, GroupRun
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.episode import EpisodeHook, EpisodeSpec, RunningEpisode
from agentrl.rollout.player import Job, LocalPlayer, Script
from agentrl.utils.errors import EnvError, fault_text

log = logging.getLogger(__name__)

# Forks

CONVERSATION = ("renderer", "offered", "shown", "opening", "begun", "fork", "suffix", "rewrites")
"""Attributes of a running episode that a branch copies unchanged."""


@dataclass(frozen=True, slots=True)
class Fork(EpisodeHook):
    """A copy of the episode of member `member` before it sampled turn `turn`.

    `env`: a fork of its environment. `ledgers`: each with its tokens so far. `used`: seconds of the episode's limit, by who is to
    blame. As a hook, it lets a branch continue from there in a fork of `env`.
    """

    member: int
    turn: int
    env: ToolEnv
    ledgers: Sequence[tuple[TokenLedger, int]]
    used: dict[Blame, float]
    conversation: dict[str, Any]

    @classmethod
    def of(cls, episode: RunningEpisode, turn: int) -> Fork:
        """Fork the episode before `turn`. Raises EnvError if its environment cannot be forked."""
        try:
            env = episode.env.fork()
        except Exception as fault:
            raise EnvError(f"no fork before turn {turn}: {fault_text(fault)}") from fault
        conversation = {name: getattr(episode, name) for name in CONVERSATION} | {"rewrites": list(episode.rewrites)}
        ledgers = [(ledger, len(ledger)) for ledger in episode.ledgers]
        return cls(episode.spec.member, turn, env, ledgers, dict(episode.waits.used), conversation)

    async def close(self) -> None:
        """Tear down its environment. Errors are only logged, so that the episodes keep their results."""
        try:
            await self.env.aclose()
        except Exception:
            log.exception("the teardown of a fork of environment %s failed", self.env.id)

    async def begin(self, episode: RunningEpisode) -> StopReason | None:
        """Copy the conversation of the parent episode, whose sampled tokens are context here."""
        record = episode.record = episode.env.trajectory
        record.parent, record.branch_turn = self.member, self.turn
        for turn in record.turns:  # sampled by the parent, so none of their tokens are this episode's
            turn.ledger = turn.end = -1
        # In place, because observers of the episode hold this list.
        episode.ledgers[:] = [ledger.fork(length) for ledger, length in self.ledgers]
        for name, value in self.conversation.items():
            setattr(episode, name, value)
        episode.rewrites = list(episode.rewrites)
        episode.waits.used.update(self.used)
        return None

    def complete(self, trajectory: Trajectory) -> None:
        """Drop the ledgers before the first one with sampled tokens of the branch: they are the parent's, and rows without
        trained tokens would be computed for nothing."""
        ledgers = trajectory.ledgers
        before = max(next((n for n, ledger in enumerate(ledgers) if ledger.sampled_tokens), len(ledgers) - 1), 0)
        trajectory.ledgers = ledgers[before:]
        for turn in trajectory.turns[trajectory.branch_turn :]:
            turn.ledger = max(turn.ledger - before, -1)
        trajectory.rewrites = [
            {**made, "ledger": made["ledger"] - before} for made in trajectory.rewrites if made["ledger"] >= before
        ]


class Places(EpisodeHook):
    """Keeps the forks of a running episode that may become branch points. Keeps no more than needed where the best so far are
    known ("entropy", "failure"), and never the first turn's: a branch there would be another episode."""

    def __init__(self, config: BranchConfig, branches: int) -> None:
        """`branches`: number of branches of the episode."""
        self._config, self._branches, self._most = config, branches, count_places(config, branches)
        self._fixed = config.turns[: self._most]
        self._kept: dict[int, tuple[float, Fork]] = {}
        self._first: int | None = None
        self._next: Fork | None = None

    async def before(self, turn: int, episode: RunningEpisode) -> None:
        assert episode.record is not None
        await self._keep_last_fork(episode.record.turns, episode.ledgers)
        if self._first is None:
            self._first = turn
        elif not self._fixed or turn in self._fixed:
            self._next = Fork.of(episode, turn)

    async def choose(self, trajectory: Trajectory) -> list[Fork | None]:
        """Return the branch turns of the finished episode, None for a branch that begins at the start; closes all other forks.

        With fixed turns each branch has its own: whether a turn has a branch must not depend on tokens sampled after it.
        """
        await self._keep_last_fork(trajectory.turns, trajectory.ledgers)
        turns: Collection[int] = self._fixed or self._best_turns(self._most)
        if self._config.at == "depth" and not self._fixed:  # the kept turns that cut the episode into the most equal parts
            kept = sorted(self._kept)
            most = min(self._most, len(kept))
            # Of n + 1 turns, the first without a fork, cut k times: before those at (n + 1) i / (k + 1).
            places = (round((len(kept) + 1) * i / (most + 1)) for i in range(1, most + 1))
            turns = sorted({kept[min(max(place, 1), len(kept)) - 1] for place in places})
        for turn in self._kept.keys() - set(turns):
            await self._kept.pop(turn)[1].close()
        found = [self._kept[turn][1] if turn in self._kept else None for turn in turns] or [None]
        return [found[place % len(found)] for place in range(self._branches)]

    async def close(self) -> None:
        """Close all remaining forks; idempotent."""
        forks = [fork for _, fork in self._kept.values()] + ([] if self._next is None else [self._next])
        self._kept, self._next = {}, None
        for fork in forks:
            await fork.close()

    async def _keep_last_fork(self, turns: Sequence[Turn], ledgers: Sequence[TokenLedger]) -> None:
        """Keep the last fork, now that its turn has ended, if it is worth more than another."""
        fork, self._next = self._next, None
        if fork is None:
            return
        worth = self._score(turns[fork.turn], ledgers) if fork.turn < len(turns) else None
        if worth is None:
            return await fork.close()
        self._kept[fork.turn] = worth, fork
        if self._config.at != "depth" and len(self._kept) > self._most:
            await self._kept.pop(self._best_turns(len(self._kept))[-1])[1].close()

    def _score(self, turn: Turn, ledgers: Sequence[TokenLedger]) -> float | None:
        """Score a branch point before a turn; None forbids it. For "entropy": the mean of -log pi over the turn's sampled tokens,
        in nats per token, which estimates the mean entropy of their distributions."""
        if self._config.at != "entropy":
            wanted = self._config.at == "depth" or any(result.error is not None for result in turn.results)
            return 0.0 if wanted else None
        if not 0 <= turn.ledger < len(ledgers):
            return None
        ledger = ledgers[turn.ledger]
        found = ledger.logprobs[ledger.sampled & (ledger.turns == turn.index)]
        return -float(np.mean(found, dtype=np.float64)) if len(found) else None

    def _best_turns(self, most: int) -> list[int]:
        """Return the kept turns by descending score, earlier ones first among equals."""
        return sorted(self._kept, key=lambda turn: (-self._kept[turn][0], turn))[:most]


def count_places(config: BranchConfig, branches: int) -> int:
    """Return the maximum number of branch points of an episode with this many branches."""
    return -(-branches // config.width)


# Trees


@dataclass(frozen=True, slots=True)
class TreeScript(Script):
    """A tree of episodes played by one process; the job's own episode is the root.

    `branches`: per branch its attempts, in order. The next attempt is made if one ends by an infrastructure fault.
    """

    config: BranchConfig
    branches: tuple[tuple[EpisodeSpec, ...], ...]

    def specs(self) -> Iterable[EpisodeSpec]:
        return itertools.chain(*self.branches)

    async def play(self, job: Job, player: LocalPlayer, watch: Watch) -> list[Trajectory]:
        """Play the root, then all branches, and return all attempts by member; branches without a turn to branch at are omitted,
        and all if the root ended by an infrastructure fault. Closes every fork."""
        places, found = Places(self.config, len(self.branches)), list[Trajectory]()
        try:
            with watch.count_cut(lambda: found):
                found.append(root := await player.episode(job, watch, places))
                forks = [] if root.stop.infrastructure else await places.choose(root)
                async with asyncio.TaskGroup() as tasks:
                    for fork, of in zip(forks, self.branches, strict=False):
                        if fork is not None:
                            tasks.create_task(attempt_branch(job, fork, of, player, watch, found))
            return sorted(found, key=lambda one: one.member)
        finally:
            await places.close()


async def attempt_branch(
    job: Job, fork: Fork, attempts: Sequence[EpisodeSpec], player: LocalPlayer, watch: Watch, found: list[Trajectory]
) -> None:
    """Continue from a fork until an attempt ends without an infrastructure fault; adds each attempt to `found`."""
    for spec in attempts:
        try:
            env = fork.env.fork()
        except Exception as fault:  # an exception of the user's class: an infrastructure fault, as in an episode
            made = Trajectory(fork.env.id, Task("", spec.task_seed, spec.split), spec.seed, spec.member, parent=fork.member)
            made.error = f"no fork of environment {fork.env.id}: {fault_text(fault)}"
            made.stop, made.cause, made.branch_turn = StopReason.ENV_ERROR, {"blame": "infrastructure"}, fork.turn
            found.append(made)
            continue
        made = await player.episode(replace(job, spec=spec, script=None), watch, fork, env)
        found.append(made)
        if not made.stop.infrastructure:
            break


def plant_trees(numbers: Sequence[int], roots: int) -> dict[int, list[int]]:
    """Return the members of each tree by number. The first `roots` members are roots; the others are distributed over them
    evenly."""
    first = numbers[:roots]
    return {root: list(numbers[len(first) + place :: len(first)]) for place, root in enumerate(first)}


@MEMBERS.register("branch")
class Forest:
    """Play all members of a group, by number. A branch that its tree lacks (a failed root, or no branch point) is played from the
    start, so every group has the same number of members."""

    def __init__(self, config: BranchConfig) -> None:
        self.config = config
        self._waiting = asyncio.Lock()

    async def __call__(self, run: GroupRun, numbers: Sequence[int]) -> list[Trajectory]:
        async with asyncio.TaskGroup() as tasks:
            trees = [tasks.create_task(self._tree(run, *tree)) for tree in plant_trees(numbers, self.config.roots).items()]
        found = {number: trajectory for task in trees for number, trajectory in task.result().items()}
        return [found[number] for number in sorted(found)]

    async def _tree(self, run: GroupRun, root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        """Return the members of a tree: the last attempt at each."""
        found = await self._grow(run, root, branches) if branches else {root: await run.member(root)}
        async with asyncio.TaskGroup() as tasks:
            instead = {one: tasks.create_task(run.member(one)) for one in branches if one not in found}
        return found | {one: task.result() for one, task in instead.items()}

    async def _grow(self, run: GroupRun, root: int, branches: Sequence[int]) -> dict[int, Trajectory]:
        """Play a root and its branches. A tree with a failed root is replayed as a whole."""
        collector, attempts = run.collector, range(run.collector.config.retries + 1)
        specs = tuple(tuple(run.job(member, attempt).spec for attempt in attempts) for member in branches)
        for attempt in attempts:
            async with AsyncExitStack() as held:
                # Reserve all slots at the start, because forks hold environments too; at most as many as there are.
                async with self._waiting:  # two trees that each hold half of their slots would deadlock
                    for _ in range(1 + len(branches)):
                        await held.enter_async_context(collector.slots)
                job = replace(run.job(root, attempt), script=TreeScript(self.config, specs))
                first, *others = await collector.player.play(job, collector.watch)
            if run.count(first, attempt):
                break
        tried, found = Counter[int](), {root: first}
        for trajectory in others:
            run.count(trajectory, tried[trajectory.member])
            tried[trajectory.member] += 1
            found[trajectory.member] = trajectory
        return found
