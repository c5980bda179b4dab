"""The two ends of a route: a Sender on the trainer's side and a Receiver in each process that holds the engine's weights.

    trainer, every rank       driver                      engine, every process
    sender.open()    ------>  Offer  ------------------>  receiver.open()      proves that it can serve
    sender.attached() <-----                              (or says why not: ConfigError)
    sender.send(stream) --->  Bucket ------------------>  receiver.receive(bucket) -> tensors
                              ... until the stream ends

A sender has two slots: while the engine loads the one, the trainer fills the other. The driver asks for
bucket n + 2 only when bucket n is loaded, so that is all the memory a publish takes beside the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.registry import Registry
from agentrl.weights.bucket import Bucket, Named, Stream, fill

SLOTS = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver must know: the route's name, bytes a slot, how many receivers there are, and `where`
    (paths, a key, an address: the route's own)."""

    route: str
    slot_bytes: int
    receivers: int
    where: tuple[str, ...]


class Sender(ABC):
    """The trainer's end, on rank 0. `slot_bytes`: the most that one bucket holds; no tensor may be larger."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        self.slot_bytes, self.receivers = slot_bytes, receivers
        self._turn = 0

    @abstractmethod
    def open(self) -> Offer:
        """Make the channel. Raises ConfigError where this machine cannot serve the route."""

    def attached(self) -> None:
        """All receivers are there. Raises ConfigError where they cannot be reached after all."""
        return None

    def send(self, stream: Stream) -> Bucket | None:
        """Fill the next slot from the stream and send it; None at the stream's end."""
        if stream.done:
            return None
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        entries, used = fill(stream, self.slot_bytes, self.slot(slot))
        return self.ship(Bucket(slot, used, tuple(entries)))

    @abstractmethod
    def slot(self, number: int) -> Tensor:
        """The slot's bytes, uint8 [slot_bytes], once nobody reads them any more."""

    @abstractmethod
    def ship(self, bucket: Bucket) -> Bucket:
        """Let the receivers have a filled slot; what they must be told."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""


class Silent(Sender):
    """The end on ranks other than 0: takes the same tensors off the stream, which are collectives, and drops them."""

    def open(self) -> Offer:
        return Offer("none", self.slot_bytes, self.receivers, ())

    def send(self, stream: Stream) -> Bucket | None:
        if not stream.done:
            fill(stream, self.slot_bytes, None)
        return None

    def slot(self, number: int) -> Tensor:
        raise NotImplementedError

    def ship(self, bucket: Bucket) -> Bucket:
        return bucket

    def close(self) -> None:
        return None


class Receiver(ABC):
    """The engine's end, one a process that holds weights. `index`: from 0, over all of them."""

    def __init__(self, offer: Offer, index: int) -> None:
        self.offer, self.index = offer, index

    @abstractmethod
    def open(self) -> None:
        """Attach. Raises ConfigError with the reason where this process cannot be served by the route."""

    @abstractmethod
    def receive(self, bucket: Bucket) -> list[Named]:
        """The tensors of a bucket. They are gone once the caller has answered: whoever keeps one clones it."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""


class Route(ABC):
    """Both ends of a route by name: one file in agentrl/weights, or in `plugins/` of a shelf, brings a route."""

    cost: ClassVar[float] = math.inf
    """Its place in what `weights.route = "auto"` tries, the cheapest first; infinite: only where it is named."""
    receiver: ClassVar[type[Receiver]]

    @abstractmethod
    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        """The trainer's end; `host` is this machine as the engine's machines see it."""


ROUTES: Registry[type[Route]] = Registry("weights.route", "ROUTES", "agentrl.weights")
