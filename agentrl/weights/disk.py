"""Route `disk`: buckets as files in a folder that both sides see, for machines that reach each other in no other way.

A bucket's file is written over again and again: its pages stay in memory, and making new ones costs more than all the rest. It
begins with the bucket's number, by which a receiver sees that a network file system serves the one before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.weights.bucket import Bucket, Lent, Named
from agentrl.weights.route import ROUTES, Offer, Receiver, Route, Sender

TOKEN = "token"
HEAD = 64
"""Bytes before a bucket's own, a multiple of what its tensors are aligned to: its number, as text."""
STALE_S = 60.0
"""For how long a receiver looks again if a file does not have the bucket that it was told of."""


class DiskSender(Sender):
    """See the module. `parent`: the shared folder, in which the sender creates a folder of its own."""

    def __init__(self, slot_bytes: int, receivers: int, parent: Path) -> None:
        super().__init__(slot_bytes, receivers)
        self._parent = parent
        self._folder: Path | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._number = 0

    def lend(self, tensors: Sequence[Tensor]) -> None:
        self.lent = Lent(tensor for tensor in tensors if tensor.device.type == "cpu")

    def open(self) -> Offer:
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=self._parent))
            token = os.urandom(16).hex()
            (self._folder / TOKEN).write_text(token)
        except OSError as problem:
            raise ConfigError(f"weights.route = disk: cannot write to weights.folder {self._parent}: {problem}") from problem
        self._buffer = torch.empty(self.slot_bytes, dtype=torch.uint8)
        return Offer("disk", self.slot_bytes, self.receivers, (str(self._folder), token))

    def slot(self, number: int) -> Tensor:
        return self._buffer  # one buffer serves both slots: it is free as soon as the slot's file is written

    def ship(self, bucket: Bucket) -> Bucket:
        assert self._folder is not None
        self._number += 1
        path = self._folder / f"bucket{bucket.slot}"
        # Not truncated, see the module. Closing makes a network file system send what it holds back.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.write(_head(self._number))
            for part in self._parts(bucket):
                while part:
                    part = part[file.write(part) :]
        return Bucket(bucket.slot, bucket.nbytes, bucket.entries, f"{path}:{self._number}")

    def _parts(self, bucket: Bucket) -> Iterator[memoryview]:
        """The bucket's bytes, in order: tensors that were lent from where they are, all else from the buffer."""
        buffer, at = self._buffer.numpy().data, 0
        for entry in bucket.entries:
            if entry.lent is None:
                continue
            region, start = entry.lent
            yield buffer[at : entry.offset]
            yield self.lent.regions[region].numpy().data[start : start + entry.nbytes]
            at = entry.offset + entry.nbytes
        yield buffer[at : bucket.nbytes]

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _head(number: int) -> bytes:
    return f"agentrl weights, bucket {number}".encode().ljust(HEAD)


class DiskReceiver(Receiver):
    """See the module."""

    def open(self) -> None:
        folder, token = self.offer.where
        note = Path(folder) / TOKEN
        # The token proves that it is the same folder, not one of the same path on another machine.
        if not note.is_file() or note.read_text() != token:
            raise ConfigError(
                f"weights.route = disk: the engine does not see the trainer's folder {folder}; "
                "set weights.folder to one that all machines share"
            )

    def receive(self, bucket: Bucket) -> list[Named]:
        path, _, number = bucket.file.rpartition(":")
        return bucket.cut(_read(Path(path), int(number), bucket.nbytes))

    def close(self) -> None:
        return None


def _read(path: Path, number: int, nbytes: int) -> Tensor:
    """The bytes of the bucket of that number, uint8, mapped: read where the system keeps the file in memory. Raises EngineError
    if the file goes on to have another bucket."""
    until = time.monotonic() + STALE_S
    while True:
        # Opened again for each bucket: only then does a network file system ask for what other machines wrote.
        with path.open("rb") as file:
            if file.read(HEAD) == _head(number) and os.fstat(file.fileno()).st_size >= HEAD + nbytes:
                return torch.from_file(str(path), shared=False, size=HEAD + nbytes, dtype=torch.uint8)[HEAD:]
        if time.monotonic() > until:
            raise EngineError(f"weights.route = disk: {path} does not hold bucket {number}, {STALE_S:g} s after it was written")
        time.sleep(0.05)


@ROUTES.register("disk")
class DiskRoute(Route):
    """See the module."""

    cost = 4
    receiver = DiskReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return DiskSender(slot_bytes, receivers, Path(cfg.folder or tempfile.gettempdir()))
