"""A tiny model with random weights and the packaged tokenizer, written to a folder: Qwen3, or Qwen2.5-VL for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.config.schema import InitModelConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.train.tokenizer import END_OF_TURN, PAD, VISION_TOKENS, VOCABULARY, packaged_tokenizer
from agentrl.vision import Vision, auto_class


def init_model(cfg: InitModelConfig, folder: str | Path, seed: int, chat_template: str | None = None) -> Path:
    """Write config, weights, tokenizer and chat template (`model.chat_template`) to `folder`; the same seed gives the same bytes.

    Embeddings are tied; every matrix is drawn from a normal distribution with standard deviation `cfg.init_std`.
    Raises ConfigError if the head counts do not fit, ModelError if `folder` is a file.
    """
    import torch

    config = architecture(cfg)
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ModelError(f"{target}: expected a folder to write the model to, found a file")
    tokenizer = packaged_tokenizer(cfg.context, cfg.vision, chat_template)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=torch.float32)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if cfg.vision:
        Vision(str(target), config).save(target)
    return target


def architecture(cfg: InitModelConfig) -> Any:
    """The transformers config of such a model. Raises ConfigError if the head counts do not fit."""
    from transformers import Qwen3Config

    if cfg.heads % cfg.kv_heads:
        raise ConfigError(f"model.init.heads={cfg.heads} is not a multiple of model.init.kv_heads={cfg.kv_heads}")
    if cfg.vision:
        return _with_vision(cfg)
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


def _with_vision(cfg: InitModelConfig) -> Any:
    """A Qwen2.5-VL of that size, whose vision tower is one block, half as wide."""
    from transformers import Qwen2_5_VLConfig

    if cfg.hidden != cfg.heads * cfg.head_dim or cfg.head_dim % 16:
        raise ConfigError(
            f"model.init.vision = true: model.init.hidden = {cfg.hidden} must be heads * head_dim = {cfg.heads * cfg.head_dim}, "
            f"and head_dim = {cfg.head_dim} a multiple of 16; set hidden = 64, heads = 4, head_dim = 16, for example"
        )
    tokenizer = packaged_tokenizer(cfg.context, vision=True)
    begin, image, end, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    width = 3 * cfg.head_dim // 16  # of the frequencies of height and of width; the rest is of time, as in the released models
    text = {
        "vocab_size": VOCABULARY + len(VISION_TOKENS),
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.mlp,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "max_position_embeddings": cfg.context,
        "initializer_range": cfg.init_std,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END_OF_TURN),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [cfg.head_dim // 2 - 2 * width, width, width],
        },
    }
    tower = {
        "depth": 1,
        "hidden_size": max(32, cfg.hidden // 2),
        "intermediate_size": cfg.mlp,
        "num_heads": 2,
        "out_hidden_size": cfg.hidden,
        "fullatt_block_indexes": [0],
        "initializer_range": cfg.init_std,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=begin,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
