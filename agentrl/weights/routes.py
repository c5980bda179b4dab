"""The routes by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentrl.config.schema import WeightsConfig
from agentrl.weights.collective import CollectiveReceiver, CollectiveSender
from agentrl.weights.disk import DiskReceiver, DiskSender
from agentrl.weights.memory import MemoryReceiver, MemorySender
from agentrl.weights.route import Offer, Receiver, Sender
from agentrl.weights.shared import SharedReceiver, SharedSender

ORDER = ("memory", "shared", "collective", "disk")
"""What `weights.route = "auto"` tries, the cheapest first: each proves by itself whether it can serve."""

RECEIVERS: dict[str, type[Receiver]] = {
    "memory": MemoryReceiver,
    "shared": SharedReceiver,
    "collective": CollectiveReceiver,
    "disk": DiskReceiver,
}


def make_sender(name: str, cfg: WeightsConfig, largest: int, receivers: int, host: str) -> Sender:
    """The trainer's end. `largest`: bytes of the largest tensor; `host`: this machine as the engine's machines see it."""
    size = max(int(cfg.bucket_mib * 2**20), largest)
    match name:
        case "memory":
            return MemorySender(size, receivers)
        case "shared":
            return SharedSender(size, receivers)
        case "collective":
            return CollectiveSender(size, receivers, host)
        case "disk":
            return DiskSender(size, receivers, Path(cfg.folder or tempfile.gettempdir()))
        case _:
            raise ValueError(f"no route {name!r}; there are {ORDER}")


def open_receiver(offer: Offer, index: int) -> Receiver:
    """The engine's end, attached. Raises ConfigError with the reason where it cannot be."""
    receiver = RECEIVERS[offer.route](offer, index)
    receiver.open()
    return receiver
