"""A tiny Qwen3-architecture model with random weights and the packaged tokenizer, written to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.config.schema import InitModelConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.train.tokenizer import END_OF_TURN, PAD, VOCABULARY, packaged_tokenizer


def init_model(cfg: InitModelConfig, folder: str | Path, seed: int) -> Path:
    """Write config, weights, tokenizer and chat template to `folder`; the same seed gives the same bytes.

    Embeddings are tied; every matrix is drawn from a normal distribution with standard deviation `cfg.init_std`.
    Raises ConfigError if the head counts do not fit, ModelError if `folder` is a file.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    config = architecture(cfg)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target}: expected a folder to write the model to, found a file")
    tokenizer = packaged_tokenizer(cfg.context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def architecture(cfg: InitModelConfig) -> Any:
    """The transformers config of such a model. Raises ConfigError if the head counts do not fit."""
    from transformers import Qwen3Config

    if cfg.heads % cfg.kv_heads:
        raise ConfigError(f"model.init.heads={cfg.heads} is not a multiple of model.init.kv_heads={cfg.kv_heads}")
    tokenizer = packaged_tokenizer(cfg.context)
    end_of_turn = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=cfg.hidden,
        intermediate_size=cfg.mlp,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=cfg.context,
        initializer_range=cfg.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        dtype="float32",
    )
