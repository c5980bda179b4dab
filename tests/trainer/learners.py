"""Actors and learners in this process, over the tiny model: what a test of a whole training step begins with."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from agentrl.cluster.launch import launch
from agentrl.config import to_toml
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, EnvConfig, ModelConfig, TrainConfig
from agentrl.trainer.actor import Actor
from agentrl.trainer.checkpoint import Checkpoints
from agentrl.trainer.learner import Learner, policy_updates
from tests.trainer.test_checkpoints import writing
from tests.trainer.train_batches import make_batch, toy_optim, train_batch


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


def saved_run(folder: Path, model: ModelConfig, steps: int = 2, **optim: Any) -> Any:
    """The actors of a run's folder: its config, a checkpoint after each update, and `direct1`, `direct2`, exports of the same."""
    assert model.path is not None
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(TrainConfig(env=EnvConfig(id="none"), model=model)))
    actors = start(model.path, model, **optim)
    for step in range(1, steps + 1):
        train_batch(actors, Actor.update, make_batch(8, seed=step), AlgorithmConfig(), step=step)
        with writing(Checkpoints(folder / "checkpoints", keep=steps), step) as aside:
            actors.run(Actor.save, str(aside / "actor"))
        actors.run(Actor.export_hf, str(folder / f"direct{step}"))
    return actors


@contextmanager
def as_rank(rank: int, world: int, backend: str = "fake") -> Iterator[None]:
    """This process as one rank of a group; the others are made up, and nothing is sent, unless the backend is a real one."""
    store: Any = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    _clear_sharding_prop_cache()  # it would hand out the mesh of another rank, which compares equal
    try:
        yield
    finally:
        dist.destroy_process_group()


def agree(one: dict[str, float], other: dict[str, float], *but: str) -> None:
    """Metrics of the same update, computed in two ways."""
    assert one.keys() == other.keys()
    for name in one.keys() - {*but}:
        assert one[name] == pytest.approx(other[name], abs=1e-5, rel=1e-5), name


def save(learner: Learner, folder: Path) -> None:
    """A checkpoint of all roles, complete."""

    async def begin_and_wait() -> None:
        await learner.begin_save(folder)
        async with asyncio.timeout(60):
            while not await learner.is_saved():
                await asyncio.sleep(0.01)

    asyncio.run(begin_and_wait())
