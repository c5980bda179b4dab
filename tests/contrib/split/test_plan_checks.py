"""Tensor and expert parallelism that a model, or the rest of the config, does not allow is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import TrainConfig
from agentrl.config.load import config_from
from agentrl.trainer.train_engine import check_train_engine, mesh_of
from agentrl.utils.errors import ConfigError

DENSE = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
EXPERTS = {"moe_intermediate_size": 6, "num_experts": 6, "num_experts_per_tok": 2}


def run_of(folder: Path, family: str, sizes: dict[str, Any], *overrides: str) -> TrainConfig:
    (folder / "config.json").write_text(json.dumps({"model_type": family, "head_dim": 8, "vocab_size": 60, **sizes}))
    sections = {"env": {"id": "key_value"}, "cluster": {"actors": 12}, "model": {"path": str(folder)}}
    return config_from(sections, list(overrides))


@pytest.mark.parametrize(("family", "sizes", "overrides", "message"), [
    ("qwen3", DENSE, ["tensor_parallel=5"], "tensor_parallel = 5 does not divide cluster.actors = 12"),
    ("qwen3", DENSE, ["tensor_parallel=4"], "tensor_parallel = 4 does not divide the model's 6 attention heads"),
    ("qwen3", DENSE, ["tensor_parallel=2"], "tensor_parallel = 2 does not divide the model's 3 key heads"),
    ("qwen3", {**DENSE, "intermediate_size": 97}, ["tensor_parallel=3"], r"mlp.gate_proj.weight of shape \(97, 48\)"),
    ("qwen3", DENSE, ["tensor_parallel=3", "sequence_parallel=8"], "parallel = 8 does not divide cluster.actors = 12"),
    ("qwen3", DENSE, ["tensor_parallel=3", "sequence_parallel=6"], "sequence_parallel x model.tensor_parallel = 18 does not"),
    ("qwen3", DENSE, ["tensor_parallel=3", "replicas=12"], "replicas x model.tensor_parallel = 36 does not"),
    ("qwen3", DENSE, ["tensor_parallel=3", "compile=true"], "compile = true does not work with model.tensor_parallel"),
    ("qwen3", DENSE, ["tensor_parallel=3", "offload=always"], 'offload = "always" does not work'),
    ("qwen3", DENSE, ["expert_parallel=2"], "no expert-parallel plan for the family 'qwen3'"),
    ("gpt2", {"n_embd": 48, "n_head": 6}, ["tensor_parallel=3"], "no tensor-parallel plan for the family 'gpt2'"),
    ("deepseek_v3", {}, ["tensor_parallel=2", "expert_parallel=2"], "'deepseek_v3': no test has shown .* families: arcee"),
    ("qwen3_moe", {**DENSE, **EXPERTS}, ["tensor_parallel=3"], "give each rank whole experts: set model.expert_parallel"),
    ("qwen3_moe", {**DENSE, **EXPERTS}, ["expert_parallel=4"], "expert_parallel = 4 does not divide the model's 6 experts"),
    ("qwen3_moe", {**DENSE, **EXPERTS, "moe_intermediate_size": 7, "hidden_size": 49}, ["expert_parallel=3"], "over 4 ranks"),
    ("qwen3_moe", {**DENSE, **EXPERTS}, ["expert_parallel=3", "replicas=2"], "replicas does not work with model.expert"),
])  # fmt: skip
def test_what_cannot_be_split_is_refused(
    tmp_path: Path, family: str, sizes: dict[str, Any], overrides: list[str], message: str
) -> None:
    config = run_of(tmp_path, family, sizes, *(f"model.{key}" for key in overrides))
    with pytest.raises(ConfigError, match=message):
        mesh_of(config.model, config.cluster)
        check_train_engine(config)


def test_a_critic_of_another_model_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    run_of(tmp_path / "other", "qwen3", {**DENSE, "num_key_value_heads": 6, "num_attention_heads": 12})
    config = run_of(tmp_path, "qwen3", DENSE, "model.tensor_parallel=3", f"critic.path={tmp_path / 'other'}")
    check_train_engine(config)
    run_of(tmp_path / "other", "qwen3", {**DENSE, "num_key_value_heads": 2})
    with pytest.raises(ConfigError, match="model's 2 key heads"):
        check_train_engine(config)


def test_ranks_that_split_a_matrix_get_the_same_rows(tmp_path: Path) -> None:
    keys = ["model.tensor_parallel=3", "model.sequence_parallel=2"]
    config = run_of(tmp_path, "qwen3", DENSE, *keys)
    check_train_engine(config)
    assert mesh_of(config.model, config.cluster) == {"dp": 2, "sp": 2, "tp": 3}
    fine = run_of(tmp_path, "qwen3_moe", {**DENSE, **EXPERTS}, "model.expert_parallel=6", "model.tensor_parallel=3")
    check_train_engine(fine)
    assert mesh_of(fine.model, fine.cluster) == {"dp": 4, "sp": 1, "tp": 3}
