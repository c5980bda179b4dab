"""The routes by name."""

from __future__ import annotations

import math

import torch

from agentrl.config.schema import WeightsConfig
from agentrl.weights.route import ROUTES, Offer, Receiver, Sender

GPU_MIB, CPU_MIB = 256, 64
"""Of a bucket, if `weights.bucket_mib` does not say: on GPUs more of it, since each bucket waits for a GPU's queue."""


def order() -> tuple[str, ...]:
    """The routes that `weights.route = "auto"` tries, the cheapest first: each proves itself whether it can serve."""
    tried = [entry for entry in ROUTES.own() if math.isfinite(entry.make.cost)]
    return tuple(entry.name for entry in sorted(tried, key=lambda entry: entry.make.cost))


def make_sender(name: str, cfg: WeightsConfig, largest: int, receivers: int, host: str) -> Sender:
    """The trainer's end. `largest`: bytes of the largest tensor; `host`: address at which the engine's machines reach this one.

    Raises ConfigError for an unknown route."""
    mib = cfg.bucket_mib or (GPU_MIB if torch.cuda.is_available() else CPU_MIB)
    size = max(int(mib * 2**20), largest)  # no tensor is ever split over buckets
    return ROUTES.entry(name).make().sender(cfg, size, receivers, host)


def open_receiver(offer: Offer, index: int) -> Receiver:
    """The engine's end, attached. Raises ConfigError with the reason if it cannot attach."""
    receiver = ROUTES.entry(offer.route).make.receiver(offer, index)
    receiver.open()
    return receiver
