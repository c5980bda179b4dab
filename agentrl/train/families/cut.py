"""A model's config cut down until the model is built in a fraction of a second, with every kind of its layers.

What a number of the config *is* stays (the size of a head, the groups of keys, a rotary part); how often it is repeated does
not: heads, layers, experts, rows of the vocabulary. Windows become shorter than the probe's rows, so that they hide something.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

VOCABULARY = 96
POSITIONS = 256
WIDTH = 32
"""Of what is inside a layer and nothing else depends on: MLPs, low-rank projections."""
WINDOW = 8
EXPERTS = 8
HEADS = 4
LEAST = 64
"""Hidden numbers of a model without heads."""
KEPT = 2
"""Layers that are kept at least: what leaks in one layer is mixed by the next."""

_HIDDEN = ("hidden_size", "dim_model", "embedding_dim", "lru_width", "attention_hidden_size", "word_embed_proj_dim")
_HEADS = (
    "num_attention_heads",
    "swa_num_attention_heads",
    "linear_num_heads",
    "num_decoder_attention_heads",
    "num_attention_heads_per_layer",
)
_KEY_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups")
_INNER = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "dense_intermediate_size", "prefix_dense_intermediate_size", "expert_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "ffn_hidden_size", "ffn_dim", "dff", "dim_ff", "d_inner", "n_inner", "decoder_ffn_dim",
    "encoder_ffn_dim", "feed_forward_size", "router_hidden_size", "q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input",
    "laurel_rank", "adapter_rank", "o_lora_rank",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "sliding_window_size",
    "local_attention",
    "attention_chunk_size",
    "floor_scale",
    "window_size",
)
_CHUNKS = ("chunk_size", "mamba_chunk_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "context_length")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size")
_DROPPED = ("dropout", "pdrop", "layerdrop", "jitter", "drop_prob")
_UNUSED = ("classifier", "summary", "hidden_dropout_prob_", "droppath")


def cut(config: Any) -> Any:
    """A copy of a model's config with few and small layers of every kind."""
    found = copy.deepcopy(config)
    for part in parts_of(found):
        _shrink(part)
    return found


