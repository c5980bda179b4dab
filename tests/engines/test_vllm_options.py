"""What vLLM is started with, on a GPU and on a CPU, and what of it is refused before anything is started.

No GPU is needed: these are arguments and sums. The model is Qwen3-8B's shape: 2 x 36 layers x 8 KV heads x 128 = 73,728 cached
numbers a token, 147,456 bytes in bfloat16.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.config.load import config_from
from agentrl.config.schema import ModelConfig
from agentrl.engines.vllm import options as engine_args
from agentrl.engines.vllm.options import environment, leave_out_tied_head
from agentrl.engines.vllm.replica_actor import StartStage, drop_missing_prefix_cache
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.run import engine_choice as engines
from agentrl.run.assembly import RunStart
from agentrl.run.checks.size_checks import check_cache
from agentrl.trainer.train_engine import compute_dtype
from agentrl.utils.errors import ConfigError

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")


@pytest.fixture
def qwen3_8b(tmp_path: Path) -> str:
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "vocab_size": 151936}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **shape}))
    return str(tmp_path)


def maker(path: str, *overrides: str) -> Any:
    config = config_from({"env": {"id": "key_value"}, "model": {"path": path}}, list(overrides))
    return engines.EngineChoice(config, "vllm").maker()


def options_of(path: str, *overrides: str) -> dict[str, Any]:
    engine = maker(path, *overrides).make(path, 40960)
    assert isinstance(engine, VllmEngine)
    return engine._replicas._options


@pytest.fixture(params=[True, False], ids=["gpu", "cpu"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: request.param)
    return bool(request.param)


def test_defaults_are_the_devices(cuda: bool, qwen3_8b: str) -> None:
    found = options_of(qwen3_8b)
    names = ("dtype", "enforce_eager", "kv_cache_memory_bytes", "block_size", "enable_chunked_prefill", "max_num_batched_tokens")
    # On a CPU in float32 a sequence of 16,384 (and a block) takes 4,617 MiB: more than the 4,096 that 64 of them may have.
    on_cpu = ("float32", True, 4617 << 20, 32, False, 16384)
    assert tuple(found.get(name) for name in names) == (("bfloat16", False, *[None] * 4) if cuda else on_cpu)
    assert {"gpu_memory_utilization", "max_num_seqs"}.isdisjoint(found)  # vLLM's own
    assert maker(qwen3_8b).processes().mib == 2 * 700 + (0 if cuda else 4617)
    threads = {"OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    assert set(environment(cuda)) & threads == (set() if cuda else threads)
    assert environment(cuda, 3).get("OMP_NUM_THREADS") == (None if cuda else "3")


@installed
def test_the_table_of_memory_counts_the_cache_where_it_is(cuda: bool, qwen3_8b: str) -> None:
    """Of 80 GiB at 0.92: what 16 GB of weights leave, or the config says; without a card a CPU's share."""
    from vllm.config import CacheConfig

    card, weights = (80 << 30, 16_000_000_000) if cuda else (None, 32_000_000_000)
    assert CacheConfig.gpu_memory_utilization == 0.92
    for keys, on_gpu, on_cpu in (
        ([], 79_027_398_246 - 16_000_000_000, 4617 << 20),
        (["vllm.args={gpu_memory_utilization=0.5}"], 42_949_672_960 - 16_000_000_000, 4617 << 20),
        (["vllm.kv_cache_mib=5000"], 5000 << 20, 5000 << 20),
    ):
        found = maker(qwen3_8b, *keys).memory(weights, 147_456, card)
        assert (found.weights, found.cache) == (weights, on_gpu if cuda else on_cpu), keys


