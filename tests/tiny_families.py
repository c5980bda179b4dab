"""Tiny random models of several families, with the packaged tokenizer, in folders."""

from pathlib import Path
from typing import Any

import torch

from agentrl.trainer.pretrained import VOCABULARY, packaged_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


def build_family(folder: Path, family: str, **changed: Any) -> str:
    """Such a model; its path. Norms are drawn too, because ones hide what is done with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = packaged_tokenizer(512)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {**SIZES, **(EXPERTS if "moe" in family else {}), **ends, **changed}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
