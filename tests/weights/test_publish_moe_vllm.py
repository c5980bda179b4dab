"""Each family of mixtures of experts that vLLM's CPU build runs: after a publish of other weights it samples with them."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy
from agentrl.config.schema import LoraSection, ModelConfig, VllmConfig, WeightsConfig
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.trainer.actor import Actor
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import EngineError
from tests import moe
from tests.conftest import proof
from tests.engines.vllm_parts import skip_without_vllm
from tests.trainer.train_batches import toy_optim
from tests.weights.publish_parts import gap, ledger_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio, proof]

skip_without_vllm()

RIGHT = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "dots1")


class Shaken(Actor):
    """An actor whose weights can be changed at random, buffers too."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"shake": Broadcast()}

    def shake(self, seed: int) -> None:
        state = self._ready().module.state_dict()
        for name, tensor in moe.shaken({n: t for n, t in state.items() if "lora_A" not in n}, seed).items():
            state[name].copy_(tensor)


@pytest.mark.parametrize("family", RIGHT)
async def test_the_engine_samples_with_the_weights_of_the_last_publish(ray_up: None, family: str, tmp_path: Path) -> None:
    """For one family over every route, and with adapters merged into the attention."""
    path = moe.build(family, tmp_path / "model")
    actors = launch(Shaken, backend="inline")
    thorough = family == "qwen3_moe"
    actors.run(Actor.init_model, path, ModelConfig(lora=LoraSection(rank=2) if thorough else None), toy_optim())
    engine = VllmEngine(path, VllmConfig(kv_cache_mib=64, max_model_len=256, max_respawns=0))
    await engine.start()
    try:
        assert gap(actors, await ledger_of(engine, 0)) < 1e-3
        for version, route in enumerate(("shared", "disk") if thorough else ("auto",), start=1):
            with torch.no_grad():
                actors.run(Shaken.shake, version)
            assert gap(actors, await ledger_of(engine, version - 1)) > 0.1  # control: the weights before
            cfg = WeightsConfig(route=route, bucket_mib=0.05, folder=str(tmp_path))
            publisher = Publisher(actors, engine, cfg)
            await publisher.send(version)
            await publisher.close()
            assert gap(actors, await ledger_of(engine, version)) < 1e-3, route
    finally:
        await engine.close()
        actors.close()


async def test_a_model_whose_loader_leaves_out_layers_is_refused(ray_up: None, tmp_path: Path) -> None:
    """vLLM 0.32's own loader of gpt-oss writes experts and sinks to memory that a reload drops, and says nothing."""
    path = moe.build("gpt_oss", tmp_path)
    actors = launch(Shaken, backend="inline")
    actors.run(Actor.init_model, path, ModelConfig(), toy_optim())
    engine = VllmEngine(path, VllmConfig(kv_cache_mib=64, max_model_len=256, max_respawns=0))
    await engine.start()
    publisher = Publisher(actors, engine, WeightsConfig())
    try:
        with pytest.raises(EngineError, match=r"took no new weights for model\.layers\.0\.attn.*use engine = embedded"):
            await publisher.send(1)
        with pytest.raises(EngineError, match="no generation until a publish succeeds"):
            await ledger_of(engine, 1)
    finally:
        await publisher.close()
        await engine.close()
        actors.close()
