"""Configs of transformers' model families, as tested for docs/families.md.

Each is the default config of the family's class, without dropout. If the default lacks a feature of released models, or builds
no model, it gets their values (SPECIMENS, from the config.json of the named models).
"""

from __future__ import annotations

import copy
from typing import Any

from agentrl.trainer.families import dropouts, parts_of

CONV = ["conv", "conv", "full_attention"] * 4
SPECIMENS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},  # V2
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.0156, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoe": {
        "logits_scaling": 6.0,
        "attention_multiplier": 0.0156,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
    },
    "granitemoeshared": {"logits_scaling": 6.0, "attention_multiplier": 0.0156, "shared_intermediate_size": 1024},
    "granitemoehybrid": {
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0078,
        "layer_types": ["mamba", "mamba", "attention"] * 4,
        "num_hidden_layers": 12,
    },  # 4.0
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": 8, "use_qk_norm": True},
    "lfm2": {"layer_types": CONV, "num_hidden_layers": 12},
    "lfm2_moe": {"layer_types": CONV, "num_hidden_layers": 12},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 16},  # Qwen2.5's, with its window on
    "phi3": {"sliding_window": 2047},  # Phi-3-mini
    "starcoder2": {"sliding_window": 4096},
    "bamba": {"attn_layer_indices": [3, 6], "num_hidden_layers": 8},
    "falcon_h1": {"lm_head_multiplier": 0.04, "key_multiplier": 0.4, "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35]},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "plbart": {"d_model": 768},
}
DECODERS = (
    "bert", "bert-generation", "big_bird", "bigbird_pegasus", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Encoders that predict the next token only with this flag in their config."""


def without_dropout(config: Any) -> Any:
    """Return a copy of the config without dropout."""
    found = copy.deepcopy(config)
    for part in parts_of(found):
        for name in dropouts(part):
            if name in vars(part):
                setattr(part, name, 0.0)
    return found


def specimen(family: str) -> Any:
    """Return the family's config. Raises any error of the family's code if it has no default."""
    from transformers import CONFIG_MAPPING

    keys = {**SPECIMENS.get(family, {}), **({"is_decoder": True} if family in DECODERS else {})}
    return without_dropout(CONFIG_MAPPING[family](**keys))
