"""Engines that only answer; collectors and evaluations of one environment, from its parts."""

from collections.abc import Sequence
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.data.trajectory import Trajectory
from agentrl.env.catalog import EnvRef
from agentrl.reward import Scorer
from agentrl.rollout import player as evaluate
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.rollout.episode import Limits, Policy
from agentrl.rollout.mixtures import MixedTasks, Part, TaskSource
from agentrl.rollout.player import LocalPlayer, RunEnv


class Still(Engine):
    """An engine of which a test writes the answers alone."""

    async def start(self) -> None: ...

    async def abort(self, request_key: str) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None: ...


class Script(Still):
    """Samples the given turns one after the other; remembers the prompts."""

    def __init__(self, turns: Sequence[list[int]]) -> None:
        self.turns, self.prompts = list(turns), list[list[int]]()

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        self.prompts.append(list(token_ids))
        ids = self.turns.pop(0)
        return Generation(ids, [-0.5] * len(ids), [3] * len(ids), "stop")


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
    env: EnvRef, policy: Policy, scorer: Scorer, limits: Limits, pairs: Sequence[tuple[int, int]], **more: Any
) -> list[Trajectory]:
    """`evaluate.run_tasks`, played here."""
    part = RunEnv(env.id, env, policy, scorer, limits)
    return await evaluate.run_tasks(LocalPlayer([part]), part.name, pairs, **more)
