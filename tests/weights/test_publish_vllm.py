"""Two FSDP ranks publish into a live vLLM of two tensor-parallel workers, over every route between processes.

Adapters alone are in tests/e2e/test_sampling_paths.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.cluster.group import WorkerGroup
from agentrl.config.schema import InitModelConfig, VllmConfig, WeightsConfig
from agentrl.data.token_ledger import TokenLedger
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.trainer.actor import Actor
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.publish import Publisher
from agentrl.utils.errors import ConfigError
from tests.conftest import proof
from tests.engines.vllm_parts import skip_without_vllm
from tests.weights.publish_parts import Counting, gap, ledger_of, trained

pytestmark = [proof, pytest.mark.asyncio]

skip_without_vllm()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer model whose heads are as wide as vLLM's CPU attention asks."""
    sizes = InitModelConfig(layers=2, hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=32, context=512)
    return str(init_model(sizes, tmp_path_factory.mktemp("models") / "wide", seed=0))


def plain_gap(folder: Path, ledger: TokenLedger) -> float:
    """Largest difference of the ledger's logprobs to those of the folder in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(ledger.token_ids).long()
    with torch.inference_mode():
        logp = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float(), -1)
    found = logp.gather(1, ids[1:, None]).squeeze(1)
    want = torch.tensor(ledger.logprobs)[1:]
    return float((found - want)[torch.tensor(ledger.sampled)[1:]].abs().max())


async def publish(actors: WorkerGroup[Actor], engine: VllmEngine, cfg: WeightsConfig, version: int) -> str | None:
    publisher = Publisher(actors, engine, cfg)
    await publisher.send(version)
    route = publisher.route
    await publisher.close()
    return route


async def test_fsdp_ranks_into_tensor_parallel_workers(ray_up: None, tiny: str, tmp_path: Path) -> None:
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
