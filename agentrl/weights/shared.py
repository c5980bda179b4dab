"""Route `shared`: both processes map the same memory, so a bucket is written once and read in place.

The segments are unlinked as soon as every receiver has mapped them, so a killed process leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.bucket import Bucket, Named
from agentrl.weights.route import ROUTES, SLOTS, Offer, Receiver, Route, Sender

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
TOKEN_BYTES = 16


class SharedSender(Sender):
    """See the module."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(max(slot_bytes, TOKEN_BYTES), receivers)
        self._files: list[Path] = []
        self._slots: list[Tensor] = []
        self._open = False

    def open(self) -> Offer:
        if not FOLDER.is_dir():
            raise ConfigError(f"weights.route = shared: this machine has no {FOLDER}")
        token = os.urandom(TOKEN_BYTES)
        for _ in range(SLOTS):
            self._make(token)
        return Offer("shared", self.slot_bytes, self.receivers, (token.hex(), *map(str, self._files)))

    def _make(self, token: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix="agentrl-weights-", dir=FOLDER)
        self._files.append(Path(name))
        try:
            # If there is too little memory, this fails now with an error; without it, a later write would raise SIGBUS.
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
        self._slots.append(slot)
        pin(slot)

    def attached(self) -> None:
        self._unlink()

    def slot(self, number: int) -> Tensor:
        return self._slots[number]

    def ship(self, bucket: Bucket) -> Bucket:
        return bucket

    def close(self) -> None:
        self._unlink()
        for slot in self._slots:
            unpin(slot)
        self._slots.clear()

    def _unlink(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
        self._files.clear()


class SharedReceiver(Receiver):
    """See the module."""

    def __init__(self, offer: Offer, index: int) -> None:
        super().__init__(offer, index)
        self._slots: list[Tensor] = []

    def open(self) -> None:
        token, *files = self.offer.where[: 1 + SLOTS]
        for name in files:
            # A file of this name that was made on another machine does not hold the token.
            # Before mapping, which would create a missing file and lengthen a short one.
            if not Path(name).is_file() or Path(name).stat().st_size != self.offer.slot_bytes:
                raise ConfigError("weights.route = shared: the engine and the trainer do not share memory (two machines?)")
            slot = torch.from_file(name, shared=True, size=self.offer.slot_bytes, dtype=torch.uint8)
            if bytes(slot[:TOKEN_BYTES].tolist()).hex() != token:
                raise ConfigError("weights.route = shared: the engine does not read the memory that the trainer writes")
            self._slots.append(slot)
            pin(slot)

    def receive(self, bucket: Bucket) -> list[Named]:
        return bucket.cut(self._slots[bucket.slot])

    def close(self) -> None:
        for slot in self._slots:
            unpin(slot)
        self._slots = []


def pin(slot: Tensor) -> None:
    """Register the memory with CUDA, if this process has a GPU: copies between the two then need no buffer in between. A refusal
    (a limit on locked memory, say) costs speed alone."""
    if torch.cuda.is_available():
        error = torch.cuda.cudart().cudaHostRegister(slot.data_ptr(), slot.numel(), 0)  # type: ignore[no-untyped-call]
        if int(error):
            log.warning("weights.route = shared: a bucket could not be pinned (CUDA error %d): copies take longer", int(error))


def unpin(slot: Tensor) -> None:
    """Undo `pin`, which must be done before the memory is unmapped."""
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(slot.data_ptr())  # type: ignore[no-untyped-call]


@ROUTES.register("shared")
class SharedRoute(Route):
    """See the module."""

    cost = 2
    receiver = SharedReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return SharedSender(slot_bytes, receivers)
