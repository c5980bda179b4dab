"""What an engine whose weights can be replaced offers: this is how an engine says that it can be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.bucket import Bucket
from agentrl.weights.route import Offer

WakeStage = Literal["weights", "cache"]


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
    """Mixed into an engine that can be trained; one without it (an API model, a replay) cannot. Whoever brings weights
    pauses the engine before and resumes it after."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling after the step under way; requests stay queued and keep what they sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on after `pause`. What was running is recomputed under the current weights."""

    async def sleep(self) -> None:
        """Give back the memory of weights and caches while the trainer uses it. The caller has paused the engine, and
        nothing runs. Raises EngineError if the engine cannot."""
        raise EngineError(f"{type(self).__name__} cannot sleep")

    async def wake(self, stage: WakeStage) -> None:
        """Take memory again, in two stages: "weights" before new weights come, "cache" after it, when what the trainer held
        for them is free. Nothing happens if the engine is awake."""
        return None

    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The processes that load weights, in the order of their receivers; a name changes if one is replaced."""

    @abstractmethod
    async def attach(self, offer: Offer) -> None:
        """Open a receiver in every member; the one before is closed. Raises ConfigError with the reason if a member cannot be
        served by this route, MembersChangedError if one died meanwhile."""

    @abstractmethod
    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        """Replace the weights. No cache survives it. Raises EngineError where a parameter is missing, unknown or of another
        shape; the engine then refuses to generate until all weights have come whole. Raises MembersChangedError, before
        anything is changed, where a member has no receiver."""

    @abstractmethod
    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Use this adapter on top of the weights that the engine started with, instead of the one before. Raises EngineError
        where it does not fit the model."""
