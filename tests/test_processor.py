"""Cores, threads and number types: what is chosen on a CPU, and for whom."""

import gc
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from agentrl.cluster import ray_cluster
from agentrl.cluster.placement import this_machine
from agentrl.config import ModelConfig
from agentrl.config.load import config_from
from agentrl.config.schema import InitModelConfig
from agentrl.contrib.doctor.machine_checks import check_machine
from agentrl.engines.embedded import embedded_engine
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.vllm import vllm_engine
from agentrl.run.engine_choice import EngineChoice
from agentrl.trainer.pretrained import meta_model
from agentrl.utils import processor
from agentrl.utils.processor import (
    YOUNG_OBJECTS,
    HostMemory,
    prefers_bfloat16,
    raise_gc_threshold,
    size_of_folder,
    threads_for,
    usable_cpus,
    usable_memory,
)

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


def under(at: str, **files: str) -> dict[str, str]:
    """Files of the group `at`; the first _ of a name is its dot."""
    return {at + name.replace("_", ".", 1): text for name, text in files.items()}


GROUPS: dict[str, tuple[str, dict[str, str], float, tuple[int, int]]] = {
    "none": ("0::/", {}, 8, (100, 60)),
    "version 2, no limit": ("0::/", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "5"}, 8, (100, 60)),
    "version 2, a container": (
        "0::/",
        {"cpu.max": "250000 100000", "memory.max": "40", "memory.current": "30", "memory.stat": "anon 1\ninactive_file 7"},
        2,
        (40, 17),
    ),
    "version 2, below a limited slice": (
        "0::/a.slice/b.scope",
        under("a.slice/", cpu_max="100000 100000", memory_max="50", memory_current="45", memory_stat="inactive_file 0")
        | under("a.slice/b.scope/", cpu_max="max 100000", memory_max="max", memory_high="80")
        | under("a.slice/b.scope/", memory_current="20", memory_stat="inactive_file 0"),
        1,
        (50, 5),
    ),
    "version 2 beside version 1": ("4:memory:/\n0::/x", {"unified/x/cpu.max": "300000 100000"}, 3, (100, 60)),
    "version 1, no limit": (
        "3:cpu:/\n4:memory:/",
        under("cpu/", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
        | under("memory/", memory_limit_in_bytes=f"{2**63 - 4096}", memory_usage_in_bytes="9", memory_stat=""),
        8,
        (100, 60),
    ),
    "version 1, half a core": ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1, (100, 60)),
    "version 1, joint controllers, below a limited group": (
        "3:cpu,cpuacct:/job/step\n4:memory:/job/step",
        under("cpu,cpuacct/job/", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
        | under("memory/job/", memory_limit_in_bytes="30", memory_usage_in_bytes="40", memory_stat="total_inactive_file 3")
        | {"cpu,cpuacct/job/step/x": "", "memory/job/step/x": ""},
        4,
        (30, 0),
    ),
    "version 1, a container that the host names": (
        "3:cpu:/docker/12ab\n4:memory:/docker/12ab",
        under("cpu/", cpu_cfs_quota_us="200000", cpu_cfs_period_us="100000")
        | under("memory/", memory_limit_in_bytes="20", memory_usage_in_bytes="5", memory_stat="total_inactive_file 0"),
        2,
        (20, 15),
    ),
}
"""/proc/self/cgroup, the files of the groups, and what a process may use of 8 cores and of 100 bytes, 60 of them free."""


@pytest.mark.parametrize("name", GROUPS)
def test_control_groups_limit_cores_and_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, files, cores, memory = GROUPS[name]
    (tmp_path / "own").write_text(own + "\n")
    for file, text in files.items():
        (tmp_path / "root" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / file).write_text(f"{text}\n")
    monkeypatch.setattr(processor.control_groups, "__defaults__", (tmp_path / "root", tmp_path / "own"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=100, available=60))
    options = ray_cluster._local(None)
    assert usable_cpus() == threads_for(1e9) == this_machine().cpus == options["num_cpus"] == cores
    assert next(check_machine()).found == str(cores), "as doctor says it"
    assert usable_memory() == HostMemory(*memory)
    assert ("object_store_memory" in options) == (memory[0] < 100), "Ray would take a share of all that the machine has"


@pytest.mark.parametrize(("parameters", "cores", "processes", "said", "threads"), [
    (174_000, 8, 1, None, 1), (135e6, 8, 1, None, 8), (135e6, 8, 3, None, 2), (math.inf, 2, 4, None, 1),
    (135e6, None, 2, None, 4), (174_000, 2, 1, "3", 3), (135e6, 8, 1, "1", 1), (135e6, 8, 1, "", 8),
])  # fmt: skip
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


