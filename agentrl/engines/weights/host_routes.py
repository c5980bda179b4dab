"""Routes through host memory and files: `memory`, `shared`, `in_place`, `disk`.

`joined` puts the shards of a machine's ranks together in shared memory."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.engines.weights.base import ALIGN, ROUTES, SLOTS, Bucket, Lent, Named, Offer, Receiver, Route, Sender
from agentrl.utils.errors import ConfigError, EngineError

# Route `memory`

_numbers = itertools.count()
_open: weakref.WeakValueDictionary[str, MemorySender] = weakref.WeakValueDictionary()
"""The senders of this process. Another process has none of them, so it cannot take a copy for their slots."""


class MemorySender(Sender):
    """See the module."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(slot_bytes, receivers)
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

    def close(self) -> None:
        _open.pop(self._key, None)
        super().close()


class MemoryReceiver(Receiver):
    """See the module."""

    def open(self) -> None:
        if self.offer.where[0] not in _open:
            raise ConfigError("weights.route = memory: the engine's weights are in another process than the trainer's")

    def receive(self, bucket: Bucket) -> list[Named]:
        sender = _open[self.offer.where[0]]
        return bucket.cut(sender.slot(bucket.slot), sender.lent.regions)


@ROUTES.register("memory", traits={"one_process"})
class MemoryRoute(Route):
    """See the module."""

    cost = 1
    receiver = MemoryReceiver

    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        return MemorySender(slot_bytes, receivers)


# Route `shared`

log = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
TOKEN_BYTES = 16


