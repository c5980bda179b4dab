"""Ways to spread or thin the training of one model: each gives the results of the plain one."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from agentrl.cluster.machine import join_group
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, EnvConfig, LoraSection, ModelConfig, TrainConfig
from agentrl.data.rows import Ragged
from agentrl.engines.embedded import embedded_engine
from agentrl.engines.vllm import vllm_engine
from agentrl.run import engine_choice as engines
from agentrl.trainer import memory as by_size
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.memory import LARGE
from agentrl.trainer.train_engine import mesh_of
from agentrl.trainer.update import Pack
from agentrl.utils.errors import ConfigError, ModelError
from tests.publishing import weights_of as weights
from tests.trainer.learners import as_rank
from tests.trainer.learners import start as any_start
from tests.trainer.train_batches import make_batch, train_batch

ALGORITHM = AlgorithmConfig(minibatch=6)
start = partial(any_start, micro_tokens=150)


def test_what_a_size_decides(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing by all of a model's parameters, sharded gradients by those that are trained; a key decides if it is set."""

    def found(**keys: Any) -> tuple[bool, bool]:
        engine = FsdpEngine(tiny, ModelConfig(**keys), 1.0)
        return engine.checkpoints, engine.shards_gradients

    size = sum(p.numel() for p in FsdpEngine(tiny, ModelConfig(), 1.0).module.parameters())
    assert LARGE == 1_000_000_000
    monkeypatch.setattr(by_size, "LARGE", size + 1)
    assert found() == (False, False)
    assert found(activation_checkpointing=True, shard_gradients=True) == (True, True)
    monkeypatch.setattr(by_size, "LARGE", size)
    assert found() == (True, True)
    assert found(activation_checkpointing=False, shard_gradients=False) == (False, False)
    assert found(lora=LoraSection(rank=2)) == (True, False)


LORA = ModelConfig(lora=LoraSection(rank=4, alpha=8.0))


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_lora_trains_adapters_alone_and_publishes_merged(tiny: str, tmp_path: Path) -> None:
    group = start(tiny, LORA)
    before = weights(group)
    plain = weights(start(tiny, ModelConfig()))
    assert before.keys() == plain.keys() and all(torch.equal(before[n], plain[n]) for n in plain)
    for step in range(3):
        train_batch(group, Actor.update, make_batch(8, seed=step), ALGORITHM, step=step)
    after = weights(group)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {n for n in before if n.split(".")[-2] in LINEAR}
    for name in changed:
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 4
    group.run(Actor.export_hf, str(tmp_path / "merged"))
    batch = make_batch(4, seed=9)
    adapted = group.run(Actor.compute_logprob, batch)["logprobs"].values()
    merged = start(str(tmp_path / "merged"), ModelConfig()).run(Actor.compute_logprob, batch)["logprobs"].values()
    assert torch.allclose(adapted, merged, atol=1e-5)
    control = start(tiny, ModelConfig()).run(Actor.compute_logprob, batch)["logprobs"].values()
    assert not torch.allclose(adapted, control, atol=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").num_parameters() > 0


def test_what_cannot_be(tiny: str) -> None:
    with pytest.raises(ConfigError, match="no GPU"):
        start(tiny, ModelConfig(offload="always"))
    with pytest.raises(ConfigError, match="replicas = 2 does not divide"):
        start(tiny, ModelConfig(replicas=2))
    with pytest.raises(ConfigError, match="sequence_parallel = 3 does not divide"):
        start(tiny, ModelConfig(sequence_parallel=3))
    for name in ("nothing_proj", "v_porj", "embed_tokens", "lm_head", "mlp"):
        with pytest.raises(ModelError, match=rf"model\.lora\.modules.*{name}"):
            start(tiny, ModelConfig(lora=LoraSection(modules=["q_proj", name])))


# -- meshes and precision --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "mesh", "share"),
    [(1, {"shard": 8}, 8), (2, {"replicate": 2, "shard": 4}, 4), (8, {"replicate": 8, "shard": 1}, 1)],
)
@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_the_meshes_of_replicas_and_sequence_parallel(
    tiny: str, replicas: int, mesh: dict[str, int], share: int, parallel: int
) -> None:
    """8 ranks: each holds 1 of actors / replicas parts of a matrix; so many neighbours share tokens, and the ranks in steps
    of as many see different rows."""
    model = ModelConfig(replicas=replicas, sequence_parallel=parallel)
    config = TrainConfig(env=EnvConfig(id="none"), model=model, cluster=ClusterConfig(actors=8))
    assert mesh_of(config.model, config.cluster) == {"dp": 8 // parallel, "sp": parallel}
    with as_rank(0, 8):
        engine = FsdpEngine(tiny, model, 1.0)
        assert engine.layout.fsdp is not None
        assert dict(zip(engine.layout.fsdp.mesh_dim_names or (), engine.layout.fsdp.shape, strict=True)) == mesh
        weight: Any = dict(engine.named_weights())["model.layers.0.mlp.up_proj.weight"]
        assert tuple(weight.shape) == (64, 32) and tuple(weight.to_local().shape) == (64 // share, 32)
        if parallel == 1:
            assert engine.layout.ulysses is None
        else:
            assert engine.layout.ulysses is not None and engine.layout.data is not None
            assert dist.get_process_group_ranks(engine.layout.ulysses.group) == list(range(parallel))
            assert dist.get_process_group_ranks(engine.layout.data) == list(range(0, 8, parallel))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_what_the_engine_gets_and_what_the_trainer_computes_in(
    tiny: str, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Master weights stay float32; what a layer is given, and what is published, is of the type."""
    expected = getattr(torch, dtype)
    config = TrainConfig(env=EnvConfig(id="none"), model=ModelConfig(path=tiny, dtype=dtype))  # type: ignore[arg-type]
    for module, cls, name in ((vllm_engine, "VllmEngine", "vllm"), (embedded_engine, "EmbeddedEngine", "embedded")):
        monkeypatch.setattr(module, cls, lambda *args, **options: SimpleNamespace(**options))
        assert engines.EngineChoice(config, name).make(tiny).dtype == dtype  # type: ignore[attr-defined]
    given: list[torch.dtype] = []
    with as_rank(0, 1, "gloo"):
        engine = FsdpEngine(tiny, config.model, 1.0)
        layer = next(module for name, module in engine.module.named_modules() if name.endswith("mlp.up_proj"))
        layer.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0].dtype))
        assert {p.dtype for _, p in engine.named_weights()} == {torch.float32}
        engine.logprobs(Pack(Ragged.of(make_batch(4)), [0, 1, 2, 3], engine.device).micro, 1.0, False)
        assert set(given) == {expected}
        assert {tensor.dtype for _, tensor in engine.tensors()} == {expected}


def test_a_group_on_gpus_carries_tensors_of_the_host_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `model.offload` "always" shards lie on the host, and their norm is added up over the ranks there."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    join_group(None, 0, 1, None, 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    join_group(None, 0, 1, None, 10.0)
    found = [dist.distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map() for backend in asked]
    assert {device: found[0].get(device) for device in ("cpu", "cuda")} == {"cpu": "gloo", "cuda": "nccl"}
    assert found[1]["cpu"] == "gloo"
