"""Route `in_place`: the engine maps the trainer's own weights, so that each byte is copied once, into the engine's.

For a trainer on the CPU of one machine, whose parameters are put into shared memory when the route opens: those of one rank as
they are, row shards of several ranks side by side, so that each tensor is whole there (weights/joined.py). What is made for the
stream (buffers, conversions) goes through the buckets of the route `shared`. No file has a name once the route is open, so a
killed process leaves nothing behind.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights import shared
from agentrl.weights.bucket import Bucket, Lent, Named
from agentrl.weights.route import ROUTES, SLOTS, Offer, Route, Sender
from agentrl.weights.shared import SharedReceiver, SharedSender

SPARE = 1.1
"""Room that must be free in shared memory, as a multiple of the weights: a write beyond it would end the process."""


class InPlaceSender(SharedSender):
    """See the module."""

    joins: ClassVar[bool] = True

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(slot_bytes, receivers)
        self._tensors: list[Tensor] = []

    def lend(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)

    def open(self) -> Offer:
        whole = [tensor for tensor in self._tensors if tensor.is_contiguous() and tensor.device.type == "cpu"]
        if not whole:
            raise ConfigError("weights.route = in_place: the trainer gathers, converts or offloads its weights, or has a GPU")
        _check_room(whole)
        self.lent = Lent(whole)
        # Storages are swapped in place: parameters, FSDP's views of them and the optimizer's state stay the same objects. Their
        # addresses change, hence the second look.
        files = [_shared(region) for region in self.lent.regions]
        by_start = dict(zip((region.data_ptr() for region in self.lent.regions), files, strict=True))
        self.lent = Lent(self.lent.regions)
        offer = super().open()
        regions = (by_start[region.data_ptr()] for region in self.lent.regions)
        return Offer("in_place", offer.slot_bytes, offer.receivers, (*offer.where, *regions))

    def close(self) -> None:
        super().close()
        self.lent = Lent()


def _check_room(tensors: Sequence[Tensor]) -> None:
    """Raise ConfigError if shared memory or the limit on open files is too small for these tensors."""
    fresh = [tensor for tensor in tensors if not tensor.is_shared()]  # type: ignore[no-untyped-call]
    if not fresh:
        return
    if not shared.FOLDER.is_dir():
        raise ConfigError(f"weights.route = in_place: this machine has no {shared.FOLDER}")
    disk = os.statvfs(shared.FOLDER)
    free, need = disk.f_bavail * disk.f_frsize, sum(tensor.nbytes for tensor in fresh)
    if need * SPARE > free:
        raise ConfigError(f"weights.route = in_place: {need >> 20} MiB of weights, and {free >> 20} MiB free in {shared.FOLDER}")
    most, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(list(Path("/proc/self/fd").iterdir()))
    if used + len(fresh) > most // 2:
        raise ConfigError(f"weights.route = in_place: {len(fresh)} weights need a file each, of {most} that the process may open")


def _shared(region: Tensor) -> str:
    """Put the region's storage into shared memory, where it is not yet; how another process finds it: its file, device and inode,
    where it begins and how long it is, in bytes."""
    storage = region.untyped_storage()
    # "file_system" would give the memory a name, which a killed process would leave behind.
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
        raise ConfigError("weights.route = in_place: torch's sharing strategy is not file_descriptor")
    descriptor, size = storage.share_memory_()._share_fd_cpu_()  # type: ignore[no-untyped-call]
    found = os.fstat(descriptor)
    start = region.storage_offset()
    return f"/proc/{os.getpid()}/fd/{descriptor} {found.st_dev} {found.st_ino} {start} {region.numel()} {size}"


class InPlaceReceiver(SharedReceiver):
    """See the module."""

    def open(self) -> None:
        super().open()
        self._regions = [_mapped(text) for text in self.offer.where[1 + SLOTS :]]

    def receive(self, bucket: Bucket) -> list[Named]:
        return bucket.cut(self._slots[bucket.slot], self._regions)

    def close(self) -> None:
        super().close()
        self._regions = []


def _mapped(text: str) -> Tensor:
    """The trainer's region that `_shared` described, uint8. Raises ConfigError if this process cannot open it."""
    file, *numbers = text.split(" ")
    device, inode, start, count, size = map(int, numbers)
    try:
        found = Path(file).stat()
        if (found.st_dev, found.st_ino) != (device, inode):  # a process of another container, under the same number
            raise OSError("another file")
        mapped = torch.from_file(file, shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as problem:
        raise ConfigError(f"weights.route = in_place: the engine cannot open the trainer's memory: {problem}") from problem
    return mapped[start : start + count]


@ROUTES.register("in_place")
class InPlaceRoute(Route):
    """See the module."""

    cost = 1.5
    receiver = InPlaceReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return InPlaceSender(slot_bytes, receivers)
