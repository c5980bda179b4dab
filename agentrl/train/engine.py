"""What a trainer needs from a model that is sharded over ranks: one small abstract class.

`FsdpEngine` implements it with FSDP2; another parallelism library can be added as another subclass. All ranks call
the same methods in the same order, because each of them may enter a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from agentrl.train.modules import Micro


class BaseEngine(ABC):
    """A sharded causal language model with its optimizer."""

    device: torch.device

    @abstractmethod
    def logprobs(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """log pi and entropy of the tokens `micro.targets`, float32 [M]; with gradient if grad mode is on."""

    @abstractmethod
    def values(self, micro: Micro) -> Tensor:
        """The value before each of the tokens `micro.targets`, float32 [M]; only for a critic's engine."""

    @abstractmethod
    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`; gradients of all ranks are *summed* at the `last` micro-batch."""

    @abstractmethod
    def step(self, sound: bool = True) -> float:
        """Clip by the global norm, step, zero the gradients; returns the norm before clipping.

        No step is taken, on any rank, if that norm is not finite or the caller found a loss that is not (`sound` is then
        False, on all ranks): weights and optimizer stay as they are.
        """

    @abstractmethod
    def finite(self) -> bool:
        """Whether all trained parameters are finite; the same answer on all ranks."""

    @abstractmethod
    def reduce(self, values: Tensor, how: Literal["sum", "max"]) -> Tensor:
        """The element-wise sum or maximum over the data-parallel ranks, on the host."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by Hugging Face name, one at a time: each is invalid once the next is requested.

        All ranks must iterate together, or close the iterator. A tied output embedding is left out.
        """

    @abstractmethod
    def largest(self) -> int:
        """Bytes of the largest of `tensors`."""

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
        """Model and optimizer state by name, sharded as on the ranks; a load may write into these tensors.

        While the engine is offloaded they are on the host."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write a folder that plain transformers loads."""

    @abstractmethod
    def set_rate(self, factor: float) -> None:
        """Set every learning rate to `factor` times its base."""


def flat_state(sections: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Nested state under dotted names."""
    return {f"{outer}.{name}": value for outer, inner in sections.items() for name, value in inner.items()}
