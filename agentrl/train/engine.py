"""What a trainer needs from a model that is sharded over ranks: one abstract class, and the registry of its implementations.

    @TRAIN_ENGINES.register("mine", traits={"lora", "critic"})
    class MyEngine(BaseEngine):
        ...

`model.engine` names one; it needs one file in agentrl/train, or in `plugins/` of a shelf. Its traits say what it can do: what
a config asks beyond them is refused before the run starts (train/engines.py). All ranks call the same methods in the same
order, because each of them may enter a collective. tests/train/engine_contract.py holds an engine to all that is said here;
docs/training_engines.md says how to write one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from agentrl.config.schema import ModelConfig, OptimConfig
from agentrl.errors import ConfigError
from agentrl.registry import Registry
from agentrl.train.memory import RoleMemory
from agentrl.train.modules import Micro, Role
from agentrl.train.optim import Named, Optimizers, make_optimizers
from agentrl.weights.conversions import Saving
from agentrl.weights.joined import RowShard


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations of a forward pass: of each token with the matrices, of each token with each before it (and itself) in attention,
    and of each predicted token with the head; `passes`: as many as forward and backward are together."""

    token: float
    pair: float
    head: float
    passes: int

    def of(self, lengths: Sequence[int], predicted: float) -> float:
        """Forward and backward of rows, of which so many tokens are predicted."""
        attention = self.pair * sum(float(n) * float(n) for n in lengths)
        return self.passes * (self.token * float(sum(lengths)) + attention + self.head * predicted)


class BaseEngine(ABC):
    """One rank's part of a sharded causal language model, with its optimizer.

    `cfg`: the config it was made from. `device`: where the caller puts a micro-batch. `optimizers`: None until `use_optimizer`.
    """

    cfg: ModelConfig
    device: torch.device
    optimizers: Optimizers | None = None

    @abstractmethod
    def __init__(
        self, path: str, cfg: ModelConfig, max_grad_norm: float, role: Role = "policy", device: torch.device | None = None
    ) -> None:
        """Load a folder or hub name, each rank its own shards. The process group is open already; without the trait "alone"
        there always is one. `role`: what is on top of the model, logprobs, values or scores.

        Raises ModelError if the model cannot be loaded or is not supported, ConfigError if the ranks cannot be divided as the
        config says.
        """

    @classmethod
    def check(cls, cfg: ModelConfig, ranks: int) -> None:
        """On the driver, before anything is started: raise ConfigError for a config that the engine cannot follow although its
        traits allow each key, DependencyError if a package is missing. `ranks`: of a role."""
        return None

    @classmethod
    def memory(cls, module: nn.Module, cfg: ModelConfig, ranks: int, tokens: int, optims: Sequence[OptimConfig]) -> RoleMemory:
        """For `--dry-run`: bytes of a role on one of its ranks. `module`: train/memory.py's `shell` of it, on the meta device;
        `tokens`: of a micro-batch; `optims`: the optimizers that it has, one after the other; none of a role that does not learn.
        Raises ConfigError if the engine does not say, ModelError if the model cannot be counted."""
        raise ConfigError(f'model.engine = "{cfg.engine}" does not count its memory, so --dry-run cannot')

    @property
    def packs(self) -> bool:
        """Whether a micro-batch may hold several rows (`model.packing`)."""
        return self.cfg.packing in ("auto", "packed")

    # -- forward and backward --------------------------------------------------------------------------------------

    @abstractmethod
    def logprobs(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """log pi and entropy of the tokens `micro.targets`, float32 [M]; with gradient if grad mode is on. Ranks that share
        rows (model.sequence_parallel, model.tensor_parallel) all get the whole micro-batch and return all M values."""

    def values(self, micro: Micro) -> Tensor:
        """The value before each of the tokens `micro.targets`, float32 [M]; only for a critic's engine."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no values')

    def scores(self, micro: Micro) -> Tensor:
        """The score of each row, float32 [N]; only for a reward model's engine."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" computes no scores')

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; gradients of all data-parallel ranks are *summed*, at the latest at the `last`
        micro-batch. Ranks that share rows have the same loss, which counts once."""

    # -- parameters and steps --------------------------------------------------------------------------------------

    @abstractmethod
    def named(self) -> Named:
        """Trained parameters by Hugging Face name, as they are on this rank: what an optimizer takes. After the last
        `backward` their `grad` is the summed gradient. A tied output embedding appears once, under the input's name."""

    def use_optimizer(self, cfg: OptimConfig) -> None:
        """A fresh optimizer `cfg.name` over `named`, in place of the one that there was; `cfg.lr` is set (train/rates.py)."""
        self.optimizers = None  # its memory goes before another's is taken
        self.optimizers = make_optimizers(self.named(), cfg)

    def freeze(self) -> None:
        """Make it a model that is only asked: no parameter has a gradient from now on."""
        for _, parameter in self.named():
            parameter.requires_grad_(False)

    @abstractmethod
    def step(self, sound: bool = True) -> float:
        """Clip by the global norm, step, zero the gradients; returns the norm before clipping, the same on all ranks.

        No step is taken, on any rank, if that norm is not finite or the caller found a loss that is not (`sound` is then
        False, on all ranks): weights and optimizer stay as they are.
        """

    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients that wait for a step; between a `last` backward pass and the next one."""
        for _, parameter in self.named():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def set_rate(self, factor: float) -> None:
        """Set every learning rate to `factor` times its base."""
        assert self.optimizers is not None
        self.optimizers.set_rate(factor)

    def approach(self, other: BaseEngine, weight: float) -> None:
        """Move every parameter by `weight` of its distance to the same one of `other`, an engine of this class with the same
        model on the same ranks: theta <- theta + weight (theta_other - theta), in float32, each rank its own shards."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" follows no other engine')

    @abstractmethod
    def finite(self) -> bool:
        """Whether all trained parameters are finite; the same answer on all ranks."""

    @abstractmethod
    def reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """The element-wise sum or maximum over the data-parallel ranks, on the host: ranks that share rows count once."""

    def expert_load(self) -> Tensor | None:
        """How often each expert was chosen in passes with gradient since the last call, float64 [layers, experts] on the
        host, over the ranks that share rows; None for a dense model, and from an engine that does not count."""
        return None

    def flops(self) -> Flops | None:
        """What the model computes, for `gpu/mfu`; None from an engine that does not count."""
        return None

    # -- weights for others ----------------------------------------------------------------------------------------

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, one at a time, adapters merged, in the type of the computation: each is invalid
        once the next is requested.

        All ranks must iterate together, or close the iterator. A tied output embedding is left out.
        """

    def resident(self) -> list[Tensor]:
        """Those of `tensors` that are the model's own memory and not made for the stream, if this memory stays where it is; none
        by default. An engine may then read them in place."""
        return []

    def shards(self) -> list[RowShard]:
        """What this rank has of `tensors`, if several ranks have rows of each and nothing else is made of them, by any name that
        is the same on all ranks; none by default. They may then be joined in shared memory (weights/joined.py). A collective."""
        return []

    def use_joined(self, whole: Mapping[str, Tensor]) -> None:
        """The tensors of `shards`, by their names there, are to be had as a whole from now on: `tensors` gathers them no more."""
        raise NotImplementedError

    @abstractmethod
    def largest(self) -> int:
        """Bytes of the largest of `tensors`."""

    @abstractmethod
    def saving(self) -> Saving:
        """How `tensors` become those of a checkpoint."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a folder that plain transformers loads."""

    def adapter(self) -> dict[str, Tensor]:
        """Only the adapter's tensors, gathered, float32 on the host, as `Adapter.tensors` (weights/target.py)."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    def frozen_base(self) -> AbstractContextManager[None]:
        """A context in which the model computes without its adapter; for forward passes without gradient."""
        raise ConfigError(f'model.engine = "{self.cfg.engine}" trains no adapters')

    # -- memory and state ------------------------------------------------------------------------------------------

    @abstractmethod
    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, pinned if the device is a GPU, and free the device's: between two
        optimizer steps, as gradients are not kept. Until `onload`, only `state` and
        `tensors`, which brings them back, may be called."""

    @abstractmethod
    def onload(self) -> None:
        """Undo `offload`; idempotent."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Model ("model.NAME", by Hugging Face name) and optimizer state by name, sharded as on the ranks: DTensors, so that
        another number of ranks can load what these saved; a load may write into these tensors.

        While the engine is offloaded they are on the host."""


