"""Players of episodes: the interface between a schedule (collector, evaluation) and the loops that run episodes.

Single episodes, scripts of several episodes in one process, and the held-out evaluation."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
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
from agentrl.utils.threads import setting

# The player


class Agents(Protocol):
    """External agent programs that play whole episodes in place of the turn loop."""

    async def play(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
    ) -> Trajectory:
        """Play one episode; the contract is that of `run_episode`."""
        ...

    async def close(self) -> None:
        """Shut down the agents' servers and processes; idempotent."""
        ...


AGENTS: Registry[Callable[..., Agents]] = Registry("agent", "AGENTS", "agentrl.rollout")
"""Makers of `Agents` from an `AgentConfig` and the tokenizer's `decode` (None for an API model)."""


@dataclass(frozen=True, slots=True)
class RunEnv:
    """One environment of a run: the reference that builds an instance per episode, the policy, the scorer and the limits of its
    episodes. `name` is unique in the run. `agents`: the external agents that play, or None for the turn loop."""

    name: str
    env: EnvRef
    policy: Policy
    scorer: Scorer
    limits: Limits
    agents: Agents | None = None


class Script(ABC):
    """Picklable script that plays several episodes as one job, in one process."""

    @abstractmethod
    def specs(self) -> Iterable[EpisodeSpec]:
        """Specs of the episodes in addition to the job's own."""

    @abstractmethod
    async def play(self, job: Job, player: LocalPlayer, watch: Watch) -> list[Trajectory]:
        """Play each episode with `LocalPlayer.episode`. Returns them finished and scored, the job's own first."""


SCRIPTS: Registry[Callable[..., Callable[[EpisodeSpec], Script]]] = Registry("script", "SCRIPTS", "agentrl.rollout")
"""Makers of an episode's script from a config and a number. They raise ConfigError for a config that scripts do not support."""


@dataclass(frozen=True, slots=True)
class Job:
    """Order to play one episode in the environment `env` (the name of a `RunEnv`).

    `params` override parameters of the environment, `temperature` that of the policy. An episode with an overridden temperature
    is not trained on unless `trained`. `script`: plays further episodes with this one."""

    env: str
    spec: EpisodeSpec
    params: Mapping[str, Any] = field(default_factory=dict)
    temperature: float | None = None
    trained: bool = False
    script: Script | None = None

    def specs(self) -> list[EpisodeSpec]:
        """Specs of all episodes of the job."""
        return [self.spec, *(() if self.script is None else self.script.specs())]


class Player(ABC):
    """Plays episodes and scores each on its own; `score_group` later compares the members of a group."""

    async def start(self) -> None:
        """Start the worker processes. Raises UserError, or the error that kept a process from starting."""
        return None

    async def close(self) -> None:
        """End the processes of `start`; idempotent. No episode may be running."""
        return None

    def metrics(self) -> dict[str, float]:
        """Metrics of the worker processes since the last call, for the metrics row of an update."""
        return {}

    @abstractmethod
    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        """Play a job. Returns its finished and scored episodes; `watch` is notified of each wait.

        An infrastructure fault is recorded in the trajectory (see `run_episode`) and never raised. If the worker process dies,
        another one replays the whole job; raises WorkerDiedError if no process is left. Cancellation ends the episodes, frees
        their requests, tears their environments down and propagates.
        """


class LocalPlayer(Player):
    """Plays in the event loop of this process."""

    def __init__(self, envs: Iterable[RunEnv], *, asks: bool = True) -> None:
        """`asks`: call judges in this process; if False, an episode whose reward spec has judges is returned unscored, and
        `score_episode` scores it in the process that counts the judges' budget."""
        self._envs = {env.name: env for env in envs}
        self._asks = asks
        self._refs: dict[str, EnvRef] = {}

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        if job.script is not None:
            return await job.script.play(job, self, watch)
        return [await self.episode(job, watch)]

    async def episode(self, job: Job, watch: Watch, hook: EpisodeHook | None = None, env: ToolEnv | None = None) -> Trajectory:
        """Play one episode in `env`, or else in a new environment; requests, span and end carry the episode's key."""
        part, spec = self._envs[job.env], job.spec
        policy = part.policy if job.temperature is None else part.policy.at(job.temperature, job.trained)
        scorer = part.scorer if self._asks or not part.scorer.asks else None
        with (
            setting(EPISODE, spec.key),  # also for the tasks and threads that the episode starts
            span("episode", f"{part.name} {spec.key}", track=spec.key) as opened,
        ):
            if env is None:
                ref = part.env
                if job.params:  # cached, since each new reference looks its environment up in the catalog
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
        return trajectory

    async def close(self) -> None:
        for part in self._envs.values():
            if part.agents is not None:
                await part.agents.close()


# Held-out evaluation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation. `success`: share of successes among the episodes with a known success (see `success_rate`).
    `reward`: mean of the known rewards. `unscored`: number of episodes without reward and success. `by_env`: with several
    environments, the result of each."""

    success: float | None
    reward: float | None
    scored: int
    unscored: int
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
    """Play one episode in environment `env` per (task index, member) of `pairs`, at most `max_episodes` at once. Returns them
    in the order of `pairs`; `params` and `temperature` as in `Job`.

    Tasks are numbered within a split and are the same in every run; `seed` only affects sampling. `on_episode` is called as
    each episode ends; `watch` is notified of waits; `script` makes each episode's script. Raises the first error that is not
    an outcome of an episode.
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
    """Compute success rate and mean reward over the episodes with known values; None without any.

    If the reward spec compares the members of a group, single episodes have a success but no reward.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    scored = sum(t.reward is not None or t.success is not None for t in trajectories)
    return Evaluation(
        success=success_rate(trajectories),
        reward=sum(rewards) / len(rewards) if rewards else None,
        scored=scored,
        unscored=len(trajectories) - scored,
        trajectories=trajectories,
    )


def combine_evaluations(found: Mapping[str, Evaluation], weights: Mapping[str, float]) -> Evaluation:
    """Combine the evaluations of several environments: success and reward are weighted means over them.

    A mean is None if any environment with a weight above 0 lacks the value: the others' mean would measure something else.
    """

    def mean(values: Mapping[str, float | None]) -> float | None:
        known = [weights[name] * value for name, value in values.items() if weights[name] > 0 and value is not None]
        return sum(known) / sum(weights.values()) if len(known) == sum(w > 0 for w in weights.values()) else None

    return Evaluation(
        success=mean({name: one.success for name, one in found.items()}),
        reward=mean({name: one.reward for name, one in found.items()}),
        scored=sum(one.scored for one in found.values()),
        unscored=sum(one.unscored for one in found.values()),
        trajectories=[t for one in found.values() for t in one.trajectories],
        by_env=dict(found),
    )


def fault_of(trajectory: Trajectory) -> str:
    """Return a line on why an episode is unscored: task, stop reason, and its error or the reward spec's reason."""
    named = f"{trajectory.task.id}: " if trajectory.task.id else ""  # no id: the task's setup failed
    return f"{named}{end_of(trajectory)}"


def end_of(trajectory: Trajectory) -> str:
    """Return the line of `fault_of` without the task."""
    error = trajectory.error
    if error is None:
        why = next(reasons(trajectory.evidence), None) if trajectory.evidence is not None else None
        error = "the reward spec could not score it" + (f": {why}" if why else "")
    return f"{trajectory.stop.value}: {error}"


def success_rate(trajectories: Iterable[Trajectory]) -> float | None:
    """Return the share of successes among the episodes whose success is known; None without any."""
    known = [t.success for t in trajectories if t.success is not None]
    return sum(known) / len(known) if known else None
