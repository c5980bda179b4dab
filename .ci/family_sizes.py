"""Build tiny models with random weights of commonly trained families.

vLLM's CPU build has kernels for their sizes (head dimension 32). The special features of a family are on: windows shorter than
a prompt, sinks, soft caps, scales of logits and attention, latent attention, groups of experts, recurrent layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from specimens import without_dropout
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.contrib.families import perturb
from agentrl.trainer.pretrained import VOCABULARY, packaged_tokenizer

WINDOW = 32
"""Window of sliding attention in tokens; prompts are longer."""
TOP = 6.0
"""Approximate distance of the largest logit to the mean, for distributions neither flat nor one-hot."""
PLAIN: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
HEAD = {"head_dim": 32}
CAPPED = {**HEAD, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
SCALED = {"logits_scaling": 2.0, "attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4}
SPARSE = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
GROUPS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DELTA = {
    **HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": HEAD,
    "llama": {},
    "mistral": {**HEAD, "sliding_window": WINDOW},
    "gemma": HEAD,
    "gemma2": {**CAPPED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3_text": {**CAPPED, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": WINDOW},
    "granite": SCALED,
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {**HEAD, "partial_rotary_factor": 0.5},
    "glm4": {**HEAD, "partial_rotary_factor": 0.5},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ernie4_5": HEAD,
    "seed_oss": HEAD,
    "hunyuan_v1_dense": HEAD,
    "stablelm": {"use_qkv_bias": True},
    "nemotron": HEAD,
    "exaone4": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "qwen3_moe": {**HEAD, **SPARSE},
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 64},
    "glm4_moe": {**GROUPS, **HEAD},
    "gpt_oss": {**HEAD, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "deepseek_v3": {**GROUPS, **LATENT, "q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v2": {**GROUPS, **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {**SCALED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "dots1": GROUPS,
    "ernie4_5_moe": {
        "moe_intermediate_size": 64,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "llama4_text": {
        **HEAD,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 64,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_dim": 128,
        "conv_dim": 128,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **SPARSE},
    "qwen3_next": {**DELTA, **SPARSE, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SPARSE, "shared_expert_intermediate_size": 64},
    "mamba": {"state_size": 16, "time_step_rank": 8, "expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 32, "expand": 2},
    "falcon_h1": {**HEAD, **STATES, "mamba_d_ssm": 256, "lm_head_multiplier": 0.4},
    "bamba": {**STATES, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **SCALED,
        **STATES,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 32},
    "rwkv": {"attention_hidden_size": 128},
}


def config_of(family: str) -> Any:
    """Return the config of the family's tiny model, with the token ids of the packaged tokenizer."""
    tokenizer = packaged_tokenizer(1024)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return without_dropout(AutoConfig.for_model(family, **{**PLAIN, **ends, **MODELS[family]}))


def build(family: str, folder: Path) -> str:
    """Write the model and the packaged tokenizer to a folder; return its path. Every parameter has an effect (`perturb`)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
        perturb(model)
        with torch.no_grad():
            ids = torch.randint(3, VOCABULARY, (1, 80))
            for _ in range(4):  # the input changes too if the embeddings are tied
                logits = model.eval()(ids, use_cache=False).logits
                model.get_output_embeddings().weight.mul_(TOP / (logits.amax(-1) - logits.mean(-1)).mean())
    model.save_pretrained(folder)
    packaged_tokenizer(1024).save_pretrained(folder)
    return str(folder)
