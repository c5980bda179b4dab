"""What an engine that takes weights over a route offers to the publisher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass

from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.parcel import Parcel
from agentrl.weights.route import Offer


class MembersChangedError(EngineError):
    """A process of the engine was replaced since the route was attached: attach again."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of some linear layers: W + alpha / rank * B A. `tensors`: `{layer}.lora_A.weight` [rank, in] and
    `{layer}.lora_B.weight` [out, rank], on the host; `modules`: last parts of the layers' names."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    tensors: dict[str, Tensor]


class WeightTarget(ABC):
    """Mixed into an engine. The caller pauses the engine before and resumes it after."""

    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The processes that load weights, in the order of their receivers; a name changes where one is replaced."""

    @abstractmethod
    async def attach(self, offer: Offer) -> None:
        """Open a receiver in every member; the one before is closed. Raises ConfigError with the reason where a member
        cannot be served by this route."""

    @abstractmethod
    async def receive(self, version: int, parcels: AsyncIterator[Parcel]) -> None:
        """Replace the weights. No cache survives it. Raises EngineError where a parameter is missing, unknown or of another
        shape; the engine then refuses to generate until all weights have come whole. Raises MembersChangedError, before
        anything is changed, where a member has no receiver."""

    @abstractmethod
    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Use this adapter on top of the weights that the engine started with, instead of the one before. Raises EngineError
        where it does not fit the model."""
