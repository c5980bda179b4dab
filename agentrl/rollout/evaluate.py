"""Held-out evaluation: one episode per task, a fixed set of tasks, and nothing that training can see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentrl.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout.clock import Watch
from agentrl.rollout.episode import EpisodeSpec, Limits, Policy, run_episode
from agentrl.rollout.replay.io import EpisodeIO
from agentrl.rollout.replay.tape import in_episode
from agentrl.rollout.seeds import derive
from agentrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`success`: the share of successes among the episodes whose success is known (see `success_rate`). `unscored`:
    the number of episodes whose reward and success are both unknown."""

    success: float | None
    reward: float | None
    scored: int
    unscored: int
    stops: dict[str, int]
    trajectories: list[Trajectory]


async def run_tasks(
    env: EnvRef,
    policy: Policy,
    scorer: Scorer,
    limits: Limits,
    pairs: Sequence[tuple[int, int]],
    *,
    seed: int,
    max_episodes: int,
    split: str = "heldout",
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    io: EpisodeIO | None = None,
) -> list[Trajectory]:
    """One episode for each (task index, member), at most `max_episodes` at once, in the order of `pairs`.

    Tasks are numbered within a split and are the same in every run; `seed` only affects the sampling.
    `on_episode` is called when an episode ends. `io`: a `Recorder` or `Replayer`; by default, episodes run live.
    Raises the first error that is not an outcome of an episode, such as ReplayError.
    """
    slots = asyncio.Semaphore(max_episodes)
    episode_io, watch = io or EpisodeIO(), Watch()

    async def one(index: int, member: int) -> Trajectory:
        spec = EpisodeSpec(index, split, derive(seed, split, index, member), member, key=f"{split}{index}.m{member}")
        async with slots:
            with in_episode(spec.key):
                trajectory = episode_io.ready(spec.key)
                if trajectory is None:
                    trajectory = await run_episode(episode_io.env(env, spec.key), policy, spec, limits, scorer, watch)
                episode_io.ended(spec.key, trajectory)
        on_episode(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(index, member)) for index, member in pairs]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in running]


async def evaluate(
    env: EnvRef,
    policy: Policy,
    scorer: Scorer,
    limits: Limits,
    *,
    tasks: int,
    seed: int,
    max_episodes: int,
    split: str = "heldout",
) -> Evaluation:
    """One episode on each of the first `tasks` tasks of a split."""
    pairs = [(index, 0) for index in range(tasks)]
    trajectories = await run_tasks(env, policy, scorer, limits, pairs, seed=seed, max_episodes=max_episodes, split=split)
    return summarize(trajectories)


def summarize(trajectories: list[Trajectory]) -> Evaluation:
    """Success and mean reward over the episodes for which they are known; None if there are none.

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


def success_rate(trajectories: Iterable[Trajectory]) -> float | None:
    """The share of successes among the episodes whose success is known; None if there are none."""
    known = [t.success for t in trajectories if t.success is not None]
    return sum(known) / len(known) if known else None
