"""How much KV cache a model needs per token, from its config alone, and how much an engine on a CPU gets by default."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from agentrl.backends.parameters import positions_of
from agentrl.config import ModelConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.rollout.engine_maker import EngineMemory

CPU_MIB = 4096
"""The most that a replica on a CPU gets if `vllm.kv_cache_mib` does not say, unless one sequence needs more."""
CPU_SEQUENCES = 64
"""Full sequences that this is meant to hold, if `vllm.max_num_seqs` does not say."""
BLOCK = 32
"""Tokens by which a sequence's share is rounded up at most (vLLM's blocks; see options.py)."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps of a token: `layers` x `heads` x `size` keys, and as many values. `positions`: the longest sequence;
    `queries`: attention heads."""

    layers: int
    heads: int
    size: int
    positions: int
    queries: int

    @classmethod
    def of(cls, model: ModelConfig) -> CacheShape | None:
        """Of the model that a config names; None if that does not say, or cannot be read (which the tokenizer's check refuses).

        Layers without a cache that grows with the sequence (sliding windows, linear attention) are left out, so it is
        never too much; latent attention, whose cache has another form, is not known.
        """
        if model.init is not None:
            return cls(model.init.layers, model.init.kv_heads, model.init.head_dim, model.init.context, model.init.heads)
        if model.path is None:
            return None  # `check_model` refuses it; the hub must not be asked for a model called "None"
        from transformers import AutoConfig

        try:
            text = AutoConfig.from_pretrained(str(model.path), trust_remote_code=model.trust_remote_code).get_text_config()
        except (OSError, ValueError):
            return None
        heads, kinds = getattr(text, "num_attention_heads", None), getattr(text, "layer_types", None)
        found: tuple[Any, ...] = (
            kinds.count("full_attention") if kinds else getattr(text, "num_hidden_layers", None),
            getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None),
            positions_of(text),
            heads,
        )
        known = all(isinstance(value, int) for value in found) and getattr(text, "kv_lora_rank", None) is None
        return cls(*found) if known else None

    def token_bytes(self, ranks: int, itemsize: int) -> int:
        """Bytes per token on each of `ranks` tensor-parallel ranks."""
        # Rounded up: with fewer heads than ranks, each rank keeps a whole one.
        return 2 * self.layers * math.ceil(self.heads / ranks) * self.size * itemsize


def itemsize(dtype: str, args: dict[str, Any]) -> int:
    """Bytes of a cached number: `vllm.args.kv_cache_dtype` may halve or quarter them."""
    if str(args.get("kv_cache_dtype", "auto")).startswith("fp8"):
        return 1
    return 4 if dtype == "float32" else 2


def cpu_mib(config: TrainConfig, dtype: str) -> int:
    """MiB of KV cache of each rank on a CPU: as many full sequences as run at once, at most CPU_MIB but at least one."""
    vllm = config.vllm
    if vllm.kv_cache_mib is not None:
        return vllm.kv_cache_mib
    shape = CacheShape.of(config.model)
    if shape is None:
        return CPU_MIB
    running = min(vllm.max_num_seqs or CPU_SEQUENCES, config.rollout.max_episodes)
    length = min(vllm.max_model_len, shape.positions) + BLOCK
    one = math.ceil(length * shape.token_bytes(vllm.tensor_parallel, itemsize(dtype, vllm.args)) / 2**20)
    # The lower bound wins over CPU_MIB: an engine that holds no sequence does not start.
    return max(one, min(CPU_MIB, running * one))


def check_room(config: TrainConfig, dtype: str) -> None:
    """Raise ConfigError if `vllm.kv_cache_mib` holds no sequence of `vllm.max_model_len` tokens, which vLLM needs to start."""
    vllm = config.vllm
    shape = CacheShape.of(config.model) if vllm.kv_cache_mib is not None else None
    # Without such layers a token takes nothing, and any size will do.
    if vllm.kv_cache_mib is None or shape is None or shape.layers == 0:
        return
    length = min(vllm.max_model_len, shape.positions)
    each = shape.token_bytes(vllm.tensor_parallel, itemsize(dtype, vllm.args))
    held = (vllm.kv_cache_mib << 20) // each
    if held < length:
        raise ConfigError(
            f"vllm.kv_cache_mib = {vllm.kv_cache_mib} holds {held:,} tokens of this model ({each:,} bytes each on every device), "
            f"and a sequence may have {length:,} (vllm.max_model_len, or the model's own limit): set it to at least "
            f"{math.ceil(each * length / 2**20):,}, unset it, or lower vllm.max_model_len"
        )


def check_fraction(config: TrainConfig, fraction: float, device: int, taken: EngineMemory) -> None:
    """Raise ConfigError if `fraction` of a GPU of `device` bytes holds no sequence beside the weights, as `taken` says."""
    vllm, shape = config.vllm, CacheShape.of(config.model)
    if shape is None:
        return
    length = min(vllm.max_model_len, shape.positions)
    need = length * shape.token_bytes(vllm.tensor_parallel, itemsize(config.model.computes_in(True), vllm.args))
    if taken.cache < need:
        gib = [f"{size / (1 << 30):.1f} GiB" for size in (device, taken.weights, taken.cache, need)]
        raise ConfigError(
            f"vllm.args.gpu_memory_utilization = {fraction:g} of a GPU of {gib[0]} leaves, beside {gib[1]} of weights, {gib[2]} "
            f"for the KV cache, and a sequence of {length:,} tokens takes {gib[3]}: raise it or vllm.tensor_parallel, or lower "
            "vllm.max_model_len"
        )
