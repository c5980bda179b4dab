"""Cores, threads and number types: what is chosen on a CPU, and for whom."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.backends.embedded import engine as embedded_engine
from agentrl.backends.embedded.engine import EmbeddedEngine
from agentrl.backends.vllm import engine as vllm_engine
from agentrl.config import ModelConfig
from agentrl.config.load import config_from
from agentrl.config.schema import InitModelConfig
from agentrl.processor import _quota, prefers_bfloat16, size_of_folder, threads_for, usable_cpus
from agentrl.run.engines import engine_computes, make_engine, trainer_computes, with_threads
from agentrl.train.pretrained import meta_model

SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
"""The shape of SmolLM2-135M."""


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.fixture
def real(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_a_containers_share_of_the_cores(
    files: dict[str, str], quota: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _quota(tmp_path) == quota
    monkeypatch.setattr("agentrl.processor._quota", lambda _: quota)
    assert usable_cpus() == max(1, min(8, quota) // 1)


@pytest.mark.parametrize(
    ("parameters", "cores", "processes", "said", "threads"),
    [
        (174_000, 8, 1, None, 1),
        (135e6, 8, 1, None, 8),
        (135e6, 8, 3, None, 2),
        (math.inf, 2, 4, None, 1),
        (135e6, None, 2, None, 4),
        (174_000, 2, 1, "3", 3),
        (135e6, 8, 1, "1", 1),
        (135e6, 8, 1, "", 8),
    ],
)
def test_threads_by_size_and_cores(
    parameters: float, cores: int | None, processes: int, said: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads_for(parameters, cores, processes) == threads


def test_the_size_of_a_model_is_known_without_its_weights(real: str, tmp_path: Path) -> None:
    assert size_of_folder(real) == pytest.approx(134.5e6, rel=0.1)
    tiny = ModelConfig(init=InitModelConfig())
    assert tiny.size() == pytest.approx(sum(p.numel() for p in meta_model(tiny).parameters()), rel=0.5)
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text(json.dumps({"text_config": SMOLLM2}))
    assert size_of_folder(str(nested)) == size_of_folder(real) and size_of_folder("some/model") == math.inf


@pytest.mark.parametrize(
    ("said", "prefers"),
    [
        ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16 amx_tile", True),
        ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),  # twice as slow as float32 there
        ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", True),  # 2.2 to 2.7 times as fast
        ("vendor_id : AuthenticAMD\nflags : avx2", False),
        ("", False),
    ],
)
def test_which_processors_are_faster_in_bfloat16(said: str, prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: said)
    assert prefers_bfloat16.__wrapped__() == prefers


@pytest.mark.parametrize(
    ("amx", "cuda", "tiny", "dtype", "found"),
    [
        (False, False, False, "auto", "float32"),
        (True, False, False, "auto", "bfloat16"),
        (True, False, True, "auto", "float32"),
        (False, True, True, "auto", "bfloat16"),
        (True, False, False, "float32", "float32"),
        (False, False, False, "bfloat16", "bfloat16"),
    ],
)
def test_the_type_by_device_and_size(
    amx: bool, cuda: bool, tiny: bool, dtype: Any, found: str, real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.config.schema.model.prefers_bfloat16", lambda: amx)
    model = ModelConfig(init=InitModelConfig(), dtype=dtype) if tiny else ModelConfig(path=real, dtype=dtype)
    assert model.computes_in(cuda) == found


@pytest.mark.parametrize(
    ("keys", "threads"),
    [
        (["engine=embedded"], 8),  # the engine's turn and the trainer's alternate
        (["engine=embedded", "rollout.max_staleness=1"], 4),
        (["engine=embedded", "cluster.actors=4"], 2),
        (["engine=vllm", "vllm.replicas=2", "vllm.tensor_parallel=3", "rollout.max_staleness=2"], 1),
        (["engine=vllm", "vllm.replicas=2", "cluster.backend=inline", "rollout.max_staleness=2"], 2),
        (["engine=embedded", "reward.judge.engines.j.path=x"], 4),
        (["engine=embedded", "model.threads=5", "rollout.max_staleness=1"], 5),
        (["engine=embedded", "~model.path", "model.init={}"], 1),
    ],
    ids=str,
)
def test_the_threads_of_a_run(keys: list[str], threads: int, real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from({"env": {"id": "key_value"}, "model": {"path": real}}, keys)
    monkeypatch.setattr("agentrl.run.engines.resolve_engine", lambda config: config.engine)  # vLLM may not be installed
    made = with_threads(config)
    assert made.model.threads == threads
    monkeypatch.setattr("agentrl.run.engines.model_context", lambda *_: 2048)
    for module, cls, name in ((vllm_engine, "VllmEngine", "vllm"), (embedded_engine, "EmbeddedEngine", "embedded")):
        if config.engine == name:
            monkeypatch.setattr(module, cls, lambda *_, **options: SimpleNamespace(**options))
            assert make_engine(name, real, made).threads == threads  # type: ignore[attr-defined]


def test_the_start_says_type_and_threads(real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that trains nothing has no trainer to share the cores with, whatever its config says of one."""
    config = config_from({"env": {"id": "key_value"}, "model": {"path": real}}, ["engine=embedded", "rollout.max_staleness=1"])
    said = "the model is computed in float32 on the CPU, by {} threads of each process (model.dtype, model.threads)"
    assert (trainer_computes(config), engine_computes(config)) == (said.format(4), said.format(8))
    assert with_threads(config, trains=False).model.threads == 8
    api = config_from({"env": {"id": "key_value"}, "model": {"path": "api:openai/m"}}, [])
    assert engine_computes(api) == ""
    monkeypatch.setattr("agentrl.run.engines.has_gpus", lambda cluster, role: True)
    assert trainer_computes(config) == "the model is computed in bfloat16 (model.dtype, model.threads)"


async def test_an_engine_of_its_own_takes_what_its_model_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.train.init_model import init_model

    before = torch.get_num_threads()
    folder = str(init_model(InitModelConfig(), tmp_path / "tiny", seed=1))
    try:
        for tiny, asked, threads in ((5_000_000, None, 1), (0, None, 8), (0, 3, 3)):
            monkeypatch.setattr("agentrl.processor.TINY", tiny)
            engine = EmbeddedEngine(folder, threads=asked, device="cpu")
            await engine.start()
            assert torch.get_num_threads() == threads
            await engine.close()
    finally:
        torch.set_num_threads(before)
