"""Collectors and evaluations of one environment, from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout import player as evaluate
from agentrl.rollout.collector import Collector
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.mixtures import MixedTasks, Part, TaskSource
from agentrl.rollout.player import LocalPlayer, RunEnv


def collector_of(
    env: EnvRef, policy: Policy, scorer: Scorer, config: RolloutConfig, *, context: int, seed: int, greedy: bool = False
) -> Collector:
    """A collector whose episodes are played here."""
    part = RunEnv(env.id, env, policy, scorer, Limits.of(config, context))
    tasks = MixedTasks([Part(part.name, env, config.sampler)], config.mixture, seed)
    return Collector(LocalPlayer([part]), [part], tasks, config, seed=seed, greedy=[part.name] if greedy else [])


def only(collector: Collector) -> RunEnv:
    """The one environment of a collector."""
    [env] = collector.envs.values()
    return env


def tasks_of(collector: Collector) -> TaskSource:
    """The tasks of its one environment."""
    [source] = collector.tasks.sources.values()
    return source


async def run_tasks(
    env: EnvRef,
    policy: Policy,
    scorer: Scorer,
    limits: Limits,
    pairs: Sequence[tuple[int, int]],
    **more: Any,
) -> list[Trajectory]:
    """`evaluate.run_tasks`, played here."""
    part = RunEnv(env.id, env, policy, scorer, limits)
    return await evaluate.run_tasks(LocalPlayer([part]), part.name, pairs, **more)
