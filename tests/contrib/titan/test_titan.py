"""torchtitan's models in one process, against plain transformers; its ranks are in the contract suite."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from agentrl.config.schema import ModelConfig
from agentrl.contrib.titan.engine import TitanEngine
from agentrl.data.rows import Ragged
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.model_folder import export_run
from agentrl.trainer.train_state import load_state
from agentrl.trainer.update import Pack
from agentrl.utils.errors import ConfigError, DependencyError, ModelError
from tests import moe
from tests.contrib.moe.test_replay import actor_of, routed, updated
from tests.e2e.inside import config_of, execute, updates
from tests.trainer.engine_contract import row_by_row
from tests.trainer.train_batches import make_batch, toy_optim

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: python .ci/install.py test titan"
)
CPU = torch.device("cpu")
SIZES = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}  # fmt: skip
# As Llama 3.1 has it, with a context that the rows exceed, so that the scaling counts.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
# Layers with experts and without, and rows with fewer tokens for an expert than there are experts.
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
           "mlp_only_layers": [0]}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield


def written(folder: Path, kind: str) -> str:
    torch.manual_seed(0)
    config = {
        "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
        "qwen3, tied, yarn": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, rope_parameters=YARN),
        "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
        "llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    }[kind]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3, tied, yarn", "llama3", "experts"])
def test_packed_rows_are_rows_alone_in_transformers(alone: None, tmp_path: Path, kind: str) -> None:
    """Logprobs and entropies at temperature 0.7 to 1e-5, and the gradients of all weights by their Hugging Face names."""
    path = written(tmp_path / "m", kind)
    engine, plain = TitanEngine(path, ModelConfig(engine="titan"), 1.0, device=CPU), AutoModelForCausalLM.from_pretrained(path)
    published, held = {name: tensor.clone() for name, tensor in engine.tensors()}, plain.state_dict()
    assert held.keys() - published.keys() == engine._left_out
    assert all(torch.equal(tensor, held[name]) for name, tensor in published.items())
    micro = Pack(Ragged.of(make_batch(6)), list(range(6)), CPU).micro
    assert micro.packed.longest > 16  # beyond the context that is scaled
    found, wanted = engine.logprobs(micro, 0.7, True), row_by_row(plain, micro, 0.7)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() < 1e-5
    weights = torch.linspace(-1, 1, len(micro.targets))
    engine.backward((found[0] * weights).sum() + 0.1 * found[1].sum(), last=True)
    ((wanted[0] * weights).sum() + 0.1 * wanted[1].sum()).backward()
    theirs = dict(plain.named_parameters())
    mine = dict(engine.named_weights())
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        gradient = theirs[name].grad
        assert (parameter.grad.full_tensor() - gradient).abs().max() < 1e-5 * max(gradient.abs().max(), 1), name


def test_tokens_go_to_the_experts_that_are_dictated_and_loads_are_counted(alone: None, tmp_path: Path) -> None:
    """Metrics, loads and gradients are FSDP2's; and other ones where the routers choose."""
    path, batch = moe.build("qwen3_moe", tmp_path / "m"), routed()
    both = {name: updated(actor_of(path, 64, engine=name, activation_checkpointing=True), batch) for name in ("fsdp2", "titan")}
    assert both["titan"][0] == pytest.approx(both["fsdp2"][0], rel=1e-5, abs=1e-6)
    assert {"experts_max_violation", "experts_entropy", "experts_unused"} < both["titan"][0].keys()
    _, free = updated(actor_of(path, 64, engine="titan"), batch.exclude("experts"))
    for name, gradient in both["fsdp2"][1].items():
        mine, theirs = both["titan"][1][name], gradient
        assert (mine - theirs).abs().max() < 1e-5 * max(1.0, float(theirs.abs().max())), name
    router = "model.layers.1.mlp.gate.weight"
    assert (free[router] - both["titan"][1][router]).abs().max() > 1e-4


