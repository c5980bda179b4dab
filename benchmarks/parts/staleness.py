"""Measure wall-clock time of 20 updates by staleness bound, with tools that take a lognormal time (sigma 1).

Only the tools' time is simulated, by a sleep before each turn of key_value. Collector, ledger, embedded engine, GRPO update
of a tiny model and publish are real.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from work import Forced, collector, tasks

from agentrl.cluster.launch import launch
from agentrl.config import RolloutConfig, TrainConfig
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, EnvConfig, InitModelConfig, ModelConfig
from agentrl.data.rows import collate
from agentrl.data.trajectory import Group
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef
from agentrl.render import make_renderer
from agentrl.rollout.episode import Policy
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner
from agentrl.trainer.pretrained import init_model, load_tokenizer
from agentrl.trainer.publish import Publisher

MEDIAN_S, SIGMA = 0.1, 1.0


class Slow:
    """EnvRef whose environments sleep exp(N(ln MEDIAN_S, SIGMA)) seconds before every turn."""

    def __init__(self, inner: EnvRef, seed: int) -> None:
        self._inner, self._random = inner, random.Random(seed)

    def build(self) -> ToolEnv:
        env = self._inner.build()
        step = env.astep

        async def slow(action: Any) -> Any:
            await asyncio.sleep(MEDIAN_S * self._random.lognormvariate(0.0, SIGMA))
            return await step(action)

        env.astep = slow  # type: ignore[method-assign]
        return env


def config_of(staleness: int) -> TrainConfig:
    rollout = RolloutConfig(
        groups=4, group_size=4, max_staleness=staleness, max_turns=2, max_turn_tokens=16, max_episode_tokens=512
    )
    return TrainConfig(
        env=EnvConfig(id="key_value"),
        model=ModelConfig(init=InitModelConfig(layers=2)),
        rollout=rollout,
        algorithm=AlgorithmConfig(minibatch=16),
        cluster=ClusterConfig(backend="inline"),
    )


async def train(staleness: int, updates: int, folder: str) -> tuple[float, Counter[int]]:
    """Return the seconds of all updates, and the number of sampled tokens by their staleness when trained."""
    config = config_of(staleness)
    engine = EmbeddedEngine(folder, device="cpu", max_context=512)
    actors = launch(Actor, backend="inline", world_size=1)
    actors.run(Actor.init_model, folder, config.model, config.optim, updates)
    learner = Learner(config, actors)
    await engine.start()
    policy = Policy(engine, Forced(make_renderer(load_tokenizer(folder))))
    driver = collector(policy, config.rollout, Slow(tasks(), staleness))  # type: ignore[arg-type]
    publisher = Publisher(actors, engine, config.weights)
    ages: Counter[int] = Counter()
    start = time.perf_counter()
    for update in range(updates):
        groups = await driver.collect()
        count_ages(groups, update, ages)
        members = [t for group in groups for t in group.scored()]
        for number, member in enumerate(members):
            member.reward = float(number % 2)  # forced turns never succeed, and equal rewards give no gradient
        batch = collate(members, groups=[group.index for group in groups for _ in group.scored()])
        await learner.step(batch, update)
        driver.trained(groups)
        await driver.exchange(publisher.send)
    seconds = time.perf_counter() - start
    await driver.close()
    await engine.close()
    actors.close()
    return seconds, ages


def count_ages(groups: list[Group], version: int, ages: Counter[int]) -> None:
    for group in groups:
        for trajectory in group.trajectories:
            for ledger in trajectory.ledgers:
                ages.update((version - ledger.versions[ledger.sampled]).tolist())


def run(updates: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Return speed-ups over max_staleness 0; seconds, and shares of tokens by staleness."""
    seconds: dict[int, float] = {}
    shares: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(InitModelConfig(layers=2), Path(scratch) / "model", 0))
        asyncio.run(train(0, 1, folder))
        for bound in (0, 1, 2, 4):
            seconds[bound], ages = asyncio.run(train(bound, updates, folder))
            shares[str(bound)] = {str(age): round(n / ages.total(), 3) for age, n in sorted(ages.items())}
            print(
                f"max_staleness {bound}: {seconds[bound]:6.1f} s for {updates} updates; share of tokens by "
                f"staleness {shares[str(bound)]}",
                flush=True,
            )
    ratios = {f"staleness_{bound}_speedup": round(seconds[0] / seconds[bound], 3) for bound in (1, 2, 4)}
    return ratios, {"seconds": {str(k): round(v, 2) for k, v in seconds.items()}, "token_shares": shares}
