"""Players of episodes: the door between a schedule (collector, evaluation) and the loops that run episodes.

Single episodes, several that one process plays together, and the held-out evaluation."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.data.trajectory import Trajectory
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.reward.explain import reasons
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import derive
from agentrl.rollout.episode import EpisodeHook, EpisodeSpec, Limits, Policy, run_episode
from agentrl.utils.event_loop import EPISODE
from agentrl.utils.registry import Registry
from agentrl.utils.spans import span

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
    and the limits of its episodes. `name` is unique in the run. `agents`: who plays, None if the policy itself does."""

    name: str
    env: EnvRef
    policy: Policy
    scorer: Scorer
    limits: Limits
    agents: Agents | None = None


class Script(ABC):
    """A script plays several episodes as one job, in one process; it can be pickled."""

    @abstractmethod
    def specs(self) -> Iterable[EpisodeSpec]:
        """The episodes in addition to the job's own."""

    @abstractmethod
    async def play(self, job: Job, player: LocalPlayer, watch: Watch) -> list[Trajectory]:
        """The finished and scored episodes, each played by `LocalPlayer.episode`; the job's own is the first."""


SCRIPTS: Registry[Callable[..., Callable[[EpisodeSpec], Script]]] = Registry("script", "SCRIPTS", "agentrl.rollout")
"""Makers of an episode's script from a config and a number. They raise ConfigError for a config that cannot be played so."""


@dataclass(frozen=True, slots=True)
class Job:
    """One episode to be played in the environment `env` (the name of a `RunEnv`).

    `params` replace parameters of the environment, `temperature` the policy's; with a temperature of its own an episode is not
    trained on, unless it is that of the update for which it is played (`trained`). `script`: plays more episodes with it."""

    env: str
    spec: EpisodeSpec
    params: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    trained: bool = False
    script: Script | None = None

    def specs(self) -> list[EpisodeSpec]:
        """All its episodes."""
        return [self.spec, *(() if self.script is None else self.script.specs())]


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
    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        """The finished and scored episodes of a job; `watch` hears each wait and its end.

        A fault of the infrastructure is recorded in the trajectory (`run_episode`) and never raised. If the process that plays
        dies, the job is played again in another one, as a whole; raises WorkerDiedError without one left. Cancellation ends the
        episodes, frees their requests, tears their environments down and propagates.
        """


class LocalPlayer(Player):
    """Plays in the event loop of this process."""

    def __init__(self, envs: Iterable[RunEnv], *, asks: bool = True) -> None:
        """`asks`: judges are asked here; if not, an episode whose spec has judges comes back unscored, and `score_episode`
        scores it where their budget is counted."""
        self._envs = {env.name: env for env in envs}
        self._asks = asks
        self._refs: dict[str, EnvRef] = {}

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        if job.script is not None:
            return await job.script.play(job, self, watch)
        return [await self.episode(job, watch)]

    async def episode(self, job: Job, watch: Watch, hook: EpisodeHook | None = None, env: ToolEnv | None = None) -> Trajectory:
        """One episode, in a new environment if not in `env`; what it asks, its span and its end are known by its key."""
        part, spec = self._envs[job.env], job.spec
        policy = part.policy if job.temperature is None else part.policy.at(job.temperature, job.trained)
        scorer = part.scorer if self._asks or not part.scorer.asks else None
        before = EPISODE.set(spec.key)  # also for the tasks and threads that the episode starts
        try:
            with span("episode", f"{part.name} {spec.key}", track=spec.key) as opened:
                if env is None:
                    ref = part.env
                    if job.params:  # kept, since a reference looks its environment up on the shelves once
                        key = json.dumps([part.name, dict(job.params)], sort_keys=True)
                        ref = self._refs.setdefault(key, ref.with_params(job.params))
                    env = ref.build()
                met = policy.engine.meet(env, spec.key)
                if part.agents is None:
                    trajectory = await run_episode(met, policy, spec, part.limits, scorer, watch, hook)
                else:
                    trajectory = await part.agents.play(met, policy, spec, part.limits, scorer, watch)
                trajectory.env = part.name
                if opened is not None:
                    success = None if trajectory.success is None else float(trajectory.success)
                    opened.set(env=part.name, key=spec.key, task=trajectory.task.id, reward=trajectory.reward, success=success)
                    opened.set(stop=trajectory.stop.value, error=trajectory.error)
                    opened.set(turns=len(trajectory.turns), tokens=trajectory.sampled_tokens)
        finally:
            EPISODE.reset(before)
        return trajectory

    async def close(self) -> None:
        for part in self._envs.values():
            if part.agents is not None:
                await part.agents.close()


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
    script: Callable[[EpisodeSpec], Script] | None = None,
) -> list[Trajectory]:
    """One episode in the run's environment `env` for each (task index, member), at most `max_episodes` at once, in the order
    of `pairs`; `params` and `temperature` as in `Job`.

    Tasks are numbered within a split and are the same in every run; `seed` only affects the sampling.
    `on_episode` is called when an episode ends; `watch` hears the waits of episodes. `script`: of each episode. Raises the first
    error that is not an outcome of an episode.
    """
    slots, watch = asyncio.Semaphore(max_episodes), watch or Watch()

    async def one(index: int, member: int) -> Trajectory:
        spec = EpisodeSpec(index, split, derive(seed, split, index, member), member, key=f"{split}{index}.m{member}")
        async with slots:
            job = Job(env, spec, params or {}, temperature, script=script and script(spec))
            [trajectory] = await player.play(job, watch)
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
