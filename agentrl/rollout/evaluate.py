"""Held-out evaluation: one episode a task, a fixed set of tasks, and nothing that training can see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.record import in_episode
from agentrl.rollout.seeds import derive
from agentrl.rollout.stage import Stage
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`success` is the share of scored episodes with full marks; unscored ones are counted apart."""

    success: float | None
    reward: float | None
    scored: int
    unscored: int
    stops: dict[str, int]
    trajectories: list[Trajectory]


async def run_tasks(
    env: EnvRef, policy: Policy, scorer: Scorer, limits: Limits, pairs: Sequence[tuple[int, int]], *, seed: int,
    max_episodes: int, split: str = "heldout", on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    stage: Stage | None = None,
) -> list[Trajectory]:
    """One episode for each (task index, member), at most `max_episodes` at once, in the order of `pairs`.

    Tasks are numbered within a split and are the same in every run; `seed` only moves the sampling.
    `on_episode` is called as each episode ends. `stage`: a `Recorder` or `Replayer`; live without one.
    Raises the first error that is not an outcome of an episode, such as ReplayError.
    """
    slots = asyncio.Semaphore(max_episodes)
    theatre = stage or Stage()

    async def one(index: int, member: int) -> Trajectory:
        spec = EpisodeSpec(index, split, derive(seed, split, index, member), member, key=f"{split}{index}.m{member}")
        async with slots:
            with in_episode(spec.key):
                trajectory = theatre.ready(spec.key)
                if trajectory is None:
                    trajectory = await run_episode(theatre.env(env, spec.key), policy, spec, limits, scorer)
                theatre.ended(spec.key, trajectory)
        on_episode(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(index, member)) for index, member in pairs]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in running]


async def evaluate(
    env: EnvRef, policy: Policy, scorer: Scorer, limits: Limits, *, tasks: int, seed: int, max_episodes: int,
    split: str = "heldout",
) -> Evaluation:
    """One episode on each of the first `tasks` tasks of a split."""
    pairs = [(index, 0) for index in range(tasks)]
    trajectories = await run_tasks(env, policy, scorer, limits, pairs, seed=seed, max_episodes=max_episodes, split=split)
    return summarize(trajectories, scorer.range[1])


def summarize(trajectories: list[Trajectory], full: float) -> Evaluation:
    """Success (reward `full`) and mean reward over the scored episodes; None where none was scored."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    n = len(rewards)
    return Evaluation(
        success=sum(full_marks(t, full) for t in trajectories) / n if n else None,
        reward=sum(rewards) / n if n else None,
        scored=n,
        unscored=len(trajectories) - n,
        stops=dict(Counter(t.stop.value for t in trajectories)),
        trajectories=trajectories,
    )


def full_marks(trajectory: Trajectory, full: float) -> bool:
    """True where the episode reached `full`, the top of the reward spec's range."""
    return trajectory.reward is not None and trajectory.reward >= full - 1e-6
