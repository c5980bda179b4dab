"""Actors and learners in this process, over the tiny model: what a test of a whole training step begins with."""

import asyncio
from pathlib import Path
from typing import Any

from agentrl.cluster.launch import launch
from agentrl.config.schema import ClusterConfig, EnvConfig, ModelConfig, TrainConfig
from agentrl.trainer.actor import Actor
from agentrl.trainer.learner import Learner, policy_updates
from tests.trainer.train_batches import toy_optim


def role_of(cls: Any, path: str, *more: Any, model: ModelConfig | None = None, **optim: Any) -> Any:
    """A role; `more` is what it takes besides model and optimizer."""
    group = launch(cls, backend="inline", world_size=1)
    group.run(cls.init_model, path, model or ModelConfig(), toy_optim(**optim), *more)
    return group


def start(tiny: str, model: ModelConfig | None = None, **optim: Any) -> Any:
    """An actor."""
    return role_of(Actor, tiny, model=model, **optim)


def config_of(**sections: Any) -> TrainConfig:
    """A run of the toy optimizer, in this process."""
    return TrainConfig(env=EnvConfig(id="none"), cluster=ClusterConfig(backend="inline"), **{"optim": toy_optim(), **sections})


def opened(tiny: str, config: TrainConfig) -> Learner:
    """The learner of a run, all its roles started from the tiny model."""
    actors = launch(Actor, backend="inline", world_size=1)
    actors.run(Actor.init_model, tiny, config.model, config.optim, policy_updates(config.steps, config.critic))
    learner = Learner(config, actors)
    asyncio.run(learner.open(tiny))
    return learner


def save(learner: Learner, folder: Path) -> None:
    """A checkpoint of all roles, complete."""

    async def begin_and_wait() -> None:
        await learner.begin_save(folder)
        async with asyncio.timeout(60):
            while not await learner.is_saved():
                await asyncio.sleep(0.01)

    asyncio.run(begin_and_wait())
