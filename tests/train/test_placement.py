"""Keys that say in which processes, on which meshes and in which precision the roles run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from train_batches import make_batch, toy_critic

from agentrl.backends.embedded import engine as embedded_engine
from agentrl.backends.vllm import engine as vllm_engine
from agentrl.backends.vllm import replicas
from agentrl.batch.rows import Ragged
from agentrl.config.schema import (
    AlgorithmConfig,
    Choice,
    ClusterConfig,
    EnvConfig,
    KlConfig,
    LoraSection,
    ModelConfig,
    PoolConfig,
    TrainConfig,
    VllmConfig,
    WeightsConfig,
)
from agentrl.run import engines, placement
from agentrl.train import learner
from agentrl.train.fsdp import FsdpEngine
from agentrl.train.update import Pack


@contextmanager
def ranks(backend: str, world: int) -> Iterator[None]:
    """This process as rank 0 of so many; of more than one, the others are made up, and nothing is sent."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=world, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    assert learner.mesh_of(config) == {"dp": 8 // parallel, "sp": parallel}
    with ranks("fake", 8):
        engine = FsdpEngine(tiny, model, 1.0)
        assert engine.layout.fsdp is not None
        assert dict(zip(engine.layout.fsdp.mesh_dim_names or (), engine.layout.fsdp.shape, strict=True)) == mesh
        weight: Any = dict(engine.named())["model.layers.0.mlp.up_proj.weight"]
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
        assert engines.make_engine(name, tiny, config).dtype == dtype  # type: ignore[attr-defined]
    given: list[torch.dtype] = []
    with ranks("gloo", 1):
        engine = FsdpEngine(tiny, config.model, 1.0)
        layer = next(module for name, module in engine.module.named_modules() if name.endswith("mlp.up_proj"))
        layer.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0].dtype))
        assert {p.dtype for _, p in engine.named()} == {torch.float32}
        engine.logprobs(Pack(Ragged.of(make_batch(4)), [0, 1, 2, 3], engine.device).micro, 1.0, False)
        assert set(given) == {expected}
        assert {tensor.dtype for _, tensor in engine.tensors()} == {expected}


def test_what_starts_a_role_gets_the_keys_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}

    def launch(cls: Any, *, name: str, **given: Any) -> Any:
        seen[name] = given

        async def arun(*args: Any) -> None:
            pass

        return SimpleNamespace(arun=arun, world_size=given["world_size"])

    monkeypatch.setattr("agentrl.cluster.roles.launch", launch)
    monkeypatch.setattr(learner, "launch", launch)
    monkeypatch.setattr("agentrl.cluster.placement.Pools", lambda *args: args)
    cluster = ClusterConfig(backend="ray", actors=3, startup_timeout=7.0, call_timeout=9.0)
    config = TrainConfig(
        env=EnvConfig(id="none"),
        cluster=cluster,
        critic=toy_critic(),
        algorithm=AlgorithmConfig(advantage=Choice(name="gae"), kl=KlConfig(coef=0.1)),
    )
    actors = placement.start_actors(config, None)
    asyncio.run(learner.Learner(config, actors).open("model"))
    common = {"backend": "ray", "world_size": 3, "mesh": {"dp": 3, "sp": 1}, "call_timeout": 9.0}
    assert seen == {
        "actor": {**common, "startup_timeout": 7.0},
        "critic": {**common, "on": actors},
        "reference": {**common, "on": actors},
    }
    pooled = cluster.model_copy(update={"pools": {"p": PoolConfig()}, "roles": {"critic": "p"}})
    changed = config.model_copy(update={"cluster": pooled})
    assert placement.open_pools(changed, "embedded") == (pooled, ["critic"], 9.0)
    inline = config.model_copy(update={"cluster": cluster.model_copy(update={"backend": "inline"})})
    assert placement.start_actors(inline, None).world_size == 3 and seen["actor"]["backend"] == "inline"


@pytest.mark.parametrize("placed", [True, False])
def test_vllm_replicas_run_where_the_role_rollout_is_placed(monkeypatch: pytest.MonkeyPatch, placed: bool) -> None:
    """Two replicas with a pool of two: each is started with Ray's options of its slot; without a pool, with those of its own."""
    slots = [{"num_cpus": 0.5, "scheduling_strategy": f"slot {number}"} for number in range(2)]

    class Pools:
        def __contains__(self, role: str) -> bool:
            return placed and role == "rollout"

        def beside(self, role: str) -> list[dict[str, Any]]:
            assert role == "rollout"
            return slots

    started: list[dict[str, Any]] = []

    class Remote:
        def options(self, **options: Any) -> Any:
            started.append(options)
            return SimpleNamespace(remote=lambda given: None)

    monkeypatch.setattr(engines, "model_context", lambda model: 4096)
    monkeypatch.setattr(replicas.ray, "remote", lambda cls: Remote())
    config = TrainConfig(env=EnvConfig(id="none"), vllm=VllmConfig(replicas=2))
    engine: Any = engines.make_engine("vllm", "model", config, Pools())  # type: ignore[arg-type]
    for number in range(2):
        engine._replicas._spawn(number)
    assert [options.get("scheduling_strategy") for options in started] == (["slot 0", "slot 1"] if placed else [None, None])


@pytest.mark.parametrize(("rank", "published", "room"), [(8, "adapter", 8), (20, "adapter", 32), (8, "merged", None)])
def test_vllm_gets_room_for_an_adapter_of_the_rank_and_only_where_one_is_published(
    monkeypatch: pytest.MonkeyPatch, rank: int, published: Any, room: int | None
) -> None:
    """vLLM has room for ranks of 8, 16, 32, ... : the least that holds the adapter's."""
    monkeypatch.setattr(engines, "model_context", lambda model: 4096)
    config = TrainConfig(
        env=EnvConfig(id="none"), model=ModelConfig(lora=LoraSection(rank=rank)), weights=WeightsConfig(lora=published)
    )
    engine: Any = engines.make_engine("vllm", "model", config)
    options = engine._replicas._options
    assert (options.get("max_lora_rank"), options.get("enable_lora", False)) == (room, room is not None)
