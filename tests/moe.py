"""Tiny random mixtures of experts, of each family whose checkpoints, routers or engines differ."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, EXPERTS, CHOSEN = 400, 8, 2
_PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts_per_tok": CHOSEN,
}
_WIDE = {"hidden_size": 128, "intermediate_size": 64}  # heads of 32 where the config has no head_dim
_SHARED = {
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": EXPERTS},
    "qwen2_moe": {**_WIDE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": EXPERTS},
    "mixtral": {"head_dim": 32, "intermediate_size": 64, "num_local_experts": EXPERTS},
    "olmoe": {**_WIDE, "num_experts": EXPERTS},
    "granitemoe": {**_WIDE, "num_local_experts": EXPERTS, "attention_multiplier": 0.1, "logits_scaling": 2.0},
    "glm4_moe": {**_SHARED, "head_dim": 32},
    "dots1": {**_SHARED, **_WIDE},
    "deepseek_v2": {**_SHARED, **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_SHARED, **_LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "gpt_oss": {"head_dim": 32, "intermediate_size": 64, "num_local_experts": EXPERTS, "sliding_window": 64},
    "ernie4_5_moe": {
        **_WIDE,
        "moe_intermediate_size": 64,
        "moe_num_experts": EXPERTS,
        "moe_k": CHOSEN,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "phimoe": {**_WIDE, "num_local_experts": EXPERTS},
}


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model in evaluation mode, all its weights random: routers, sinks and biases start at 0, which would hide what they do."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_PLAIN, **FAMILIES[family], **changes})).eval()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if "norm" not in name:
                tensor.normal_(0, 0.2)
    return made


def build(family: str, folder: Path, seed: int = 0, **changes: Any) -> str:
    """The folder of such a model; its path."""
    model(family, seed, **changes).save_pretrained(folder)
    return str(folder)


def shaken(state: dict[str, Tensor], seed: int, scale: float = 0.1) -> dict[str, Tensor]:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + scale * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}


@contextmanager
def dictate(routers: Any, experts: Tensor | None) -> Iterator[None]:
    """In passes inside, tokens go to these experts."""
    if experts is not None:
        routers.check(experts)
    routers.asked, own = lambda: experts, routers.asked
    try:
        yield
    finally:
        routers.asked = own
