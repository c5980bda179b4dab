"""Weight transfer from the trainer's ranks to the engine's processes, in buckets of bounded size.

Buckets, the two ends of a route and their registry, and the interface of a trainable engine."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.config.schema import WeightsConfig
from agentrl.utils.errors import ConfigError, EngineError
from agentrl.utils.registry import Registry

# Buckets

ALIGN = 64
"""Alignment of tensors in a bucket, in bytes; PACKED: without gaps."""
PACKED = 1
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: parameter name, torch `dtype`, and its `nbytes` bytes from `offset` on. `source`: name under which
    it was packed. `lent`: (region, byte) of the sender's memory that holds the tensor if it was not copied (see Lent)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: str
    lent: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Description of one bucket: `nbytes` bytes in slot `slot` (see Sender), divided into `entries`. `file`, on the disk route:
    PATH:NUMBER of the bucket."""

    slot: int
    nbytes: int
    entries: tuple[TensorEntry, ...]
    file: str = ""

    def with_aliases(self, tied: Mapping[str, str]) -> Bucket:
        """Return the bucket with each tied parameter also listed under its other names. `tied`: other name -> name."""
        more = [replace(entry, name=alias) for entry in self.entries for alias, name in tied.items() if name == entry.name]
        return replace(self, entries=(*self.entries, *more))

    def cut(self, flat: Tensor, regions: Sequence[Tensor] = ()) -> list[Named]:
        """Return the tensors as views of the bucket's bytes `flat`, uint8 [nbytes or more]; lent ones as views of `regions`
        (each uint8), if given."""
        found = []
        for entry in self.entries:
            whole, start = flat, entry.offset
            if entry.lent is not None and regions:
                whole, start = regions[entry.lent[0]], entry.lent[1]
            tensor = whole[start : start + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
            found.append((entry.name, tensor))
        return found


class Lent:
    """Tensors that a receiver may read in place; `regions` are uint8 views of their bytes.

    Their memory must stay allocated, and may only change between publishes."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        whole = {tensor.data_ptr(): tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()}
        self.regions = [whole[start] for start in sorted(whole)]
        self._starts = sorted(whole)

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the region that holds a whole tensor and the tensor's first byte in it; None if no region does."""
        start = tensor.data_ptr()
        at = bisect_right(self._starts, start) - 1
        if at < 0 or not tensor.is_contiguous():
            return None
        offset = start - self._starts[at]
        return (at, offset) if offset + tensor.nbytes <= self.regions[at].numel() else None


# Routes

SLOTS = 2
TOKEN_BYTES = 16
"""Length of the token at the start of a slot, with which a receiver verifies that it maps the sender's memory."""


def check_token(slot: Tensor, token: str, route: str) -> None:
    """Raise ConfigError if a mapped slot does not begin with the trainer's token."""
    if bytes(slot[:TOKEN_BYTES].tolist()).hex() != token:
        raise ConfigError(f"weights.route = {route}: the engine does not read the memory that the trainer writes")


@dataclass(frozen=True, slots=True)
class Offer:
    """Facts that a receiver needs to attach: route name, bytes per slot, number of receivers, and `where` (paths, a key or an
    address, depending on the route)."""

    route: str
    slot_bytes: int
    receivers: int
    where: tuple[str, ...]


class Sender(ABC):
    """Trainer's end of a route, on rank 0; it names the engine's end. A file in agentrl/engines/weights, or in `plugins/` of a
    shelf, adds a route. Other ranks have an unopened sender: they take part in gathering each tensor, which is a collective,
    and drop it."""

    receiver: ClassVar[type[Receiver]]
    cost: ClassVar[float] = math.inf
    """Rank among the routes that `weights.route = "auto"` tries, lowest first; infinite: used only when named."""
    align = ALIGN
    """Alignment of tensors in a bucket, in bytes."""
    in_place: ClassVar[tuple[str, ...]] = ()
    """Device types whose memory the route's receivers read in place."""
    every_rank: ClassVar[bool] = False
    """Whether every rank of the trainer fills buckets, not only rank 0; `open` is then a collective."""

    def __init__(self, slot_bytes: int, receivers: int, folder: str | None = None, host: str = "") -> None:
        """`slot_bytes`: size of a bucket; no tensor may be larger. `folder`: `weights.folder`. `host`: this machine's address as
        seen by the engine's machines."""
        self.slot_bytes, self.receivers = max(slot_bytes, TOKEN_BYTES), receivers
        self.folder, self.host = folder, host
        self.slots: list[Tensor] = []
        """Buffers, uint8 [slot_bytes] each, allocated by `open`; before that, `buckets` copies nothing."""
        self.lent = Lent()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Offer tensors to be read in place (see Lent), before `open`; on other device types they are copied."""
        self.lent = Lent(tensor for tensor in tensors if tensor.device.type in self.in_place)

    @abstractmethod
    def open(self) -> Offer:
        """Create the channel. Raises ConfigError if this machine cannot serve the route."""

    def attached(self) -> None:
        """Finish the setup after all receivers have attached. Raises ConfigError if they cannot be reached."""
        return None

    def buckets(self, tensors: Iterator[Named]) -> Iterator[Bucket | None]:
        """Pack tensors into the slots in turn, and yield each shipped bucket once the next tensor does not fit.

        Yields None per bucket on an unopened sender. A tensor whose offset is no multiple of its item size, as a view requires,
        begins the next bucket. A `lent` tensor takes its room in the bucket, so that buckets stay the unit of progress, but is
        not copied. Raises ValueError if a tensor is larger than an empty bucket."""
        slot, used, entries = 0, 0, list[TensorEntry]()
        for name, tensor in tensors:
            if used + tensor.nbytes > self.slot_bytes or used % tensor.itemsize:
                if tensor.nbytes > self.slot_bytes:
                    raise ValueError(f"weight {name!r} has {tensor.nbytes} bytes, a bucket {self.slot_bytes}")
                yield self.ship(Bucket(slot, used, tuple(entries))) if self.slots else None
                # No receiver still reads the next slot: the driver continues once all have loaded the bucket before the last.
                slot, used, entries = (slot + 1) % SLOTS, 0, []
            dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            entries.append(TensorEntry(name, dtype, shape, used, tensor.nbytes, name, self.lent.find(tensor)))
            if self.slots and entries[-1].lent is None:
                self.slots[slot][used : used + tensor.nbytes].view(tensor.dtype).view(shape).copy_(tensor.detach())
            # The last tensor's alignment may reach past the slot.
            used = min(used + -(-tensor.nbytes // self.align) * self.align, self.slot_bytes)
            del tensor  # before the next one is gathered: two whole layers must not be in memory at once
        if entries:
            yield self.ship(Bucket(slot, used, tuple(entries))) if self.slots else None

    def ship(self, bucket: Bucket) -> Bucket:
        """Make a filled slot available to the receivers. Returns the bucket to announce to them."""
        return bucket

    def close(self) -> None:
        """Free all resources; idempotent."""
        self.slots.clear()
        self.lent.regions.clear()  # a receiver of this process has the same list


class Receiver(ABC):
    """Engine's end of a route, one per process that holds weights. `index`: number among these, from 0."""

    def __init__(self, offer: Offer, index: int) -> None:
        self.offer, self.index = offer, index
        self.slots: list[Tensor] = []
        """The sender's slots, on a route that maps them; set by `open`, like the lent regions."""
        self.regions: list[Tensor] = []

    @abstractmethod
    def open(self) -> None:
        """Attach to the sender. Raises ConfigError with the reason if the route cannot serve this process."""

    def receive(self, bucket: Bucket) -> list[Named]:
        """Return the tensors of a bucket; they are valid until the caller answers the driver, so clone a tensor to keep it."""
        return bucket.cut(self.slots[bucket.slot], self.regions)

    def close(self) -> None:
        """Free all resources; idempotent."""
        self.slots, self.regions = [], []


ROUTES: Registry[type[Sender]] = Registry(
    "weights.route",
    "ROUTES",
    "agentrl.engines.weights",
    traits={
        "one_process": "stays within one process, so trainer and engine must be in the driver's process",
        "cuda": "copies from GPU to GPU, and needs one at both ends",
        "own_gpus": "the engine must be on the trainer's GPUs (rollout.colocate)",
        "other_gpus": "the engine must be on other GPUs than the trainer's",
    },
)


# Engines that take weights

WakeStage = Literal["weights", "cache"]


class MembersChangedError(EngineError):
    """A process of the engine was replaced after the route was attached; attach again."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA adapter: W + alpha / rank * B A in some linear layers. `tensors`: `{layer}.lora_A.weight` [rank, in] and
    `{layer}.lora_B.weight` [out, rank], in host memory."""

    rank: int
    alpha: float
    tensors: dict[str, Tensor]


class WeightTarget(ABC):
    """Mixin of a trainable engine (an API model or a replay lacks it). The caller pauses the engine before it replaces
    weights, and resumes it afterwards.

    `loads_saved`: it takes weights by their checkpoint names (experts one by one) instead of those of transformers' modules
    (experts of a layer in one tensor).
    """

    loads_saved: ClassVar[bool] = False

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling after the current step; requests stay queued and keep their tokens."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`. The caches of running requests are recomputed with the current weights."""

    async def sleep(self) -> None:
        """Free the memory of weights and caches for the trainer. The engine must be paused, with no running request. Raises
        EngineError if it cannot sleep."""
        raise EngineError(f"{type(self).__name__} cannot sleep")

    async def wake(self, stage: WakeStage) -> None:
        """Allocate memory again: first "weights", before new weights are received, then "cache", when the trainer has freed the
        memory for sending them. Does nothing if the engine is awake."""
        return None

    async def wait_until_starved(self) -> None:
        """Return once a new process, which replaced another one, lacks the current weights; by default never."""
        await asyncio.get_running_loop().create_future()

    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """Return the names of the processes that load weights, in receiver order; a replaced process gets a new name."""

    @abstractmethod
    async def attach(self, offer: Offer) -> None:
        """Open a receiver in every member, and close earlier ones. Raises ConfigError with the reason if the route cannot serve
        a member, MembersChangedError if one dies."""

    @abstractmethod
    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        """Replace the weights and drop all caches. Raises EngineError if a parameter is missing, unknown or of a wrong shape;
        the engine then refuses requests until it has complete weights. Raises MembersChangedError, without any change, if a
        member has no receiver."""

    @abstractmethod
    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Apply an adapter to the initial weights, in place of an earlier one. Raises EngineError if it does not fit the
        model."""


# Routes by name

GPU_MIB, CPU_MIB = 256, 64
"""Default `weights.bucket_mib` with and without GPUs: larger on GPUs, since each bucket waits for the GPU's queue."""


def auto_routes() -> tuple[str, ...]:
    """Return the routes that `weights.route = "auto"` tries, cheapest first; each one checks if it can serve."""
    tried = [entry for entry in ROUTES.own() if math.isfinite(entry.make.cost)]
    return tuple(entry.name for entry in sorted(tried, key=lambda entry: entry.make.cost))


def make_sender(name: str, cfg: WeightsConfig, largest: int, receivers: int, host: str) -> Sender:
    """Make the trainer's end. `largest`: bytes of the largest tensor; `host`: this machine's address for the engine's machines.

    Raises ConfigError for an unknown route."""
    mib = cfg.bucket_mib or (GPU_MIB if torch.cuda.is_available() else CPU_MIB)
    size = max(int(mib * 2**20), largest)  # no tensor is ever split over buckets
    return ROUTES.entry(name).make(size, receivers, cfg.folder, host)


def open_receiver(offer: Offer, index: int) -> Receiver:
    """Open the engine's end. Raises ConfigError with the reason if it cannot attach."""
    receiver = ROUTES.entry(offer.route).make.receiver(offer, index)
    receiver.open()
    return receiver
