"""Players of episodes: the door between a schedule (collector, evaluation) and the loops that run episodes.

Single episodes, trees of episodes that branch from forks, groups as trees, and the held-out evaluation."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentrl.config.schema import BranchConfig
from agentrl.data.trajectory import StopReason, Task, Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.reward.explain import reasons
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.starts import Fork, Keeper, Places
from agentrl.utils.event_loop import EPISODE
from agentrl.utils.registry import Registry
from agentrl.utils.spans import span

# A tree of episodes

Attempts = Sequence[EpisodeSpec]
"""A branch: what identifies each attempt at it, in order. The next is made if one ends by a fault of the infrastructure."""
PlayRoot = Callable[[Keeper], Awaitable[Trajectory]]
PlayBranch = Callable[[EpisodeSpec, ToolEnv, Fork], Awaitable[Trajectory]]


async def play_tree(
    config: BranchConfig, branches: Sequence[Attempts], play_root: PlayRoot, play_branch: PlayBranch
) -> list[Trajectory]:
    """The root, then every attempt at every branch, in the order of `branches`, but of those for which it has no turn to branch
    at; the root alone if it ended by a fault of the infrastructure.

    `play_branch` gets an environment of its own, and ends it. Every fork that was kept is closed, whatever happens.
    """
    places = Places(config, len(branches))
    try:
        root = await play_root(places)
        if root.stop.infrastructure:
            return [root]
        forks = await places.choose(root)
        async with asyncio.TaskGroup() as tasks:
            begun = [(fork, of) for fork, of in zip(forks, branches, strict=True) if fork is not None]
            playing = [tasks.create_task(_attempts(fork, of, play_branch)) for fork, of in begun]
        return [root, *(played for task in playing for played in task.result())]
    finally:
        await places.close()


async def _attempts(fork: Fork, attempts: Attempts, play: PlayBranch) -> list[Trajectory]:
    found: list[Trajectory] = []
    for spec in attempts:
        try:
            env = fork.env.fork()
        except Exception as fault:  # whatever an author's class raises: a fault of the infrastructure, as in an episode
            found.append(
                _record_without_fork(spec, fork, f"no fork of environment {fork.env.id}: {type(fault).__name__}: {fault}")
            )
            continue
        found.append(await play(spec, env, fork))
        if not found[-1].stop.infrastructure:
            break
    return found


def _record_without_fork(spec: EpisodeSpec, fork: Fork, error: str) -> Trajectory:
    """The record of an attempt that could not begin."""
    made = Trajectory(fork.env.id, Task("", spec.task_seed, spec.split), spec.seed, spec.member, parent=fork.member)
    made.stop, made.error, made.cause = StopReason.ENV_ERROR, error, {"blame": "infrastructure"}
    made.branch_turn = fork.turn
    return made


# The player


class Agents(Protocol):
    """Agents of another program's, which play episodes in place of turn by turn."""

    async def play(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
    ) -> Trajectory:
        """As `run_episode`."""
        ...

    async def close(self) -> None:
        """End what serves them; idempotent."""
        ...


AGENTS: Registry[Callable[..., Agents]] = Registry("agent", "AGENTS", "agentrl.rollout")
"""Players made of an `AgentConfig` and the tokenizer's `decode` (None for an API model)."""


@dataclass(frozen=True, slots=True)
class RunEnv:
    """One environment of a run: the reference from which each episode's is built, the policy that plays in it, the scorer
    and the limits of its episodes. `name` is unique in the run. `agents`: who plays, None if the policy itself does. `branch`: at
    which turns an episode branches, of which a job names branches."""

    name: str
    env: EnvRef
    policy: Policy
    scorer: Scorer
    limits: Limits
    agents: Agents | None = None
    branch: BranchConfig | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to be played in the environment `env` (the name of a `RunEnv`).

    `params` replace parameters of the environment, `temperature` the policy's; with a temperature of its own an episode is not
    trained on, unless it is that of the update for which it is played (`trained`). `branches`: of the root of a tree, those that
    are played from forks of it."""

    env: str
    spec: EpisodeSpec
    params: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    trained: bool = False
    branches: tuple[Attempts, ...] = ()


class Player(ABC):
    """Plays episodes and scores each by itself; comparing the members of a group is left to who has them together."""

    async def start(self) -> None:
        """Start the processes that play. Raises a UserError, or the error with which one of them could not be started."""
        return None

    async def close(self) -> None:
        """End what `start` started; idempotent. Nobody plays any more."""
        return None

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics row of an update, about the processes that play since the last call."""
        return {}

    @abstractmethod
    async def play(self, job: Job, watch: Watch) -> Trajectory:
        """The finished and scored episode; `watch` hears each wait and its end.

        A fault of the infrastructure is recorded in the trajectory (`run_episode`) and never raised. If the process that plays
        dies, the job is played again in another one; raises WorkerDiedError without one left. Cancellation ends the episode,
        frees its requests, tears its environment down and propagates.
        """

    @abstractmethod
    async def play_tree(self, job: Job, watch: Watch) -> list[Trajectory]:
        """The episode, and its branches (`rollout.tree.play_tree`): each attempt at each, finished and scored. Otherwise as
        `play`; a tree whose process dies is played again as a whole."""


