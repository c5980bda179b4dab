"""From a transformers config to torchtitan's: the families that it has and that agentrl has compared with transformers.

Import it after `library.require_torchtitan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchtitan.models.common import Embedding
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.sharding import ShardingConfig

from agentrl.errors import ModelError
from agentrl.train.titan.experts import NAMES, experts_config, is_sparse, shard_experts
from agentrl.train.titan.parts import LogprobHead, PackedAttention, Rotary
from agentrl.train.titan.routers import RoutedBlock

ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of a row."""


@dataclass(frozen=True, slots=True)
class Family:
    """What torchtitan has for one architecture; `qk_norm`: queries and keys are normalized; `sparse`: layers have experts."""

    model: Any
    block: Any
    adapter: Any
    shard: Callable[[Any], None]
    parallelize: Callable[..., Any]
    qk_norm: bool
    sparse: bool = False


QWEN3 = Family(
    Qwen3Model,
    Qwen3TransformerBlock,
    Qwen3StateDictAdapter,
    lambda config: set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False),
    parallelize_qwen3,
    qk_norm=True,
)
FAMILIES: dict[str, Family] = {
    "qwen3": QWEN3,
    "qwen3_moe": replace(QWEN3, sparse=True),
    "llama": Family(
        Llama3Model,
        Llama3TransformerBlock,
        Llama3StateDictAdapter,
        lambda config: set_llama3_sharding_config(config, enable_sp=False),
        parallelize_llama,
        qk_norm=False,
    ),
}
"""By `model_type` of transformers."""


def family_of(path: str, config: Any) -> Family:
    """The family of a model. Raises ModelError for one that is not here, and for what its torchtitan model does not have."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ModelError(f'{path}: model.engine = "titan" has models for {", ".join(FAMILIES)}, not for {kind}; "fsdp2" does')
    rope = config.rope_parameters or {}
    known = {
        "hidden_act": (config.hidden_act, ("silu",)),
        "attention_bias": (getattr(config, "attention_bias", False), (False,)),
        "mlp_bias": (getattr(config, "mlp_bias", False), (False,)),
        "attention_dropout": (config.attention_dropout or 0.0, (0.0,)),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), (False,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0,)),
        "rope_type": (rope.get("rope_type", "default"), ROPES),
    }
    for key, (value, allowed) in known.items():
        if value not in allowed:
            raise ModelError(f'{path}: {key} = {value!r} in its config.json: model.engine = "titan" supports {allowed}')
    return FAMILIES[kind]


def titan_config(family: Family, config: Any, rotary: Any, expert_parallel: bool) -> Any:
    """torchtitan's config of a model. `rotary`: transformers' rotary embedding of it, for the frequencies. `expert_parallel`: the
    ranks have different experts."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps)

    rope = Rotary.Config(
        dim=width,
        max_seq_len=config.max_position_embeddings,
        frequencies=tuple(rotary.inv_freq.tolist()),
        scale=float(rotary.attention_scaling),
    )
    # Weights are loaded, never drawn: no initialization is given.
    sparse = [family.sparse and is_sparse(config, layer) for layer in range(config.num_hidden_layers)]
    layers = [
        (RoutedBlock if experts else family.block).Config(
            attention_norm=norm(config.hidden_size),
            ffn_norm=norm(config.hidden_size),
            attention=make_gqa_config(
                dim=config.hidden_size,
                n_heads=heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=width,
                wqkv_param_init={},
                wo_param_init={},
                inner_attention=PackedAttention.Config(),
                rope=rope,
                qk_norm=norm(width) if family.qk_norm else None,
            ),
            feed_forward=None
            if experts
            else make_ffn_config(
                dim=config.hidden_size, hidden_dim=config.intermediate_size, w1_param_init={}, w2w3_param_init={}
            ),
            moe=experts_config(config) if experts else None,
        )
        for experts in sparse
    ]
    found = family.model.Config(
        dim=config.hidden_size,
        vocab_size=config.vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=config.hidden_size),
        norm=norm(config.hidden_size),
        lm_head=LogprobHead.Config(in_features=config.hidden_size, out_features=config.vocab_size),
        layers=layers,
        enable_weight_tying=bool(config.tie_word_embeddings),
    )
    family.shard(found)
    shard_experts(found, expert_parallel)
    # The head gathers its weight itself, and takes and returns plain tensors.
    found.lm_head.sharding_config = ShardingConfig(state_shardings=found.lm_head.sharding_config.state_shardings)
    return found


def hf_names(family: Family, config: Any, names: list[str]) -> dict[str, str]:
    """The Hugging Face name of each of torchtitan's parameters, by its adapter's own table. Raises ModelError if it lacks one."""
    table = {titan: name for name, titan in family.adapter(config, None).from_hf_map.items() if titan is not None}
    table |= NAMES
    found = {}
    for name in names:
        layer = next((part for part in name.split(".") if part.isdigit()), "")
        pattern = name.replace(f".{layer}.", ".{}.", 1) if layer else name
        if pattern not in table:
            raise ModelError(f"torchtitan's table of names has no {name}")
        found[name] = table[pattern].format(layer)
    return found