def test_bfloat16_is_fsdp2s(alone: None, tmp_path: Path) -> None:
    """Master weights stay float32; the logprobs differ from float32's by bfloat16's rounding, and from FSDP2's by less."""
    path = written(tmp_path / "m", "qwen3")
    micro = Pack(Ragged.of(make_batch(6)), list(range(6)), CPU).micro
    found = {}
    kinds = {"mine": (TitanEngine, "bfloat16"), "fsdp2": (FsdpEngine, "bfloat16"), "exact": (FsdpEngine, "float32")}
    for name, (kind, dtype) in kinds.items():
        engine = kind(path, ModelConfig(dtype=dtype), 1.0, device=CPU)
        assert {parameter.dtype for _, parameter in engine.named_weights()} == {torch.float32}
        found[name] = engine.logprobs(micro, 1.0, False)[0].detach()
        assert {tensor.dtype for _, tensor in engine.tensors()} == {getattr(torch, dtype)}
    rounding = (found["fsdp2"] - found["exact"]).abs().max()
    assert 1e-3 < rounding < 0.1
    assert (found["mine"] - found["exact"]).abs().max() < 2 * rounding


def test_a_config_with_the_one_engine_trains_as_with_the_other(tmp_path: Path) -> None:
    """Two updates from a config, the second on published weights; FSDP2 goes on from its checkpoint."""
    both = {}
    for name in ("titan", "fsdp2"):
        keys = ("steps=2", "checkpoint.every=2", "eval.tasks=1", "algorithm.kl.coef=0.1", "rollout.temperature=0.8")
        out = execute(config_of(tmp_path, name, f"model.engine={name}", "model.init.layers=2", *keys))
        both[name] = updates(out)
        export_run(out, tmp_path / f"{name}-exported")
    for mine, theirs in zip(both["titan"], both["fsdp2"], strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"phase"}:
            if not key.startswith(("time/", "throughput/", "loop/")):
                want = theirs[key]  # null where there was nothing to measure: then for both
                assert mine[key] == (want if want is None else pytest.approx(want, rel=1e-4, abs=1e-4)), key
        assert mine["grad_norm"] > 0.1 and mine["mismatch_max"] < 1e-5
    assert both["titan"][1]["kl_reference"] > 1e-4
    mine, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-exported").state_dict() for name in both)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "titan" / "model").state_dict()
    assert max((mine[name] - theirs[name]).abs().max() for name in theirs) < 1e-5
    assert max((mine[name] - start[name]).abs().max() for name in theirs) > 1e-3
    resumed = FsdpEngine(str(tmp_path / "titan" / "model"), ModelConfig(), 1.0, device=CPU)
    resumed.use_optimizer(toy_optim())
    load_state(resumed, tmp_path / "titan" / "checkpoints" / "step_000002" / "actor")
    found = {name: (tensor - mine[name]).abs().max().item() for name, tensor in resumed.tensors()}
    assert found == dict.fromkeys(found, 0.0)
    assert {float(value) for name, value in resumed.state().items() if name.endswith(".step")} == {2.0}


@pytest.mark.parametrize(("change", "message"), [
    ({"model_type": "qwen2"}, "has models for qwen3, qwen3_moe, llama, not for qwen2"),
    ({"attention_bias": True}, r"attention_bias = True .* supports \(False,\)"),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = 'dynamic'"),
    ({"use_sliding_window": True}, "use_sliding_window = True"), ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
])  # fmt: skip
def test_what_its_models_lack_is_refused_before_a_run(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "m"
    Qwen3Config(**SIZES).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=message):
        TitanEngine.check(ModelConfig(engine="titan", path=str(path)), 1)


def test_roles_and_packages_that_are_missing(alone: None, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match='no role "value"'):
        TitanEngine(tiny, ModelConfig(engine="titan"), 1.0, "value", CPU)
    pytest.importorskip("agentrl.contrib.split")
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel with model\.expert_parallel"):
        TitanEngine.check(ModelConfig(engine="titan", tensor_parallel=2, expert_parallel=2), 4)
    with pytest.raises(ConfigError, match=r"model\.tensor_parallel = 8 does not divide the model's 4 attention heads"):
        TitanEngine.check(ModelConfig(engine="titan", path=tiny, tensor_parallel=8), 8)
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    with pytest.raises(DependencyError, match=r"pip install 'agentrl\[titan\]'"):
        TitanEngine.check(ModelConfig(engine="titan"), 1)


def test_a_checkpoint_without_a_weight_is_refused(alone: None, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = written(tmp_path / "m", "llama3")
    file = tmp_path / "m" / "model.safetensors"
    held = load_file(file)
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        TitanEngine(path, ModelConfig(engine="titan"), 1.0, device=CPU)