def outcome(trajectory: Trajectory) -> dict[str, str | float | None]:
    """Attributes of the span of an ended episode."""
    return {
        "reward": trajectory.reward,
        "success": None if trajectory.success is None else float(trajectory.success),
        "stop": trajectory.stop.value,
        "turns": len(trajectory.turns),
        "tokens": trajectory.sampled_tokens,
        "error": trajectory.error,
    }


class LocalPlayer(Player):
    """Plays in the event loop of this process."""

    def __init__(self, envs: Iterable[RunEnv], *, asks: bool = True) -> None:
        """`asks`: judges are asked here; if not, an episode whose spec has judges comes back unscored, and `score_episode`
        scores it where their budget is counted."""
        self._envs = {env.name: env for env in envs}
        self._asks = asks
        self._refs: dict[str, EnvRef] = {}

    async def play(self, job: Job, watch: Watch) -> Trajectory:
        part, key = self._envs[job.env], job.spec.key

        async def played() -> Trajectory:
            policy, limits, scorer = self._parts(job)
            env = policy.engine.meet(self._ref(part, job.params).build(), key)
            play = run_episode if part.agents is None else part.agents.play
            return await play(env, policy, job.spec, limits, scorer, watch)

        return await self._episode(part, key, played)

    async def play_tree(self, job: Job, watch: Watch) -> list[Trajectory]:
        part, (policy, limits, scorer) = self._envs[job.env], self._parts(job)
        assert part.branch is not None and part.agents is None

        async def root(keeper: Keeper) -> Trajectory:
            env = policy.engine.meet(self._ref(part, job.params).build(), job.spec.key)
            return await self._episode(
                part, job.spec.key, lambda: run_episode(env, policy, job.spec, limits, scorer, watch, keeper=keeper)
            )

        async def branch(spec: EpisodeSpec, env: ToolEnv, fork: Fork) -> Trajectory:
            met = policy.engine.meet(env, spec.key)
            return await self._episode(part, spec.key, lambda: run_episode(met, policy, spec, limits, scorer, watch, fork))

        return await play_tree(part.branch, job.branches, root, branch)

    def _parts(self, job: Job) -> tuple[Policy, Limits, Scorer | None]:
        """Parts of a job: the player, the limits, and the scorer, if it is scored here."""
        part = self._envs[job.env]
        policy = part.policy if job.temperature is None else part.policy.at(job.temperature, job.trained)
        return policy, part.limits, part.scorer if self._asks or not part.scorer.asks else None

    async def _episode(self, part: RunEnv, key: str, play: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
        """An episode under its key: what it asks, its span, and its end are known by that."""
        before = EPISODE.set(key)  # also for the tasks and threads that the episode starts
        try:
            with span("episode", f"{part.name} {key}", track=key) as opened:
                trajectory = await play()
                trajectory.env = part.name
                if opened is not None:
                    opened.set(env=part.name, key=key, task=trajectory.task.id, **outcome(trajectory))
        finally:
            EPISODE.reset(before)
        return trajectory

    async def close(self) -> None:
        for part in self._envs.values():
            if part.agents is not None:
                await part.agents.close()

    def _ref(self, part: RunEnv, params: Mapping[str, Any]) -> EnvRef:
        """Kept, since a reference looks its environment up on the shelves once."""
        if not params:
            return part.env
        key = json.dumps([part.name, dict(params)], sort_keys=True)
        if key not in self._refs:
            self._refs[key] = part.env.with_params(params)
        return self._refs[key]


# The members of a group as trees (`rollout.branch`): which are roots and which are branches, played under the run's slots.

PlayTree = Callable[[int, Sequence[int]], Awaitable[dict[int, Trajectory]]]
PlayMember = Callable[[int], Coroutine[Any, Any, Trajectory]]


def plant_trees(numbers: Sequence[int], roots: int) -> dict[int, list[int]]:
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
        trees = [tasks.create_task(grown(root, branches)) for root, branches in plant_trees(numbers, roots).items()]
    found = {number: played for task in trees for number, played in task.result().items()}
    return [found[number] for number in sorted(found)]


@dataclass(slots=True)
class Trees:
    """Plays the trees of one group. `job`: that of an attempt at a member. `attempted` hears of each attempt (its number counts
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
    """This many episodes at once; who asks first gets first."""

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


# Held-out evaluation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`success`: the share of successes among the episodes whose success is known (see `success_rate`). `unscored`:
    the number of episodes whose reward and success are both unknown. `by_env`: of several environments, each one's."""

    success: float | None
    reward: float | None
    scored: int
    unscored: int
    stops: dict[str, int]
    trajectories: list[Trajectory]
    by_env: dict[str, Evaluation] = field(default_factory=dict)


async def run_tasks(
    player: Player,
    env: str,
    pairs: Sequence[tuple[int, int]],
    *,
    seed: int,
    max_episodes: int,
    split: str = "heldout",
    params: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    watch: Watch | None = None,
) -> list[Trajectory]:
    """One episode in the run's environment `env` for each (task index, member), at most `max_episodes` at once, in the order
    of `pairs`; `params` and `temperature` as in `Job`.

    Tasks are numbered within a split and are the same in every run; `seed` only affects the sampling.
    `on_episode` is called when an episode ends; `watch` hears the waits of episodes. Raises the first error that is not an
    outcome of an episode.
    """
    slots, watch = asyncio.Semaphore(max_episodes), watch or Watch()

    async def one(index: int, member: int) -> Trajectory:
        spec = EpisodeSpec(index, split, derive(seed, split, index, member), member, key=f"{split}{index}.m{member}")
        async with slots:
            trajectory = await player.play(Job(env, spec, params or {}, temperature), watch)
        on_episode(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(index, member)) for index, member in pairs]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in running]