class SharedSender(Sender):
    """See the module."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        super().__init__(max(slot_bytes, TOKEN_BYTES), receivers)
        self._files: list[Path] = []

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

    def close(self) -> None:
        self._unlink()
        for slot in self._slots:
            unpin(slot)
        super().close()

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


# Shards of several ranks, joined

JOINED_TOKEN_BYTES = ALIGN
"""Before the first tensor: what rank 0 wrote there, by which the others see that it is the same memory."""


@dataclass(frozen=True, slots=True)
class RowShard:
    """One rank's part of the tensor `name`, of `shape` as a whole: `padded`, the same number of elements on every rank, flat;
    beyond the tensor's last row they mean nothing. `move(memory)` makes `memory`, like `padded`, the shard's place from now
    on; it has the same values."""

    name: str
    shape: tuple[int, ...]
    padded: Tensor
    move: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Joined:
    """The segment `flat`, uint8, and the tensors in it by name: views, which change when a rank writes to its shard."""

    flat: Tensor
    whole: dict[str, Tensor]


def join(shards: Sequence[RowShard], number: int, count: int) -> Joined:
    """Move the shards of `count` ranks, of which this is `number`, into one segment; a collective of all ranks of the process
    group. Raises ConfigError on every rank, and nothing is moved, if one of them cannot reach it."""
    starts, size = _places(shards, count)
    made, problem = _make_segment(size) if number == 0 else ("", "")
    [(file, token), *_] = [each.split(" ") for each in gather_objects(made or "- -")]  # the first rank's
    flat = torch.empty(0, dtype=torch.uint8)
    try:
        if number > 0 and file != "-":
            problem = _unlike(file, token, size)
        if not problem and file != "-":
            flat = _map_segment(file, size)
        refused = [each for each in gather_objects(problem) if each]
    finally:
        if number == 0 and file != "-":
            Path(file).unlink(missing_ok=True)  # each has mapped it, or will not: a kill from here on leaves nothing
    if refused:
        raise ConfigError(f"weights.route = in_place: {refused[0]}")
    whole = {}
    for shard, start in zip(shards, starts, strict=True):
        bytes_here = flat[start + number * shard.padded.nbytes :][: shard.padded.nbytes]
        # A storage that begins there: what copies a state (a checkpoint in the background) takes whole storages, which would be
        # all ranks' weights, and takes a DTensor whose rows begin later in theirs for a plain tensor.
        place = torch.from_numpy(bytes_here.numpy()).view(shard.padded.dtype)
        place.copy_(shard.padded)
        shard.move(place)
        elements = torch.Size(shard.shape).numel()
        every = flat[start:][: elements * shard.padded.itemsize].view(shard.padded.dtype)
        whole[shard.name] = every.view(shard.shape)
    gather_objects("")  # what rank 0 sends is there
    return Joined(flat, whole)


def gather_objects(mine: Any) -> list[Any]:
    """Parts of all ranks, in their order; a collective."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _places(shards: Sequence[RowShard], count: int) -> tuple[list[int], int]:
    """At which byte each tensor begins, and how long the segment is: every tensor has room for the padding of all ranks."""
    starts, at = [], JOINED_TOKEN_BYTES
    for shard in shards:
        starts.append(at)
        at += -(-shard.padded.nbytes * count // ALIGN) * ALIGN
    return starts, at


def _make_segment(size: int) -> tuple[str, str]:
    """A file in shared memory with its token, as "FILE TOKEN"; or why there can be none."""
    if not FOLDER.is_dir():
        return "", f"this machine has no {FOLDER}"
    descriptor, name = tempfile.mkstemp(prefix="agentrl-weights-", dir=FOLDER)
    token = os.urandom(JOINED_TOKEN_BYTES)
    try:
        os.posix_fallocate(descriptor, 0, size)  # without it, a write beyond the memory that is left would end the process
        os.pwrite(descriptor, token, 0)
    except OSError as problem:
        Path(name).unlink()
        return "", f"no room in {FOLDER} for {size >> 20} MiB of weights ({problem.strerror})"
    finally:
        os.close(descriptor)
    return f"{name} {token.hex()}", ""


def _unlike(file: str, token: str, size: int) -> str:
    """Why a file is not the one that rank 0 made; "" if it is."""
    path = Path(file)
    if not path.is_file() or path.stat().st_size != size:
        return "the trainer's ranks do not share memory (several machines?)"
    with path.open("rb") as found:
        return "" if found.read(JOINED_TOKEN_BYTES).hex() == token else "the trainer's ranks do not share memory (another file)"


def _map_segment(file: str, size: int) -> Tensor:
    """The segment, uint8, with a descriptor that stays open: another process finds it by that."""
    descriptor, storages = os.open(file, os.O_RDWR), cast(Any, torch.UntypedStorage)
    try:
        storage = storages._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)  # torch has one of its own
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


# Route `in_place`

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
        files = [_share_region(region) for region in self.lent.regions]
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
    if not FOLDER.is_dir():
        raise ConfigError(f"weights.route = in_place: this machine has no {FOLDER}")
    disk = os.statvfs(FOLDER)
    free, need = disk.f_bavail * disk.f_frsize, sum(tensor.nbytes for tensor in fresh)
    if need * SPARE > free:
        raise ConfigError(f"weights.route = in_place: {need >> 20} MiB of weights, and {free >> 20} MiB free in {FOLDER}")
    most, used = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(list(Path("/proc/self/fd").iterdir()))
    if used + len(fresh) > most // 2:
        raise ConfigError(f"weights.route = in_place: {len(fresh)} weights need a file each, of {most} that the process may open")


def _share_region(region: Tensor) -> str:
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
        self._regions = [_mapped_weights(text) for text in self.offer.where[1 + SLOTS :]]

    def receive(self, bucket: Bucket) -> list[Named]:
        return bucket.cut(self._slots[bucket.slot], self._regions)

    def close(self) -> None:
        super().close()
        self._regions = []


def _mapped_weights(text: str) -> Tensor:
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


# Route `disk`

TOKEN = "token"
HEAD = 64
"""Bytes before a bucket's own, a multiple of what its tensors are aligned to: its number, as text."""
STALE_S = 60.0
"""Time for which a receiver looks again if a file does not have the announced bucket."""


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
