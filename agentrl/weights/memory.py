"""Route `memory`: trainer and engine are one process. The engine reads weights where the trainer has them; what is gathered or
converted for it goes through buckets of plain memory."""

from __future__ import annotations

import itertools
import os
import socket
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.bucket import Bucket, Lent, Named
from agentrl.weights.route import ROUTES, SLOTS, Offer, Receiver, Route, Sender

_numbers = itertools.count()
_open: weakref.WeakValueDictionary[str, MemorySender] = weakref.WeakValueDictionary()
"""The senders of this process. Another process has none of them, so it cannot take a copy for their slots."""


class MemorySender(Sender):
    """See the module."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(slot_bytes, receivers)
        self._slots: list[Tensor] = []
        # With the host: process ids repeat across machines, and a wrong match would load another trainer's weights.
        self._key = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"

    def lend(self, tensors: Sequence[Tensor]) -> None:
        self.lent = Lent(tensors)

    def open(self) -> Offer:
        # Both ends of this process use its GPU if it has one: through host memory each byte would cross the bus twice.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._slots = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        _open[self._key] = self
        return Offer("memory", self.slot_bytes, self.receivers, (self._key,))

    def slot(self, number: int) -> Tensor:
        return self._slots[number]

    def ship(self, bucket: Bucket) -> Bucket:
        return bucket

    def close(self) -> None:
        _open.pop(self._key, None)
        self._slots.clear()


class MemoryReceiver(Receiver):
    """See the module."""

    def open(self) -> None:
        if self.offer.where[0] not in _open:
            raise ConfigError("weights.route = memory: the engine's weights are in another process than the trainer's")

    def receive(self, bucket: Bucket) -> list[Named]:
        sender = _open[self.offer.where[0]]
        return bucket.cut(sender.slot(bucket.slot), sender.lent.regions)

    def close(self) -> None:
        return None


@ROUTES.register("memory", traits={"one_process"})
class MemoryRoute(Route):
    """See the module."""

    cost = 1
    receiver = MemoryReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return MemorySender(slot_bytes, receivers)
