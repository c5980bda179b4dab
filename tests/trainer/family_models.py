"""Tiny models of families with other mixers than attention, with random weights none of which is without effect."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.trainer.pretrained import VOCABULARY, packaged_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True,
}  # fmt: skip
MIXED: dict[str, dict[str, Any]] = {
    "lfm2": {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "mamba2": {"num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "rwkv": {"num_hidden_layers": 2, "attention_hidden_size": 32},
}  # fmt: skip


def config_of(family: str) -> Any:
    """The config of a tiny model of the family."""
    return AutoConfig.for_model(family, **{**SIZES, **MIXED[family]})


def model_of(family: str, attention: str = "eager", seed: int = 0) -> Any:
    """The model; the same seed gives the same weights whatever the attention function."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2:
                tensor.add_(0.3 * torch.randn_like(tensor))
            else:
                tensor.normal_(0.0, 1.3 / math.sqrt(tensor[0].numel() if tensor.dim() != 3 else tensor.shape[-1]))
    return model.train()


def build(family: str, folder: Path, sharpness: float = 1.0) -> str:
    """The model and the packaged tokenizer in a folder; its path. `sharpness` scales the weights."""
    model = model_of(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharpness)
    model.save_pretrained(folder)
    packaged_tokenizer(512).save_pretrained(folder)
    return str(folder)
