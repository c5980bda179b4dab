"""The interface of an engine whose weights can be replaced; implementing it declares that the engine can be trained."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.bucket import Bucket
from agentrl.weights.route import Offer

WakeStage = Literal["weights", "cache"]


class MembersChangedError(EngineError):
    """A process of the engine was replaced after the route was attached: attach again."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of some linear layers: W + alpha / rank * B A. `tensors`: `{layer}.lora_A.weight` [rank, in] and
    `{layer}.lora_B.weight` [out, rank], on the host; `modules`: last parts of the layers' names."""

    rank: int
    alpha: float
    modules: tuple[str, ...]
    tensors: dict[str, Tensor]


class WeightTarget(ABC):
    """Mixed into an engine that can be trained; one without it (an API model, a replay) cannot. The caller that replaces
    weights pauses the engine before and resumes it afterwards.

    `loads_saved`: it takes weights by the names that checkpoints have (experts one by one), and not by those of transformers'
    modules (experts of a layer in one tensor).
    """

    loads_saved: ClassVar[bool] = False

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling after the current step; requests stay queued and keep the tokens that they sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`. The caches of running requests are recomputed with the current weights."""

    async def sleep(self) -> None:
        """Free the memory of weights and caches while the trainer uses it. The caller has paused the engine, and
        nothing is running. Raises EngineError if the engine cannot do so."""
        raise EngineError(f"{type(self).__name__} cannot sleep")

    async def wake(self, stage: WakeStage) -> None:
        """Allocate memory again, in two stages: "weights" before new weights come, "cache" after them, when the trainer has
        freed the memory that it needed to send them. Does nothing if the engine is awake."""
        return None

    async def starved(self) -> None:
        """Return once a process lacks the current weights because it replaced another one. Never, by default."""
        await asyncio.get_running_loop().create_future()

    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The processes that load weights, in the order of their receivers; a name changes if one is replaced."""

    @abstractmethod
    async def attach(self, offer: Offer) -> None:
        """Open a receiver in every member; an earlier one is closed. Raises ConfigError with the reason if the route cannot
        serve a member, MembersChangedError if one died meanwhile."""

    @abstractmethod
    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        """Replace the weights and drop all caches. Raises EngineError if a parameter is missing, unknown or of another
        shape; the engine then refuses to generate until it has received complete weights. Raises MembersChangedError, before
        anything is changed, if a member has no receiver."""

    @abstractmethod
    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Use this adapter on top of the weights that the engine started with, replacing an earlier one. Raises EngineError
        if it does not fit the model."""
