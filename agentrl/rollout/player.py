"""Who plays an episode, and where: the one door between a schedule (collector, evaluation) and the loops that run episodes.

RunEnv   one environment of a run, with what plays and scores its episodes; every process that plays has its own
Job      one episode to be played: plain data, which any process understands
Player   plays jobs: in this process's event loop (`LocalPlayer`), or elsewhere
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.catalog import EnvRef
from agentrl.config.schema import BranchConfig
from agentrl.env import ToolEnv
from agentrl.reward import Scorer
from agentrl.rollout.clock import Watch
from agentrl.rollout.course import EpisodeSpec, Limits, Policy
from agentrl.rollout.episode import run_episode
from agentrl.rollout.forks import Fork, Keeper
from agentrl.rollout.replay.io import EpisodeIO
from agentrl.rollout.replay.tape import in_episode
from agentrl.rollout.tree import Attempts, play_tree
from agentrl.spans import span
from agentrl.trajectory import Trajectory


class Agents(Protocol):
    """Agents of somebody else's, which play episodes in place of turn by turn (`harness.Harness`)."""

    async def play(
        self, env: ToolEnv, policy: Policy, spec: EpisodeSpec, limits: Limits, scorer: Scorer | None, watch: Watch
    ) -> Trajectory:
        """As `run_episode`."""
        ...

    async def close(self) -> None:
        """End what serves them; idempotent."""
        ...


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
        """The finished and scored episode; `watch` is told what it waits for and when something arrives.

        A fault of the infrastructure is recorded in the trajectory (`run_episode`) and never raised. If the process that plays
        dies, the job is played again in another one; raises WorkerDiedError if there is none left. Cancellation ends the episode,
        frees its requests, tears its environment down and propagates.
        """

    @abstractmethod
    async def play_tree(self, job: Job, watch: Watch) -> list[Trajectory]:
        """The episode, and its branches (`rollout.tree.play_tree`): each attempt at each, finished and scored. Otherwise as
        `play`; a tree whose process dies is played again as a whole."""


def outcome(trajectory: Trajectory) -> dict[str, str | float | None]:
    """What a span says of an episode that has ended."""
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

    def __init__(self, envs: Iterable[RunEnv], io: EpisodeIO | None = None, *, asks: bool = True) -> None:
        """`io`: a `Recorder` or `Replayer`; by default, episodes run live. `asks`: whether judges are asked here; if not, an
        episode whose spec has judges comes back unscored, and `score_episode` scores it where their budget is counted."""
        self._envs = {env.name: env for env in envs}
        self._io, self._asks = io or EpisodeIO(), asks
        self._refs: dict[str, EnvRef] = {}

    async def play(self, job: Job, watch: Watch) -> Trajectory:
        part, key = self._envs[job.env], job.spec.key

        async def played() -> Trajectory:
            found = self._io.ready(key)
            if found is not None:
                return found
            policy, limits, scorer = self._parts(job)
            env = policy.engine.meet(self._io.env(self._ref(part, job.params), key), key)
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
        """Who plays a job, in which limits, and who scores it here."""
        part = self._envs[job.env]
        policy = part.policy if job.temperature is None else part.policy.at(job.temperature, job.trained)
        return policy, part.limits, part.scorer if self._asks or not part.scorer.asks else None

    async def _episode(self, part: RunEnv, key: str, play: Callable[[], Awaitable[Trajectory]]) -> Trajectory:
        """An episode under its key: what it asks, its span, and its end are known by that."""
        with in_episode(key), span("episode", f"{part.name} {key}", track=key) as opened:
            trajectory = await play()
            trajectory.env = part.name
            if opened is not None:
                opened.set(env=part.name, key=key, task=trajectory.task.id, **outcome(trajectory))
            self._io.ended(key, trajectory)
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