def summarize(trajectories: list[Trajectory]) -> Evaluation:
    """Success and mean reward over the episodes for which they are known; None without any.

    If a spec compares the members of a group, single episodes have no reward, only success.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    scored = sum(t.reward is not None or t.success is not None for t in trajectories)
    return Evaluation(
        success=success_rate(trajectories),
        reward=sum(rewards) / len(rewards) if rewards else None,
        scored=scored,
        unscored=len(trajectories) - scored,
        stops=dict(Counter(t.stop.value for t in trajectories)),
        trajectories=trajectories,
    )


def together(found: Mapping[str, Evaluation], weights: Mapping[str, float]) -> Evaluation:
    """Evaluations of several environments as one: success and reward are means over the environments, by weight.

    They are None if that of an environment with a weight above 0 is: a mean over the others would be of something else.
    """

    def mean(values: Mapping[str, float | None]) -> float | None:
        known = [weights[name] * value for name, value in values.items() if weights[name] > 0 and value is not None]
        return sum(known) / sum(weights.values()) if len(known) == sum(w > 0 for w in weights.values()) else None

    return Evaluation(
        success=mean({name: one.success for name, one in found.items()}),
        reward=mean({name: one.reward for name, one in found.items()}),
        scored=sum(one.scored for one in found.values()),
        unscored=sum(one.unscored for one in found.values()),
        stops=dict(sum((Counter(one.stops) for one in found.values()), Counter())),
        trajectories=[t for one in found.values() for t in one.trajectories],
        by_env=dict(found),
    )


def fault_of(trajectory: Trajectory) -> str:
    """Why an episode is unscored, in a line: its task, how it ended, and its error or what the reward spec could not read."""
    named = f"{trajectory.task.id}: " if trajectory.task.id else ""  # without an id: not even the task could be set up
    return f"{named}{end_of(trajectory)}"


def end_of(trajectory: Trajectory) -> str:
    """The same without its task."""
    error = trajectory.error
    if error is None:
        why = next(reasons(trajectory.evidence), None) if trajectory.evidence is not None else None
        error = "the reward spec could not score it" + (f": {why}" if why else "")
    return f"{trajectory.stop.value}: {error}"


def success_rate(trajectories: Iterable[Trajectory]) -> float | None:
    """The share of successes among the episodes whose success is known; None without any."""
    known = [t.success for t in trajectories if t.success is not None]
    return sum(known) / len(known) if known else None
