"""Held-out evaluation: one episode a task, a fixed set of tasks, and nothing that training can see."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from agentrl.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.seeds import derive
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


async def evaluate(
    env: EnvRef, policy: Policy, scorer: Scorer, limits: Limits, *, tasks: int, seed: int, max_episodes: int,
    split: str = "heldout",
) -> Evaluation:
    """Run `tasks` episodes on the first `tasks` held-out tasks, at most `max_episodes` at once.

    The tasks are the same for every run of an environment; `seed` only moves the sampling.
    """
    slots = asyncio.Semaphore(max_episodes)

    async def one(index: int) -> Trajectory:
        spec = EpisodeSpec(index, split, derive(seed, split, index), 0, key=f"{split}{index}")
        async with slots:
            return await run_episode(env.build(), policy, spec, limits, scorer)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(index)) for index in range(tasks)]
    return summarize([task.result() for task in running], scorer.range[1])


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