TRAIN_ENGINES: Registry[type[BaseEngine]] = Registry(
    "model.engine",
    "TRAIN_ENGINES",
    "agentrl.train",
    given=5,
    traits={
        "alone": "runs in one process without a process group",
        "lora": "trains adapters: `adapter`, `frozen_base`",
        "critic": 'has the role "value": `values`',
        "reward_model": 'has the role "score": `scores`',
        "sft": "takes the steps of a supervised warm start",
        "moving_reference": 'algorithm.kl.reference = "moving": `approach`',
        "prefix_sharing": "computes a prefix that rows share once (PackedSequences.spans)",
        "router_replay": "rollout.router_replay: sends tokens to the experts that a micro-batch names (Micro.experts)",
        "replicas": "model.replicas > 1",
        "sequence_parallel": "model.sequence_parallel > 1",
        "tensor_parallel": "model.tensor_parallel > 1",
        "expert_parallel": "model.expert_parallel > 1",
        "cpu_offload": "model.cpu_offload",
        "offload": 'model.offload = "idle"',
        "compile": "model.compile",
        "liger": 'model.kernels = "liger"',
        "families": "computes transformers' own models, for all of which it holds what train/families finds right",
        "shard_gradients": "model.shard_gradients = true",
        "activation_checkpointing": "model.activation_checkpointing = true",
        "vision": "trains a model that takes images (Micro.images)",
    },
)


def compute_dtype(cfg: ModelConfig, device: torch.device) -> torch.dtype:
    """What a model computes in on that device: `model.dtype`, or by default bfloat16 on a GPU and float32 on a CPU."""
    return torch.float32 if cfg.computes_in(device.type == "cuda") == "float32" else torch.bfloat16


def flat_state(sections: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Nested state under dotted names."""
    return {f"{outer}.{name}": value for outer, inner in sections.items() for name, value in inner.items()}
