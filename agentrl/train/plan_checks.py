"""What a model's plans must have for tensor and expert parallelism, checked on its architecture before anything is started."""

from __future__ import annotations

from typing import Any

from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError
from agentrl.train.plans import EXPERTS, SUMMED, Plan, dimension_of, expert_dimension, modules_of, plans_of, transformers_split

STYLES = {
    "colwise",
    "rowwise",
    SUMMED,
    "embedding_rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
}
"""Styles of tensor-parallel plans that are tested here."""
EXPERT_FAMILIES = {
    "cohere2_moe", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "hy_v3", "laguna", "mellum", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
}  # fmt: skip
"""Families whose experts may be spread over ranks: the same test compares them."""
FAMILIES = EXPERT_FAMILIES | {
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_neox", "granite",
    "helium", "hyperclovax", "jais2", "llama", "ministral", "ministral3", "mistral", "nanochat", "olmo", "olmo2", "olmo3",
    "phi", "phi3", "qwen2", "qwen3", "smollm3", "starcoder2", "vaultgemma",
}  # fmt: skip
"""Families whose tensor-parallel logprobs and gradients a test compares with those of one rank. A plan is no promise: that of
apertus leaves the gradients of its activations' parameters to each rank's part."""
EXPERT_STYLES = {"grouped_gemm", "ep_dispatch_experts"}
"""Those of expert-parallel plans: experts stay whole, and tokens travel to the ranks that have theirs."""


def check_plans(cfg: ModelConfig, model: Any, ranks: int) -> None:
    """Raise ConfigError if the model cannot be split as the config says, DependencyError if transformers is too old. `model`: on
    the meta device."""
    transformers_split()
    tensor, experts = plans_of(model, cfg.tensor_parallel > 1, cfg.expert_parallel > 1)
    if cfg.tensor_parallel > 1:
        _check_tensor(cfg, model, tensor)
    if cfg.expert_parallel > 1:
        _check_experts(cfg, model, experts, ranks)


def _check_tensor(cfg: ModelConfig, model: Any, plan: Plan) -> None:
    key, size = f"model.tensor_parallel = {cfg.tensor_parallel}", cfg.tensor_parallel
    text = model.config.get_text_config()
    family = text.model_type
    if not any("layers" in name for name in plan):
        raise ConfigError(f"{key}: transformers has no tensor-parallel plan for the family {family!r}; set it to 1")
    others = set(plan.values()) - STYLES
    if others and "moe_tp_experts" in others:
        raise ConfigError(
            f"{key}: the experts of the family {family!r} keep two matrices in one, whose parts a checkpoint cannot hold if "
            "their rows are split; give each rank whole experts: set model.expert_parallel to 2 or more"
        )
    if others or family not in FAMILIES:
        what = f"its plan has {', '.join(sorted(others))}" if others else "no test has shown it to be right"
        raise ConfigError(f"{key} is not supported for the family {family!r}: {what}; families: {', '.join(sorted(FAMILIES))}")
    heads = {"attention heads": text.num_attention_heads}
    heads["key heads"] = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    for what, count in heads.items():
        if count % size:
            raise ConfigError(f"{key} does not divide the model's {count} {what}, which are split over the ranks")
    for name, parameter in model.named_parameters():
        dimension = dimension_of(plan, name, parameter, model)
        if dimension is not None and parameter.shape[dimension] % size:
            raise ConfigError(f"{key} does not divide {name} of shape {tuple(parameter.shape)} along dimension {dimension}")


def _check_experts(cfg: ModelConfig, model: Any, plan: Plan, ranks: int) -> None:
    key, size = f"model.expert_parallel = {cfg.expert_parallel}", cfg.expert_parallel
    family = model.config.get_text_config().model_type
    if not plan:
        raise ConfigError(f"{key}: transformers has no expert-parallel plan for the family {family!r}; set it to 1")
    others = set(plan.values()) - EXPERT_STYLES
    if others or family not in EXPERT_FAMILIES:
        what = f"its plan has {', '.join(sorted(others))}" if others else "no test has shown it to be right"
        listed = ", ".join(sorted(EXPERT_FAMILIES))
        raise ConfigError(f"{key} is not supported for the family {family!r}: {what}; families: {listed}")
    for module in modules_of(model, [name for name, style in plan.items() if style == EXPERTS]):
        for name, parameter in module.named_parameters(recurse=False):
            if len(parameter) % size:
                raise ConfigError(f"{key} does not divide the model's {len(parameter)} experts")
            if expert_dimension(parameter.shape, size, ranks // size) is None:
                raise ConfigError(f"{key}: {name} of shape {tuple(parameter.shape)} cannot be sharded over {ranks // size} ranks")
