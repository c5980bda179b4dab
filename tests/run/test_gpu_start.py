"""Configs for one GPU on a made-up card of 80 GiB: the engine's cache, with real heads and tiny widths."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster import placement as devices
from agentrl.cluster.placement import planned_elsewhere
from agentrl.cluster.ray_cluster import stop_ray
from agentrl.config import TrainConfig, load_config
from agentrl.config.load import config_from
from agentrl.config.schema import InitModelConfig
from agentrl.env.catalog import find_config
from agentrl.rollout.engine import Sampling
from agentrl.run import role_placement as memory
from agentrl.run.checks import check_config
from agentrl.run.checks import size_checks as sizes
from agentrl.run.display import Display
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.folder import RunFolder
from agentrl.run.plan import Planner
from agentrl.run.role_placement import FILL, GIB, RunMemory
from agentrl.run.session import open_session
from agentrl.trainer.pretrained import SHAPES, init_model, shape_folder
from agentrl.utils.errors import ResourceError
from tests.conftest import proof

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CARD = 80 * GIB
HERE = ["gpu/lora_one_gpu", pytest.param("gpu/one_gpu", marks=proof), pytest.param("recipes/qwen3_0.6b", marks=proof),
        pytest.param("recipes/qwen3_8b_lora", marks=proof)]  # fmt: skip
TOKEN = {"lora_one_gpu": 147_456, "one_gpu": 114_688, "qwen3_0.6b": 114_688, "qwen3_8b_lora": 147_456}
"""Bytes of a token's keys and values in bf16: 2 x layers x 8 key heads x 128 x 2."""


def test_every_config_without_ray_is_started_here() -> None:
    paths = [path for folder in ("gpu", "recipes") for path in (CONFIGS / folder).glob("*.toml")]
    assert {path.stem for path in paths if load_config(path, find=find_config).cluster.backend == "inline"} == {*TOKEN}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has one card of 80 GiB, as far as checks and counts ask."""
    stop_ray()
    monkeypatch.setattr(devices, "usable_gpus", lambda: 1)
    monkeypatch.setattr(memory, "driver_card", lambda: CARD)
    monkeypatch.setattr(sizes, "card_bytes", lambda cluster: CARD)


def narrow(name: str, tmp_path: Path, *more: str) -> TrainConfig:
    """The config, with a model of its model's layers, key heads and their width."""
    config = load_config(CONFIGS / f"{name}.toml", find=find_config)
    shape = SHAPES[str(config.model.path)]
    init = InitModelConfig(
        layers=shape["num_hidden_layers"], hidden=32, mlp=32, heads=8, kv_heads=8, head_dim=128, context=40_960
    )
    model = init_model(init, tmp_path / "narrow", 0)
    given = [f"model.path={model}", f"out={tmp_path}", *more]
    return load_config(CONFIGS / f"{name}.toml", given, find=find_config)


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_a_config_for_one_gpu_starts_and_samples(name: str, card: None, tmp_path: Path) -> None:
    """Its cache may take what FILL of the card holds beside the trainer, and holds its longest episode."""
    config = narrow(name, tmp_path)
    check_config(config, capacity=True)

    async def sampled() -> tuple[Any, int]:
        session = await open_session(config, RunFolder.create(config), Display())
        try:
            engine: Any = session.engine
            await session.begin()
            answer = await engine.generate([5, 6, 7], Sampling(max_tokens=2, seed=1), "a")
            return answer, engine._batcher.slots.limit
        finally:
            await session.close()

    answer, limit = asyncio.run(sampled())
    with planned_elsewhere():
        roles = {one.role: one.memory for one in RunMemory(EngineChoice(config), CARD).roles()}
    assert len(answer.token_ids) == 2
    assert limit == int(FILL * CARD) - roles["actor"].resident - roles["rollout"].weights
    assert limit >= config.rollout.max_episode_tokens * TOKEN[Path(name).name]


@pytest.mark.parametrize(("name", "held"), [("gpu/one_gpu", 12), ("gpu/lora_one_gpu", 4)])
def test_the_real_models_leave_room_for_the_longest_episode(name: str, held: int) -> None:
    """`held`: the trainer's bytes per parameter; with adapters of all linear layers theirs are on top, below 4 %."""
    config = load_config(CONFIGS / f"{name}.toml", find=find_config)
    with shape_folder(config.model.path) as folder, planned_elsewhere():
        given = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
        roles = {one.role: one.memory for one in RunMemory(EngineChoice(given), CARD).roles()}
    weights = roles["rollout"].weights
    assert roles["actor"].resident == pytest.approx(held * weights / 2, rel=0.04)
    token = TOKEN[Path(name).name]
    left = int(FILL * CARD) - roles["actor"].resident - weights
    assert roles["rollout"].cache == min(left, 256 * 16_384 * token) > 4 * 16_384 * token


@pytest.mark.parametrize(("override", "said"), [
    ("engine_args.kv_cache_mib=2048", r"engine_args\.kv_cache_mib = 2048: one episode of 16,384 tokens takes 2,304 MiB\. Set"),
    ("rollout.max_episode_tokens=40000000", r"rollout\.max_episode_tokens: one episode of 40,960 .* takes 5\.6 GiB of the"),
])  # fmt: skip
def test_the_start_and_its_plan_refuse_a_cache_that_holds_no_episode(
    override: str, said: str, card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["optim.micro_tokens=40960"] if "max_episode" in override else []
    config = narrow("gpu/lora_one_gpu", tmp_path, override, *more)
    small = CARD if more == [] else 6 * GIB
    monkeypatch.setattr(memory, "driver_card", lambda: small)
    with pytest.raises(ResourceError, match=said):
        check_config(config, capacity=True)
    with pytest.raises(ResourceError, match=said):
        Planner(config).dry_run(small / GIB)


def test_the_cache_in_host_memory_is_not_the_cards() -> None:
    """Without a card a plan counts what the engine would take: at most 4 GiB or a quarter of the machine, at least an episode."""
    base = {"env": {"id": "key_value"}, "engine": "embedded", "model": {"init": {"layers": 36, "kv_heads": 8, "heads": 8,
            "head_dim": 128, "hidden": 32, "context": 40_960}}, "rollout": {"max_episode_tokens": 16_384}}  # fmt: skip
    found, given = (
        {one.role: one.memory for one in RunMemory(EngineChoice(config_from(base, words)), None).roles()}
        for words in ([], ["engine_args.kv_cache_mib=5000"])
    )
    assert 16_384 * 294_912 <= found["rollout"].cache <= max(16_384 * 294_912, 4 * GIB)
    assert given["rollout"].cache == 5000 << 20
