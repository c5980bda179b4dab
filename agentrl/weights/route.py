"""The two ends of a route: a Sender on the trainer's side and a Receiver in each process that holds the engine's weights.

    trainer, every rank       driver                      engine, every process
    sender.open()    ------>  Offer  ------------------>  receiver.open()      proves that it can serve
    sender.attached() <-----                              (or says why not: ConfigError)
    sender.send(stream) --->  Bucket ------------------>  receiver.receive(bucket) -> tensors
                              ... until the stream ends

A sender has two slots: while the engine loads one, the trainer fills the other. The driver requests
bucket n + 2 only when bucket n is loaded, so a publish needs no memory besides these slots and the weights.

Of a trainer that has its weights as a whole, or whose ranks join theirs in shared memory, a route may let the engine read them
where they are (`Sender.lend`): each byte is then copied once, into the engine's own weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.registry import Registry
from agentrl.weights.bucket import ALIGN, NOTHING_LENT, Bucket, Lent, Named, Stream, fill

SLOTS = 2


@dataclass(frozen=True, slots=True)
class Offer:
    """What a receiver must know: the route's name, bytes per slot, number of receivers, and `where`
    (paths, a key or an address, depending on the route)."""

    route: str
    slot_bytes: int
    receivers: int
    where: tuple[str, ...]


class Sender(ABC):
    """The trainer's end, on rank 0. `slot_bytes`: the size of a bucket; no tensor may be larger."""

    align: ClassVar[int] = ALIGN
    """Where tensors begin in a bucket (see `fill`)."""
    every_rank: ClassVar[bool] = False
    """Whether every rank of the trainer fills buckets, and not only rank 0; `open` is then a collective."""

    joins: ClassVar[bool] = False
    """Whether shards of several ranks are to be joined in shared memory and lent (weights/joined.py), where that can be."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        self.slot_bytes, self.receivers = slot_bytes, receivers
        self._turn = 0
        self.lent: Lent = NOTHING_LENT

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Called before `open` with tensors that may be read in place (see Lent). Routes that cannot do so copy them."""
        return None

    @abstractmethod
    def open(self) -> Offer:
        """Create the channel. Raises ConfigError if this machine cannot serve the route."""

    def attached(self) -> None:
        """Called when all receivers have attached. Raises ConfigError if they cannot be reached after all."""
        return None

    def send(self, stream: Stream) -> Bucket | None:
        """Fill the next slot from the stream and send it; None at the stream's end."""
        if stream.done:
            return None
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        # `self.slot` blocks until the bucket before the last, which used this slot, is no longer read.
        entries, used = fill(stream, self.slot_bytes, self.slot(slot), self.align, self.lent)
        return self.ship(Bucket(slot, used, tuple(entries)))

    @abstractmethod
    def slot(self, number: int) -> Tensor:
        """The slot's bytes, uint8 [slot_bytes]; waits until no receiver reads them any more."""

    @abstractmethod
    def ship(self, bucket: Bucket) -> Bucket:
        """Make a filled slot available to the receivers; returns the bucket to tell them."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""


class Silent(Sender):
    """The end on ranks other than 0: takes the same tensors from the stream, because each is a collective, and drops them."""

    def __init__(self, other: Sender) -> None:
        """`other`: as rank 0 has it."""
        super().__init__(other.slot_bytes, other.receivers)
        self._as = other.align

    def open(self) -> Offer:
        return Offer("none", self.slot_bytes, self.receivers, ())

    def send(self, stream: Stream) -> Bucket | None:
        if not stream.done:
            fill(stream, self.slot_bytes, None, self._as)
        return None

    def slot(self, number: int) -> Tensor:
        raise NotImplementedError

    def ship(self, bucket: Bucket) -> Bucket:
        return bucket

    def close(self) -> None:
        return None


class Receiver(ABC):
    """The engine's end, one per process that holds weights. `index`: from 0, over all of these."""

    def __init__(self, offer: Offer, index: int) -> None:
        self.offer, self.index = offer, index

    @abstractmethod
    def open(self) -> None:
        """Attach. Raises ConfigError with the reason if the route cannot serve this process."""

    @abstractmethod
    def receive(self, bucket: Bucket) -> list[Named]:
        """The tensors of a bucket. They are valid until the caller answers the driver: clone a tensor to keep it."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; idempotent."""


class Route(ABC):
    """Both ends of a route: one file in agentrl/weights, or in `plugins/` of a shelf, adds a route."""

    cost: ClassVar[float] = math.inf
    """Its place in the order that `weights.route = "auto"` tries, the cheapest first; infinite: used only if it is named."""
    receiver: ClassVar[type[Receiver]]

    @abstractmethod
    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        """The trainer's end; `host` is the address at which the engine's machines reach this one."""


ROUTES: Registry[type[Route]] = Registry(
    "weights.route",
    "ROUTES",
    "agentrl.weights",
    traits={
        "one_process": "stays within a process, so trainer and engine must be in the driver's",
        "cuda": "goes from GPU to GPU, and needs one at both ends",
        "own_gpus": "the engine must be on the trainer's GPUs (rollout.colocate)",
        "other_gpus": "the engine must be on other GPUs than the trainer's",
    },
)
