"""Route `disk`: buckets as safetensors files in a folder that both sides see. The slowest route, and the last resort."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.bucket import Bucket, Named, tensor_in
from agentrl.weights.route import ROUTES, Offer, Receiver, Route, Sender

TOKEN = "token"


class DiskSender(Sender):
    """See the module. `parent`: the shared folder, in which the sender creates a folder of its own."""

    def __init__(self, slot_bytes: int, receivers: int, parent: Path) -> None:
        super().__init__(slot_bytes, receivers)
        self._parent = parent
        self._folder: Path | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

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
        file = self._folder / f"bucket{bucket.slot}.safetensors"
        save_file({entry.source: tensor_in(self._buffer, entry) for entry in bucket.entries}, file)
        return Bucket(bucket.slot, bucket.nbytes, bucket.entries, str(file))

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


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
        with safe_open(bucket.file, framework="pt") as file:
            return [(entry.name, file.get_tensor(entry.source)) for entry in bucket.entries]

    def close(self) -> None:
        return None


@ROUTES.register("disk")
class DiskRoute(Route):
    """See the module."""

    cost = 4
    receiver = DiskReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return DiskSender(slot_bytes, receivers, Path(cfg.folder or tempfile.gettempdir()))
