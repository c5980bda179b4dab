"""Tiny random models of families whose attention or head differs from Llama's, and what their own eager forward says of a row."""

from itertools import pairwise
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.trainer.attention import packed_rows
from agentrl.trainer.language_model import Micro

VOCAB = 64
_PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
_WINDOW = {"sliding_window": 7, "layer_types": SLIDING}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model type, and what is not as in _PLAIN
    "gemma2": (
        "gemma2",
        {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8, **_WINDOW},
    ),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8, **_WINDOW}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW}),
    "granite": ("granite", {"logits_scaling": 0.4, "attention_multiplier": 0.2, "embedding_multiplier": 3.0}),
    "cohere2": ("cohere2", {"logit_scale": 2.5, **_WINDOW}),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **_LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 6}),
    "llama4": (
        "llama4_text",
        {
            "attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48,
            "num_local_experts": 2, "no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.8,
        },
    ),
    "gemma4": (  # layers with heads of different widths and numbers, of which the last ones use earlier ones' keys
        "gemma4_text",
        {
            "num_hidden_layers": 4, "layer_types": [*SLIDING, *SLIDING], "sliding_window": 7, "global_head_dim": 16,
            "num_global_key_value_heads": 1, "num_kv_shared_layers": 2, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 2.0,
        },
    ),
    "stablelm": ("stablelm", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("phi", {}),
    "minicpm3": ("minicpm3", {**_LATENT, "dim_model_base": 80}),
}  # fmt: skip


def tiny_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model of that family in evaluation mode, with all parameters random: 0 and 1 would hide their use."""
    kind, settings = FAMILIES[family]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_PLAIN, **settings, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = 1.0 if parameter.dim() == 1 else (0.5 if "lm_head" in name else 2.0) / parameter.shape[-1] ** 0.5
            noise = wide * torch.randn(parameter.shape)
            parameter.copy_(parameter + noise if "norm" in name else noise)
    return model


def row_logprobs(model: Any, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p of each token of a row but its first, by the model's own attention and logits for that row alone: float32 [n - 1]."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[1:, None]).squeeze(1)


def micro_of(rows: list[torch.Tensor], prefix: int) -> Micro:
    """The rows one after the other, or, if they share a prefix, the prefix once and what follows it in each."""
    parts = [rows[0][:prefix], *(row[prefix:] for row in rows)]
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
    spans = [[0, 0, 0, prefix], *([0, prefix, a, b] for a, b in pairwise(ends[1:]))]
    packed = packed_rows(torch.tensor(spans if prefix else ends[1:]))
    at = [torch.arange(prefix), *(torch.arange(prefix, len(row)) for row in rows)]
    places = [torch.cat([torch.arange(prefix), torch.arange(a, b)]) for a, b in pairwise(ends[1:])]
    before, last = torch.cat([place[:-1] for place in places]), torch.stack([place[-1] for place in places])
    return Micro(torch.cat(parts), torch.cat(at), packed, before, torch.cat([row[1:] for row in rows]), last)