@installed
@pytest.mark.parametrize(("keys", "gib", "fits"), [
    ([], 20, True),  # 18.4 GiB less 15.3 GiB of weights leave 3.1, and a sequence of 16,384 takes 2.25
    ([], 18, False), (["vllm.max_model_len=8192"], 18, True), (["vllm.tensor_parallel=2"], 18, True),
    (["vllm.args={gpu_memory_utilization=0.5}"], 24, False),
])  # fmt: skip
def test_a_gpu_too_small_for_one_sequence_beside_the_weights_is_refused(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: str, keys: list[str], gib: int, fits: bool
) -> None:
    """In the check before a run, and in the table of memory alike."""
    monkeypatch.setattr("agentrl.run.checks.size_checks.has_gpus", lambda cluster, role: True)
    monkeypatch.setattr("agentrl.run.checks.size_checks.card_bytes", lambda cluster: gib << 30)
    config = config_from({"env": {"id": "key_value"}, "model": {"path": qwen3_8b}}, ["engine=vllm", *keys])
    if fits:
        check_cache(RunStart(config))
        return
    said = rf"gpu_memory_utilization = 0.\d+ of a GPU of {gib}.0 GiB leaves, after 15.3 GiB .* 16,384 tokens takes 2.2 GiB"
    with pytest.raises(ConfigError, match=said):
        check_cache(RunStart(config))


def test_what_is_given_is_given_on_either_device(cuda: bool, qwen3_8b: str) -> None:
    found = options_of(
        qwen3_8b, "model.dtype=float32", "vllm.kv_cache_mib=5000",
        "vllm.args={enforce_eager=false,max_num_seqs=7,max_num_batched_tokens=20000,gpu_memory_utilization=0.5,block_size=16}",
    )  # fmt: skip
    expected = {"dtype": "float32", "enforce_eager": False, "kv_cache_memory_bytes": 5000 << 20, "max_num_seqs": 7,
                "max_num_batched_tokens": 20000, "gpu_memory_utilization": 0.5, "block_size": 16}  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert maker(qwen3_8b, "vllm.kv_cache_mib=5000").processes().mib == 2 * 700 + (0 if cuda else 5000)
    assert maker(qwen3_8b, "vllm.kv_cache_mib=5000", "vllm.tensor_parallel=2").processes().mib == 3 * 700 + (0 if cuda else 10000)


def test_a_cpu_gets_what_its_sequences_take(qwen3_8b: str) -> None:
    """1,024 tokens and a block of 32 are 297 MiB in float32: eight of them, or as many as fit in 4,096."""
    one = -(-(1024 + 32) * 2 * 147_456 // 2**20)
    assert one == 297
    for many, mib in ((8, 8 * one), (64, 4096), (None, 4096)):
        given = [] if many is None else [f"vllm.args.max_num_seqs={many}"]
        found = options_of(qwen3_8b, "vllm.max_model_len=1024", *given)
        assert found["kv_cache_memory_bytes"] == mib << 20, many


SMALL = r"vllm.kv_cache_mib = \d+ holds {} tokens.* may have 16,384 .*at least {},"


@pytest.mark.parametrize(("keys", "said"), [
    (["vllm.kv_cache_mib=256"], SMALL.format("1,820", "2,304")),
    (["vllm.kv_cache_mib=2303"], SMALL.format("16,376", "2,304")), (["vllm.kv_cache_mib=2304"], None),
    (["vllm.kv_cache_mib=1152", "vllm.tensor_parallel=2"], None),  # a rank has half of the KV heads
    (["vllm.kv_cache_mib=2304", "model.dtype=float32"], SMALL.format("8,192", "4,608")),
    (["vllm.kv_cache_mib=1152", "vllm.args={kv_cache_dtype='fp8'}"], None),
    (["vllm.kv_cache_mib=256", "vllm.max_model_len=1820"], None), (["vllm.tensor_parallel=8"], None),
    (["vllm.tensor_parallel=3"], "vllm.tensor_parallel = 3 does not divide the model's 32 attention heads"),
])  # fmt: skip
def test_caches_ranks_and_replicas_that_cannot_be_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: str, keys: list[str], said: str | None
) -> None:
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: True)
    monkeypatch.setattr("agentrl.engines.vllm.vllm_maker.check_args", lambda args, cuda: None)
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        maker(qwen3_8b, *keys).check()


