"""What a session makes of its config: which model it starts from, and what each of its parts is told."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.rollout.collector import Collector
from agentrl.rollout.episode import Limits
from agentrl.run.assembly import RunStart
from agentrl.run.checks.rollout_checks import check_rollout
from agentrl.run.display import Display
from agentrl.run.folder import RunFolder
from agentrl.run.session import model_folder, open_session
from agentrl.trainer.checkpoint import seal
from agentrl.trainer.pretrained import init_model
from agentrl.utils.errors import ConfigError

SMALL = {"layers": 1, "hidden": 16, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 512}
KEYS = [
    "seed=5",
    "rollout.temperature=0.7",
    "rollout.top_p=0.9",
    "rollout.top_k=7",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=11",
    "rollout.max_episode_tokens=300",
    "rollout.turn_timeout=21.0",
    "rollout.episode_timeout=22.0",
    "rollout.env_timeout=23.0",
    "rollout.max_episodes=9",
    "rollout.groups=3",
    "rollout.max_staleness=2",
    "env.params={calls=2}",
    "env.reward=key_value_exact",
    "algorithm.proximal=recompute",
    "optim.lr=0.5",
    "optim.schedule=linear",
    "steps=8",
    "weights.route=disk",
    "weights.bucket_mib=3.0",
    "checkpoint.keep=4",
    "checkpoint.keep_best=3",
    "algorithm.advantage.name=remax",
]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    base = {
        "env": {"id": "key_value"},
        "cluster": {"backend": "inline"},
        "engine": "embedded",
        "model": {"init": SMALL},
        "out": str(tmp_path),
    }
    return config_from(base, KEYS)


def test_a_part_that_fails_to_close_leaves_no_other_open(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_each_part_of_a_session_gets_its_keys(config: TrainConfig, tmp_path: Path) -> None:
    async def opened() -> Any:
        session: Any = await open_session(config, RunFolder.create(config), Display())
        workers = list(session.actors.backend.workers)
        await session.close()
        return session, workers

    session, [actor] = asyncio.run(opened())
    [env] = session.envs
    assert env.limits == Limits(
        max_turns=3,
        max_turn_tokens=11,
        max_episode_tokens=300,
        turn_timeout=21.0,
        episode_timeout=22.0,
        context=512,
        env_timeout=23.0,
    )
    policy, collector = env.policy, session.collector
    assert list(collector.envs.values()) == [env]
    assert (policy.temperature, policy.top_p, policy.top_k) == (0.7, 0.9, 7)
    assert collector.seed == collector.tasks.run_seed == 5 and collector._greedy == {"key_value"}
    assert (collector.ledger.groups_per_update, collector.ledger.max_staleness, collector.slots._value) == (3, 2, 9)
    assert env.env.params == {"calls": 2} and env.scorer.name == "key_value_exact"
    assert actor._optim == config.optim and actor._total_steps == 8 and session.learner.algorithm == config.algorithm
    assert session.publisher._cfg == config.weights.model_copy(update={"folder": str(session.folder.path)})
    assert (session.saver._checkpoints.keep, session.saver._checkpoints.keep_best) == (4, 3)


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


@pytest.mark.parametrize("section", ["rollout", "eval"])
@pytest.mark.parametrize(("value", "refused"), [(0.0, False), (1e-6, True), (0.0099, True), (0.01, False), (0.7, False)])
def test_a_temperature_is_0_or_at_least_the_least_that_vllm_samples_at(section: str, value: float, refused: bool) -> None:
    """Below 0.01 vLLM samples at 0.01, and the trainer would compute another policy."""
    config = config_from({"env": {"id": "key_value"}}, [f"{section}.temperature={value:f}"])
    with pytest.raises(ConfigError, match=rf"{section}.temperature = .*at least 0\.01") if refused else nullcontext():
        check_rollout(RunStart(config))
