"""What a session makes of its config: which model it starts from, and what each of its parts is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.schema import SftConfig
from agentrl.rollout.collector import Collector
from agentrl.rollout.episode import Limits
from agentrl.rollout.mixtures import MixedTasks
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.provenance import model_of
from agentrl.run.session import model_folder, needs_warm_start, open_session
from agentrl.trainer.checkpoint import Checkpoints, seal
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import CheckpointError, ModelError

SMALL = {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 512}
ROLLOUT = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 7, "max_turns": 3, "max_turn_tokens": 11, "max_episode_tokens": 300,
    "turn_timeout": 21.0, "episode_timeout": 22.0, "env_timeout": 23.0, "max_episodes": 9, "groups": 3, "max_staleness": 2,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig.model_validate({
        "seed": 5, "steps": 8, "env": {"id": "key_value", "params": {"calls": 2}, "reward": "key_value_exact"},
        "rollout": ROLLOUT,
        "algorithm": {"proximal": "recompute", "advantage": {"name": "remax"}}, "optim": {"lr": 0.5, "schedule": "linear"},
        "weights": {"route": "disk", "bucket_mib": 3.0}, "checkpoint": {"keep": 4, "keep_best": 3}, "model": {"init": SMALL},
        "cluster": {"backend": "inline"}, "engine": "embedded", "out": str(tmp_path),
    })  # fmt: skip


def test_a_part_that_fails_to_close_leaves_no_other_open(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Collector) -> None:
        raise RuntimeError("it does not close")

    monkeypatch.setattr(Collector, "close", broken)

    async def closed() -> Any:
        session: Any = await open_session(config, RunFolder.create(config), Display())
        with pytest.raises(RuntimeError, match="it does not close"):
            await session.close()
        return session, [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    session, alive = asyncio.run(closed())
    assert alive == [] and session.engine._model is None and session.actors.backend.workers == []


def test_each_part_of_a_session_gets_its_keys(config: TrainConfig) -> None:
    async def opened() -> Any:
        session: Any = await open_session(config, RunFolder.create(config), Display())
        workers = list(session.actors.backend.workers)
        await session.close()
        return session, workers

    session, [actor] = asyncio.run(opened())
    [env] = session.envs
    limits = {"max_turns": 3, "max_turn_tokens": 11, "max_episode_tokens": 300, "context": 512}
    assert env.limits == Limits(**limits, turn_timeout=21.0, episode_timeout=22.0, env_timeout=23.0)
    policy, collector = env.policy, session.collector
    assert list(collector.envs.values()) == [env]
    assert (policy.temperature, policy.top_p, policy.top_k) == (0.7, 0.9, 7)
    assert collector.seed == collector.tasks.run_seed == 5 and collector._greedy == {"key_value"}
    assert (collector.ledger.groups_per_update, collector.ledger.max_staleness, collector.slots._value) == (3, 2, 9)
    assert env.env.params == {"calls": 2} and env.scorer.name == "key_value_exact"
    assert actor._optim == config.optim and actor._total_steps == 8 and session.learner.algorithm == config.algorithm
    assert session.publisher._cfg == config.weights.model_copy(update={"folder": str(session.folder.path)})
    assert (session.saver._checkpoints.keep, session.saver._checkpoints.keep_best) == (4, 3)


def test_the_pools_of_trained_environments_alone_are_filled(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is only evaluated may have no training task."""
    filled, held = list[str](), {"id": "key_value", "name": "held", "weight": 0.0}
    monkeypatch.setattr(MixedTasks, "fill_pools", lambda self, names, say: filled.extend(names))
    both = TrainConfig.model_validate({**config.model_dump(), "env": [{"id": "key_value"}, held]})

    async def opened() -> None:
        await (await open_session(both, RunFolder.create(both), Display())).close()

    asyncio.run(opened())
    assert filled == ["key_value"]


def test_the_model_is_the_warmed_up_one_the_given_one_or_one_built_by_the_seed(config: TrainConfig, tmp_path: Path) -> None:
    folder = RunFolder.create(config)
    found = Path(model_folder(config.seed, config.model, folder))
    assert config.model.init is not None and found == folder.model
    by_seed = {
        seed: (init_model(config.model.init, tmp_path / f"seed{seed}", seed) / "model.safetensors").read_bytes()
        for seed in (0, 5)
    }
    assert (found / "model.safetensors").read_bytes() == by_seed[5] != by_seed[0]
    given = config.model_copy(update={"model": config.model.model_copy(update={"path": "a/model", "init": None})})
    assert model_folder(given.seed, given.model, folder) == "a/model"
    init_model(config.model.init, folder.warm_start, 1)
    assert model_folder(given.seed, given.model, folder) == "a/model"  # half a warm start is none
    seal(folder.warm_start, 0)
    assert all(model_folder(one.seed, one.model, folder) == str(folder.warm_start) for one in (config, given))


def test_a_warm_start_that_was_lost_after_updates_is_named(config: TrainConfig, tmp_path: Path) -> None:
    """Another one was trained in silence, and all rows before it were removed; and step 0 was the model before it."""
    warmed = config.model_copy(update={"sft": SftConfig(max_steps=1)})
    folder = RunFolder.create(warmed)
    assert needs_warm_start(warmed, folder) and not needs_warm_start(config, folder)
    model_folder(config.seed, config.model, folder)
    checkpoints = Checkpoints(folder.checkpoints, 1)
    checkpoints.begin(4)
    checkpoints.commit(4)
    assert not needs_warm_start(config, folder)
    lost = r"warm_start: the model of the warm start, from which step_000004 was trained.* Copy the folder back"
    with pytest.raises(CheckpointError, match=lost):
        asyncio.run(open_session(warmed, folder, Display()))
    with pytest.raises(ModelError, match=r"warm_start: the model .* Copy the folder back"):
        model_of(folder, "0")
    folder.model.rename(folder.warm_start)
    assert not needs_warm_start(warmed, folder) and model_of(folder, "0").path == str(folder.warm_start)
