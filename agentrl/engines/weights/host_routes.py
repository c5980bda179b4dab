"""Routes through host memory and files: `memory`, `shared`, `disk`."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import tempfile
import time
import weakref
from pathlib import Path

import torch
from torch import Tensor

from agentrl.engines.weights.base import ROUTES, SLOTS, TOKEN_BYTES, Bucket, Named, Offer, Receiver, Sender, check_token
from agentrl.utils.errors import ConfigError, EngineError

# Route `memory`

_numbers = itertools.count()
_open: weakref.WeakValueDictionary[str, MemorySender] = weakref.WeakValueDictionary()
"""Key -> sender of this process; other processes find none, so they never take a copy for the sender's slots."""


class MemoryReceiver(Receiver):
    def open(self) -> None:
        if (sender := _open.get(self.offer.where[0])) is None:
            raise ConfigError("weights.route = memory: the engine's weights are in another process than the trainer's")
        self.slots, self.regions = sender.slots, sender.lent.regions


@ROUTES.register("memory", traits={"one_process"})
class MemorySender(Sender):
    """Slots in the memory of the process that holds trainer and engine, on its GPU if it has one."""

    receiver, cost = MemoryReceiver, 1
    in_place = ("cpu", "cuda")
    _key = ""

    def open(self) -> Offer:
        # With the host name: process ids repeat across machines, and a wrong match would load another trainer's weights.
        self._key = f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        # On the GPU if there is one: through host memory each byte would cross the bus twice.
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.slots = [torch.empty(self.slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        _open[self._key] = self
        return Offer("memory", self.slot_bytes, self.receivers, (self._key,))

    def close(self) -> None:
        _open.pop(self._key, None)
        super().close()


# Route `shared`

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")


class SharedReceiver(Receiver):
    def open(self) -> None:
        token, *files = self.offer.where[: 1 + SLOTS]
        for name in files:
            # Checked before mapping, which would create a missing file and lengthen a short one. The token detects a file of
            # the same name from another machine.
            if not Path(name).is_file() or Path(name).stat().st_size != self.offer.slot_bytes:
                raise ConfigError("weights.route = shared: the engine and the trainer do not share memory (two machines?)")
            slot = torch.from_file(name, shared=True, size=self.offer.slot_bytes, dtype=torch.uint8)
            check_token(slot, token, "shared")
            self.slots.append(slot)
            pin(slot)

    def close(self) -> None:
        for slot in self.slots:
            unpin(slot)
        super().close()


@ROUTES.register("shared")
class SharedSender(Sender):
    """Files in `/dev/shm` that both ends, processes of one machine, map; they are then unlinked."""

    receiver, cost = SharedReceiver, 2
    _files: tuple[Path, ...] = ()
    """Files not yet unlinked."""

    def open(self) -> Offer:
        if not FOLDER.is_dir():
            raise ConfigError(f"weights.route = shared: this machine has no {FOLDER}")
        token = os.urandom(TOKEN_BYTES)
        for _ in range(SLOTS):
            descriptor, name = tempfile.mkstemp(prefix="agentrl-weights-", dir=FOLDER)
            self._files += (Path(name),)
            try:
                # With too little memory this fails now with an error; otherwise a later write would raise SIGBUS.
                os.posix_fallocate(descriptor, 0, self.slot_bytes)
            except OSError as problem:
                self.close()
                raise ConfigError(
                    f"weights.route = shared: no room in {FOLDER} for {SLOTS} buckets of {self.slot_bytes >> 20} MiB "
                    f"({problem.strerror}); lower weights.bucket_mib"
                ) from problem
            finally:
                os.close(descriptor)
            slot = torch.from_file(name, shared=True, size=self.slot_bytes, dtype=torch.uint8)
            slot[:TOKEN_BYTES] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
            self.slots.append(slot)
            pin(slot)
        return Offer("shared", self.slot_bytes, self.receivers, (token.hex(), *map(str, self._files)))

    def attached(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files = ()

    def close(self) -> None:
        self.attached()
        for slot in self.slots:
            unpin(slot)
        super().close()


def pin(slot: Tensor) -> None:
    """Register a slot as pinned memory with CUDA, if this process has a GPU, for direct copies. A failure (such as a limit on
    locked memory) only costs speed."""
    if torch.cuda.is_available():
        error = torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.numel(), 0)  # type: ignore[no-untyped-call]
        if int(error):
            log.warning("weights.route = shared: a bucket could not be pinned (CUDA error %d): copies take longer", int(error))


def unpin(slot: Tensor) -> None:
    """Undo `pin`; required before the memory is unmapped."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())  # type: ignore[no-untyped-call]


# Route `disk`

TOKEN = "token"
HEAD = 64
"""Bytes of a file's header, the bucket's number as text; a multiple of the tensors' alignment."""
STALE_S = 60.0
"""Seconds for which a receiver retries if a file does not hold the announced bucket."""


def _head(number: int) -> bytes:
    return f"agentrl weights, bucket {number}".encode().ljust(HEAD)


class DiskReceiver(Receiver):
    def open(self) -> None:
        folder, token = self.offer.where
        note = Path(folder) / TOKEN
        # The token detects another folder of the same path on another machine.
        if not note.is_file() or note.read_text() != token:
            raise ConfigError(
                f"weights.route = disk: the engine does not see the trainer's folder {folder}; "
                "set weights.folder to one that all machines share"
            )

    def receive(self, bucket: Bucket) -> list[Named]:
        """Map the tensors of a bucket. Raises EngineError if the file does not hold the bucket within STALE_S."""
        path, _, number = bucket.file.rpartition(":")
        size, until = HEAD + bucket.nbytes, time.monotonic() + STALE_S
        while True:
            # Reopened for each bucket, since only then does a network file system fetch writes of other machines.
            with Path(path).open("rb") as file:
                if file.read(HEAD) == _head(int(number)) and os.fstat(file.fileno()).st_size >= size:
                    # Mapped, to read directly from the page cache.
                    return bucket.cut(torch.from_file(path, shared=False, size=size, dtype=torch.uint8)[HEAD:])
            if time.monotonic() > until:
                raise EngineError(
                    f"weights.route = disk: {path} does not hold bucket {number}, {STALE_S:g} s after it was written"
                )
            time.sleep(0.05)


@ROUTES.register("disk")
class DiskSender(Sender):
    """Files in a new subfolder of a folder shared by all machines."""

    receiver, cost = DiskReceiver, 4
    in_place = ("cpu",)
    _folder: Path | None = None
    _number = 0

    def open(self) -> Offer:
        parent = self.folder or tempfile.gettempdir()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=parent))
            token = os.urandom(16).hex()
            (self._folder / TOKEN).write_text(token)
        except OSError as problem:
            raise ConfigError(f"weights.route = disk: cannot write to weights.folder {parent}: {problem}") from problem
        # One buffer serves both slots, since it is free once the slot's file is written.
        self.slots = [torch.empty(self.slot_bytes, dtype=torch.uint8)] * SLOTS
        return Offer("disk", self.slot_bytes, self.receivers, (str(self._folder), token))

    def ship(self, bucket: Bucket) -> Bucket:
        assert self._folder is not None
        self._number += 1
        path = self._folder / f"bucket{bucket.slot}"
        # Not truncated, since receivers map the file. Closing makes a network file system flush its cache.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            file.write(_head(self._number))
            # In order: lent tensors from their own memory, the others from the buffer.
            buffer, at, parts = self.slots[bucket.slot].numpy().data, 0, list[memoryview]()
            for entry in bucket.entries:
                if entry.lent is not None:
                    region, start = entry.lent
                    parts += [buffer[at : entry.offset], self.lent.regions[region].numpy().data[start : start + entry.nbytes]]
                    at = entry.offset + entry.nbytes
            for part in (*parts, buffer[at : bucket.nbytes]):
                while part:
                    part = part[file.write(part) :]
        return Bucket(bucket.slot, bucket.nbytes, bucket.entries, f"{path}:{self._number}")

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        super().close()