def parts_of(config: Any) -> Iterator[Any]:
    """The config, and the configs in it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from parts_of(value)


def dropouts(config: Any) -> dict[str, float]:
    """The keys of a config by which activations are dropped, or routers shaken, at random in training."""
    found = {}
    for part in parts_of(config):
        for name, value in vars(part).items():
            used = any(word in name for word in _DROPPED) and not any(word in name for word in _UNUSED)
            if used and isinstance(value, float) and value > 0:
                found[name] = value
    return found


def without_dropout(config: Any) -> Any:
    """A copy in which nothing is dropped at random."""
    found = copy.deepcopy(config)
    for part in parts_of(found):
        for name in dropouts(part):
            if name in vars(part):
                setattr(part, name, 0.0)
    return found


def _shrink(part: Any) -> None:
    _fix(part, _VOCABULARIES, VOCABULARY)
    _fix(part, _POSITIONS, POSITIONS)
    _set(part, _WINDOWS, lambda old: min(old, WINDOW))
    _set(part, _CHUNKS, lambda old: min(old, WINDOW))
    _set(part, ("index_topk",), lambda old: min(old, WINDOW))
    for name, value in list(vars(part).items()):
        if name.endswith("token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(part, name, 1)
        if name.endswith("token_id") and isinstance(value, list):
            setattr(part, name, 1)
    _shrink_experts(part)
    _shrink_heads(part)
    _set(part, _INNER, lambda old: min(old, WIDTH))


def _shrink_experts(part: Any) -> None:
    chosen = next((getattr(part, name) for name in _CHOSEN if isinstance(getattr(part, name, None), int)), 1)
    groups = getattr(part, "n_group", None) or getattr(part, "num_expert_group", None) or 1
    if groups > 1:
        _fix(part, ("n_group", "num_expert_group"), 2)
        _fix(part, ("topk_group",), 1)
    _set(part, _CHOSEN, lambda old: min(old, 2))
    _set(part, _EXPERTS, lambda old: min(old, EXPERTS if chosen > 1 else EXPERTS // 2))


def _shrink_heads(part: Any) -> None:
    heads, hidden = _number(part, "num_attention_heads"), _number(part, "hidden_size")
    # Whichever of the two a head's size follows from stays in proportion.
    scale = 1 if not heads or heads <= HEADS else heads // next(n for n in range(HEADS, heads + 1) if heads % n == 0)
    if not heads and hidden and hidden > LEAST and hidden % LEAST == 0:
        scale = hidden // LEAST
    if hidden and scale > 1 and hidden % scale:
        if not _number(part, "head_dim"):
            return
        _fix(part, _HIDDEN[:1], HEADS * LEAST)  # it follows from nothing
    if scale == 1:
        return
    keys = {name: _number(part, name) for name in _KEY_HEADS}
    _set(part, _HEADS, lambda old: old // scale if old % scale == 0 else old)
    _set(part, _HIDDEN, lambda old: old // scale if old % scale == 0 else old)
    now = (heads or 0) // scale
    for name, old in keys.items():
        if old and heads:
            _fix(part, (name,), now if old == heads else 1 if old == 1 else max(now // 2, 1))
    _shrink_mixers(part, scale)


def _shrink_mixers(part: Any, scale: int) -> None:
    keys, values = _number(part, "linear_num_key_heads"), _number(part, "linear_num_value_heads")
    if keys and values and values % keys == 0 and keys > 2:
        _fix(part, ("linear_num_key_heads",), 2)
        _fix(part, ("linear_num_value_heads",), 2 * (values // keys))
    hidden = _number(part, "hidden_size") or 0
    for names in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("num_heads", "head_dim"),
        ("n_mamba_heads", "mamba_headdim"),
    ):
        heads, width = (_number(part, name) for name in names)
        expand = next((v for v in (getattr(part, n, None) for n in ("mamba_expand", "expand")) if isinstance(v, int)), None)
        if heads and width and expand:
            inner = expand * hidden
            count = next((n for n in (4, 2, 8, 1) if inner % n == 0), 1)
            _fix(part, names[:1], count)
            _fix(part, names[1:], inner // count)
    _set(part, ("mamba_n_groups", "n_groups", "mamba_ngroups"), lambda old: min(old, 2))
    _fix(part, ("mamba_d_ssm",), (_number(part, "mamba_n_heads") or 0) * (_number(part, "mamba_d_head") or 0))
    _set(part, ("time_step_rank", "mamba_dt_rank"), lambda old: min(old, 4))


def keep_layers(config: Any, count: int, every: int) -> Any:
    """A copy with the first `count` of a text config's `every` layers."""
    found = copy.deepcopy(config)
    text = found.get_text_config(decoder=True)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, name, value[:count])
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks"):
        if _number(text, name) == every:
            setattr(text, name, count)
    return found


def kinds_needed(layers: list[nn.Module]) -> int:
    """How many of the first layers hold one of every kind."""
    seen: set[str] = set()
    last = 0
    for number, layer in enumerate(layers):
        kind = _kind(layer)
        if kind not in seen:
            seen.add(kind)
            last = number
    return max(last + 1, min(KEPT, len(layers)))


def _kind(layer: nn.Module) -> str:
    """What a layer is, without its number: the classes of its parts, shapes, and their flags and words."""
    lines = []
    for name, module in layer.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | str | None) or "window" in k or "theta" in k}
        plain.pop("_is_hf_initialized", None)
        lines.append(f"{name} {type(module).__name__} {sorted((k, str(v)) for k, v in plain.items())}")
    return "\n".join(lines)


def _number(part: Any, name: str) -> int | None:
    try:
        value = getattr(part, name, None)
    except (AttributeError, RuntimeError):  # one number for each layer, which has no single value
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _fix(part: Any, names: tuple[str, ...], value: int) -> None:
    """Set the numbers of those names that the config has to a value."""
    _set(part, names, lambda _: value)


def _set(part: Any, names: tuple[str, ...], change: Callable[[int], int]) -> None:
    """Set the numbers of those names that the config has, also under a family's own names."""
    for name in dict.fromkeys(getattr(part, "attribute_map", {}).get(name, name) for name in names):
        old = _number(part, name)
        if old:
            try:
                setattr(part, name, change(old))
            except (AttributeError, RuntimeError, ValueError, TypeError):
                continue
        values = vars(part).get(name)
        if isinstance(values, list) and all(isinstance(value, int) for value in values):
            setattr(part, name, [change(value) if value else value for value in values])