def test_a_model_with_sliding_windows_needs_no_more_than_its_full_layers(monkeypatch: pytest.MonkeyPatch, qwen3_8b: str) -> None:
    """6 of 36 layers: 24,576 bytes a token, 384 MiB for 16,384 tokens."""
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: True)
    file = Path(qwen3_8b) / "config.json"
    kinds = ["full_attention" if at % 6 == 5 else "sliding_attention" for at in range(36)]
    file.write_text(json.dumps({**json.loads(file.read_text()), "layer_types": kinds}))
    maker(qwen3_8b, "vllm.kv_cache_mib=384").check()
    with pytest.raises(ConfigError, match="holds 16,341 tokens"):
        maker(qwen3_8b, "vllm.kv_cache_mib=383").check()


@pytest.mark.parametrize(("word", "why"), [
    ("vllm.args.max_num_batched_tokens=16383", r"vllm.args.max_num_batched_tokens = 16383.* vllm.max_model_len = 16384"),
    ("rollout.colocate=true", r"rollout.colocate: vLLM frees the memory of GPUs only.* use engine = embedded"),
])  # fmt: skip
def test_steps_smaller_than_a_prompt_and_sleep_are_refused_on_a_cpu_only(cuda: bool, qwen3_8b: str, word: str, why: str) -> None:
    with nullcontext() if cuda else pytest.raises(ConfigError, match=why):
        maker(qwen3_8b, word).check()
    maker(qwen3_8b, "vllm.args.max_num_batched_tokens=16383", "vllm.max_model_len=16383").check()
    assert options_of(qwen3_8b, *(["rollout.colocate=true"] if cuda else [])).get("enable_sleep_mode", False) is cuda


@installed
@pytest.mark.parametrize(("args", "said"), [
    (
        "{gpu_memory_utilisation=0.5}",
        r"vllm.args.gpu_memory_utilisation: vLLM [\d.]+\S* has no .*mean 'gpu_memory_utilization'\?",
    ),
    ("{gpu_memory_utilization='half'}", r"vllm.args.gpu_memory_utilization = 'half': vLLM expects float: .*valid number"),
    ("{num_gpu_blocks_override=1.5}", "vLLM expects int | None: .*valid integer"),
    ("{scheduling_policy='lifo'}", r"vLLM expects Literal\['fcfs', 'priority'\]: .*'fcfs' or 'priority'"),
    ("{enable_expert_parallel=1}", "vLLM expects bool: .*valid boolean"),
    ("{tensor_parallel_size=2}", "vllm.args.tensor_parallel_size: set vllm.tensor_parallel instead"),
    ("{dtype='bfloat16'}", "set model.dtype instead"),
    ("{logits_processors=[]}", "vllm.args.logits_processors cannot be set: they make the log probabilities exact"),
    ("{enable_chunked_prefill=true}", "CPU build crashes"),
])  # fmt: skip
def test_an_argument_that_vllm_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: str, args: str, said: str
) -> None:
    monkeypatch.setattr("agentrl.run.engine_choice.has_gpus", lambda cluster, role: False)
    with pytest.raises(ConfigError, match=said):
        maker(qwen3_8b, f"vllm.args={args}").check()


