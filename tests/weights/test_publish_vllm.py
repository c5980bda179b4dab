"""Two FSDP ranks publish into a live vLLM of two tensor-parallel workers, over every route between processes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.launch import launch
from agentrl.cluster.worker import Broadcast, Strategy
from agentrl.config.schema import InitModelConfig, LoraSection, ModelConfig, VllmConfig, WeightsConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.trainer.actor import Actor
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import ConfigError, EngineError
from tests import moe
from tests.conftest import proof
from tests.engines.vllm_parts import SLOW_START, skip_without_vllm
from tests.trainer.train_batches import toy_optim
from tests.weights.publish_parts import Counting, gap, ledger_of, trained

pytestmark = [SLOW_START, proof]

skip_without_vllm()


def plain_gap(folder: Path, ledger: TokenLedger) -> float:
    """Largest difference of the ledger's logprobs to those of the folder in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(ledger.token_ids).long()
    with torch.inference_mode():
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float(), -1)
    found = logp.gather(1, ids[1:, None]).squeeze(1)
    want = torch.tensor(ledger.logprobs)[1:]
    return float((found - want)[torch.tensor(ledger.sampled)[1:]].abs().max())


async def publish(actors: WorkerGroup[Any], engine: VllmEngine, cfg: WeightsConfig, version: int) -> str | None:
    publisher = Publisher(actors, engine, cfg)
    try:
        await publisher.send(version)
        return publisher.route
    finally:
        await publisher.close()


async def test_fsdp_ranks_into_tensor_parallel_workers(ray_up: None, tmp_path: Path) -> None:
    sizes = InitModelConfig(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=32, context=512)  # as vLLM's CPU asks
    tiny = str(init_model(sizes, tmp_path / "wide", seed=0))
    actors = trained(tiny, backend="ray", ranks=2, cls=Counting)
    assert actors.run(Counting.most_whole) == (1, 3)  # of two layers and the rest
    actors.run(Actor.export_hf, str(tmp_path / "export"))
    # max_respawns: the driver keeps a copy of what comes, so it is a third receiver
    cfg = VllmConfig(tensor_parallel=2, kv_cache_mib=32, max_model_len=512, max_respawns=1)
    engine = VllmEngine(str(tmp_path / "export"), cfg)
    await engine.start()
    try:
        # the export, in vLLM and in plain transformers
        ledger = await ledger_of(engine, 0)
        assert gap(actors, ledger) < 1e-3 and plain_gap(tmp_path / "export", ledger) < 1e-3
        assert plain_gap(Path(tiny), ledger) > 1e-2  # control: the model before training
        for version, route in enumerate(("shared", "disk", "auto"), start=1):
            trained(tiny, actors, steps=1)
            assert gap(actors, await ledger_of(engine, version - 1)) > 5e-3  # control: one update behind
            cfg = WeightsConfig(route=route, bucket_mib=0.01, folder=str(tmp_path))  # type: ignore[arg-type]
            assert await publish(actors, engine, cfg, version) == (route if route != "auto" else "shared")
            assert gap(actors, await ledger_of(engine, version)) < 1e-3, route
        # what a replica that is started later would get
        names = [entry.name for bucket, _ in engine._newest for entry in bucket.entries]
        assert len(names) == len(set(names)) and "lm_head.weight" in names
        with pytest.raises(ConfigError, match="in another process"):
            await publish(actors, engine, WeightsConfig(route="memory"), 9)
        # control: without its name in the update the tied output head stays as it was
        trained(tiny, actors, steps=3)
        assert engine._expected is not None
        tied, engine._expected = engine._expected, replace(engine._expected, tied={})
        await publish(actors, engine, WeightsConfig(), 10)
        assert gap(actors, await ledger_of(engine, 10)) > 5e-3
        engine._expected = tied
        # with its name again it is as new as the rest
        await publish(actors, engine, WeightsConfig(), 11)
        assert gap(actors, await ledger_of(engine, 11)) < 1e-3
    finally:
        await engine.close()
        actors.close()


# -- each family of mixtures of experts that vLLM's CPU build runs -------------------------------------


RIGHT = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "glm4_moe", "dots1")


class Shaken(Actor):
    """An actor whose weights can be changed at random, buffers too."""

    dispatch_table: ClassVar[dict[str, Strategy]] = {"shake": Broadcast()}

    def shake(self, seed: int) -> None:
        state = self._ready().module.state_dict()
        for name, tensor in moe.shaken({n: t for n, t in state.items() if "lora_A" not in n}, seed).items():
            state[name].copy_(tensor)


@asynccontextmanager
async def both(path: str, lora: LoraSection | None = None) -> AsyncIterator[tuple[WorkerGroup[Shaken], VllmEngine]]:
    """Actors and an engine with the model of a folder, until the end of the body."""
    actors = launch(Shaken, backend="inline")
    actors.run(Actor.init_model, path, ModelConfig(lora=lora), toy_optim())
    engine = VllmEngine(path, VllmConfig(kv_cache_mib=64, max_model_len=256, max_respawns=0))
    await engine.start()
    try:
        yield actors, engine
    finally:
        await engine.close()
        actors.close()


@pytest.mark.parametrize("family", RIGHT)
async def test_the_engine_samples_with_the_weights_of_the_last_publish(ray_up: None, family: str, tmp_path: Path) -> None:
    """For one family over every route, and with adapters merged into the attention."""
    thorough = family == "qwen3_moe"
    async with both(moe.build(family, tmp_path / "model"), LoraSection(rank=2) if thorough else None) as (actors, engine):
        assert gap(actors, await ledger_of(engine, 0)) < 1e-3
        for version, route in enumerate(("shared", "disk") if thorough else ("auto",), start=1):
            with torch.no_grad():
                actors.run(Shaken.shake, version)
            assert gap(actors, await ledger_of(engine, version - 1)) > 0.1  # control: the weights before
            await publish(actors, engine, WeightsConfig(route=route, bucket_mib=0.05, folder=str(tmp_path)), version)
            assert gap(actors, await ledger_of(engine, version)) < 1e-3, route


async def test_a_model_whose_loader_leaves_out_layers_is_refused(ray_up: None, tmp_path: Path) -> None:
    """vLLM 0.32's own loader of gpt-oss writes experts and sinks to memory that a reload drops, and says nothing."""
    async with both(moe.build("gpt_oss", tmp_path)) as (actors, engine):
        with pytest.raises(EngineError, match=r"took no new weights for model\.layers\.0\.attn.*use engine = embedded"):
            await publish(actors, engine, WeightsConfig(), 1)
        with pytest.raises(EngineError, match="no generation until a publish succeeds"):
            await ledger_of(engine, 1)