@pytest.mark.parametrize(("said", "prefers"), [
    ("vendor_id : GenuineIntel\nflags : avx512_bf16 amx_bf16 amx_tile", True),
    ("vendor_id : GenuineIntel\nflags : avx512f avx512_bf16", False),  # twice as slow as float32 there
    ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16", True),  # 2.2 to 2.7 times as fast
    ("vendor_id : AuthenticAMD\nflags : avx2", False),
    ("", False),
])  # fmt: skip
def test_which_processors_are_faster_in_bfloat16(said: str, prefers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: said)
    assert prefers_bfloat16.__wrapped__() == prefers


@pytest.mark.parametrize(("amx", "cuda", "tiny", "dtype", "found"), [
    (False, False, False, "auto", "float32"), (True, False, False, "auto", "bfloat16"), (True, False, True, "auto", "float32"),
    (False, True, True, "auto", "bfloat16"), (True, False, False, "float32", "float32"),
    (False, False, False, "bfloat16", "bfloat16"),
])  # fmt: skip
def test_the_type_by_device_and_size(
    amx: bool, cuda: bool, tiny: bool, dtype: Any, found: str, real: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.config.schema.learning.prefers_bfloat16", lambda: amx)
    model = ModelConfig(init=InitModelConfig(), dtype=dtype) if tiny else ModelConfig(path=real, dtype=dtype)
    assert model.computes_in(cuda) == found


@pytest.mark.parametrize(("keys", "threads", "alone"), [
    (["engine=embedded"], 8, 8),  # the engine's turn and the trainer's alternate
    (["engine=embedded", "rollout.max_staleness=1"], 4, 8),
    (["engine=embedded", "cluster.actors=4"], 2, 2),
    (["engine=vllm", "vllm.replicas=2", "vllm.tensor_parallel=3", "rollout.max_staleness=2"], 1, 8),
    (["engine=vllm", "vllm.replicas=2", "cluster.backend=inline", "rollout.max_staleness=2"], 2, 8),
    (["engine=embedded", "reward.judge.engines.j.path=x"], 4, 8),
    (["engine=embedded", "model.threads=5", "rollout.max_staleness=1"], 5, 5),
    (["engine=embedded", "~model.path", "model.init={}"], 1, 1),
], ids=str)  # fmt: skip
def test_the_threads_of_a_run(keys: list[str], threads: int, alone: int, real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "judge" in keys[-1]:
        pytest.importorskip("agentrl.contrib.judges")
    config = config_from({"env": {"id": "key_value"}, "model": {"path": real}}, keys)
    monkeypatch.setattr(EngineChoice, "name", property(lambda self: self.config.engine))  # vLLM may not be installed
    made = EngineChoice(config).with_threads()
    assert made.model.threads == threads
    assert EngineChoice(config).with_threads(samples=False).model.threads == alone, "in a warm start the engine rests"
    monkeypatch.setattr("agentrl.run.engine_choice.model_context", lambda *_: 2048)
    for module, cls, name in ((vllm_engine, "VllmEngine", "vllm"), (embedded_engine, "EmbeddedEngine", "embedded")):
        if config.engine == name:
            monkeypatch.setattr(module, cls, lambda *_, **options: SimpleNamespace(**options))
            assert EngineChoice(made).make(real).threads == threads  # type: ignore[attr-defined]


def test_the_start_says_type_and_threads(real: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that trains nothing has no trainer to share the cores with, whatever its config says of one."""
    config = config_from({"env": {"id": "key_value"}, "model": {"path": real}}, ["engine=embedded", "rollout.max_staleness=1"])
    said = "the model is computed in float32 on the CPU, by {} threads of each process (model.dtype, model.threads)"
    assert [EngineChoice(config).computation_line(trains) for trains in (True, False)] == [said.format(4), said.format(8)]
    assert EngineChoice(config).with_threads(trains=False).model.threads == 8
    api = config_from({"env": {"id": "key_value"}, "model": {"path": "api:openai/m"}}, [])
    assert EngineChoice(api).computation_line(False) == ""
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: True)
    assert EngineChoice(config).computation_line(True) == "the model is computed in bfloat16 (model.dtype, model.threads)"


async def test_an_engine_of_its_own_takes_what_its_model_is_worth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.trainer.pretrained import init_model

    before = torch.get_num_threads()
    folder = str(init_model(InitModelConfig(), tmp_path / "tiny", seed=1))
    try:
        for tiny, asked, threads in ((5_000_000, None, 1), (0, None, 8), (0, 3, 3)):
            monkeypatch.setattr("agentrl.utils.processor.TINY", tiny)
            engine = EmbeddedEngine(folder, threads=asked, device="cpu")
            await engine.start()
            assert torch.get_num_threads() == threads
            await engine.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("before", "after"), [(700, YOUNG_OBJECTS), (0, 0), (50_000, 50_000)])
def test_only_a_more_frequent_garbage_collection_is_made_rarer(before: int, after: int) -> None:
    own = gc.get_threshold()
    try:
        gc.set_threshold(before, 10, 10)
        raise_gc_threshold()
        assert gc.get_threshold() == (after, 10, 10)
    finally:
        gc.set_threshold(*own)