@installed
def test_every_argument_of_the_installed_vllm_can_be_reached(qwen3_8b: str) -> None:
    """Its own default is taken for each that is not refused by name, and the names that are refused are its."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {entry.name: entry for entry in dataclasses.fields(AsyncEngineArgs)}
    own = engine_args.SET_BY_KEY.keys() | engine_args.FIXED.keys()
    assert own <= fields.keys() and set(options_of(qwen3_8b)) <= fields.keys()
    free = {
        name: entry.default
        for name, entry in fields.items()
        if name not in own and type(entry.default) in (bool, int, float, str)
    }
    engine_args.check_args(free, cuda=True)
    assert len(free) > 60
    for fraction in (0.0, 1.5):
        with pytest.raises(ConfigError, match=r"gpu_memory_utilization = .*above 0 and at most 1"):
            engine_args.check_args({"gpu_memory_utilization": fraction}, cuda=True)
    engine_args.check_args({"compilation_config": {"level": 3}, "speculative_config": {"method": "ngram"}}, cuda=True)


def test_the_trainer_computes_in_bfloat16_on_a_gpu_unless_told(qwen3_8b: str) -> None:
    found = [
        compute_dtype(ModelConfig(path=qwen3_8b, dtype=dtype), torch.device(device))  # type: ignore[arg-type]
        for dtype in ("auto", "float32", "bfloat16")
        for device in ("cuda", "cpu")
    ]
    assert found == [torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]


def family(folder: Path, kind: str, **keys: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **keys}))
    return str(folder)


def test_a_window_that_vllm_widens_by_one_key_is_given_one_less(tmp_path: Path) -> None:
    """Without it a run of tiny Cohere 2 is off by 1.2, with it by 4e-6 (docs/families.md)."""
    cohere = family(tmp_path / "cohere", "cohere2", sliding_window=32)
    assert options_of(cohere)["hf_overrides"] == {"sliding_window": 31}
    given = options_of(cohere, "vllm.args.hf_overrides={sliding_window=40, vocab_size=7}")
    assert given["hf_overrides"] == {"sliding_window": 40, "vocab_size": 7}
    assert "hf_overrides" not in options_of(family(tmp_path / "mistral", "mistral", sliding_window=32))


@pytest.mark.parametrize(
    ("kind", "on_gpu"), [("gpt_oss", True), ("deepseek_v3", False), ("ernie4_5_moe", False), ("llama", None)]
)
def test_families_that_vllm_computes_otherwise_are_refused_by_name(
    cuda: bool, kind: str, on_gpu: bool | None, tmp_path: Path
) -> None:
    """On a CPU, and those that it gets wrong anywhere on a GPU too."""
    said = rf"the family {kind} would not be sampled right: .*; use engine = embedded"
    fine = on_gpu is None or (cuda and not on_gpu)
    with nullcontext() if fine else pytest.raises(ConfigError, match=said):
        maker(family(tmp_path / kind, kind)).check()


@pytest.mark.parametrize(("states", "chunked", "cached"), [(True, False, False), (True, None, True), (False, False, True)])
def test_states_are_cached_only_with_chunked_prefill(states: bool, chunked: bool | None, cached: bool) -> None:
    """vLLM starts no recurrent model that is to cache prefixes without it."""
    model = SimpleNamespace(has_inner_state=states)
    args = SimpleNamespace(enable_prefix_caching=True, enable_chunked_prefill=chunked, create_model_config=lambda: model)
    assert drop_missing_prefix_cache(args).enable_prefix_caching is cached


@pytest.mark.parametrize(
    ("tied", "head", "loaded"),
    [(True, False, ["a"]), (True, True, ["a", "lm_head.weight"]), (False, False, ["a", "lm_head.weight"])],
)
def test_a_tied_head_is_loaded_by_models_that_have_one(tied: bool, head: bool, loaded: list[str]) -> None:
    """vLLM's Gemma 2 has none, and a publish failed: "There is no module or parameter named 'lm_head'"."""

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> list[str]:
            return [name for name, _ in weights]

    model = Model()
    if head:
        model.lm_head = torch.nn.Linear(1, 1)
    for _ in range(2):  # once for each publish
        leave_out_tied_head(model, tied)
    assert model.load_weights([("a", 0), ("lm_head.weight", 0)]) == loaded


def test_the_stage_of_a_start_is_read_from_the_files_that_children_map(tmp_path: Path) -> None:
    stage, weights = StartStage(), tmp_path / "model.safetensors"
    assert stage.now() == "import of vLLM"
    stage.imported = True
    assert stage.now() == "vLLM's engine process, which imports it again"
    weights.write_bytes(bytes(8192))
    code = f"import mmap; file = open({str(weights)!r}, 'r+b'); held = mmap.mmap(file.fileno(), 0); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert stage.now() == "weights"
    child.communicate(b"\n")
    assert stage.now() == "KV cache and a first step"
