"""Held-out evaluation: one episode per task, a fixed set of tasks, and nothing that training can see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.reward.explain import reasons
from agentrl.rollout.clock import Watch
from agentrl.rollout.course import EpisodeSpec
from agentrl.rollout.player import Job, Player
from agentrl.rollout.seeds import derive
from agentrl.trajectory import Trajectory


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
    `on_episode` is called when an episode ends; `watch` is told what episodes wait for. Raises the first error that is not an
    outcome of an episode, such as ReplayError.
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


async def evaluate(
    player: Player,
    env: str,
    *,
    tasks: int,
    seed: int,
    max_episodes: int,
    split: str = "heldout",
    params: Mapping[str, Any] | None = None,
    temperature: float | None = None,
    on_episode: Callable[[Trajectory], None] = lambda trajectory: None,
    watch: Watch | None = None,
) -> Evaluation:
    """One episode on each of the first `tasks` tasks of a split, as `run_tasks` plays them."""
    pairs = [(index, 0) for index in range(tasks)]
    return summarize(
        await run_tasks(
            player,
            env,
            pairs,
            seed=seed,
            max_episodes=max_episodes,
            split=split,
            params=params,
            temperature=temperature,
            on_episode=on_episode,
            watch=watch,
        )
    )


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
    """The share of successes among the episodes whose success is known; None if there are none."""
    known = [t.success for t in trajectories if t.success is not None]
    return sum(known) / len(known) if known else None
