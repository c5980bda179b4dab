"""Weights from the trainer's ranks to the engine's processes, a bounded bucket at a time.

Buckets of bytes, the two ends of a route and their registry, and the interface of an engine whose
weights can be replaced."""

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
"""Bytes at whose multiples tensors begin in a bucket; PACKED: they follow each other without gaps."""
PACKED = 1
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its parameter's name, `dtype` as torch names it, and its `nbytes` bytes from `offset` on. `source`
    is the name that it was packed under. `lent`: it was not copied into the bucket, but lies in that one of the sender's regions
    (see Lent), from that byte on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    source: str
    lent: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """The description of one bucket: `nbytes` bytes in slot `slot` (see Sender), cut into `entries`. `file` is used by the
    disk route only: where the bytes are, a colon, and the bucket's number."""

    slot: int
    nbytes: int
    entries: tuple[TensorEntry, ...]
    file: str = ""

    def with_aliases(self, tied: Mapping[str, str]) -> Bucket:
        """The same bytes, with a tied parameter also listed under its other names. `tied`: other name -> name."""
        more = [replace(entry, name=alias) for entry in self.entries for alias, name in tied.items() if name == entry.name]
        return replace(self, entries=(*self.entries, *more))

    def cut(self, flat: Tensor, regions: Sequence[Tensor] = ()) -> list[Named]:
        """The tensors inside the bucket's bytes `flat`, uint8 [nbytes or more], without a copy; those that were lent inside of
        `regions` (each uint8), if they are given."""
        found = []
        for entry in self.entries:
            whole, start = flat, entry.offset
            if entry.lent is not None and regions:
                whole, start = regions[entry.lent[0]], entry.lent[1]
            tensor = whole[start : start + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
            found.append((entry.name, tensor))
        return found


class Lent:
    """Tensors that a receiver may read where they are: `regions` are their bytes, uint8, as views.

    Their memory must stay where it is, and its bytes must change between publishes only."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        whole = {tensor.data_ptr(): tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()}
        self.regions = [whole[start] for start in sorted(whole)]
        self._starts = sorted(whole)

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """The region in which a tensor lies as a whole, and the byte from which on; None if it lies in none."""
        start = tensor.data_ptr()
        at = bisect_right(self._starts, start) - 1
        if at < 0 or not tensor.is_contiguous():
            return None
        offset = start - self._starts[at]
        return (at, offset) if offset + tensor.nbytes <= self.regions[at].numel() else None


# Routes

SLOTS = 2
TOKEN_BYTES = 16
"""Bytes at the start of a slot that a sender writes, by which a receiver that maps it sees that it is the sender's own."""


def check_token(slot: Tensor, token: str, route: str) -> None:
    """Raise ConfigError if a mapped slot does not begin with what the trainer wrote there."""
    if bytes(slot[:TOKEN_BYTES].tolist()).hex() != token:
        raise ConfigError(f"weights.route = {route}: the engine does not read the memory that the trainer writes")


@dataclass(frozen=True, slots=True)
class Offer:
    """Facts that a receiver must know: the route's name, bytes per slot, number of receivers, and `where` (paths, a key or an
    address, depending on the route)."""

    route: str
    slot_bytes: int
    receivers: int
    where: tuple[str, ...]


class Sender(ABC):
    """The trainer's end, on rank 0. `slot_bytes`: the size of a bucket; no tensor may be larger. Other ranks have it too, but do
    not open it: they take the same tensors, because each is a collective, and drop them."""

    align = ALIGN
    """Tensors begin at its multiples in a bucket."""
    in_place: ClassVar[tuple[str, ...]] = ()
    """Types of devices whose memory a receiver of the route reads in place."""
    every_rank: ClassVar[bool] = False
    """Whether every rank of the trainer fills buckets, and not only rank 0; `open` is then a collective."""

    def __init__(self, slot_bytes: int, receivers: int) -> None:
        self.slot_bytes, self.receivers = max(slot_bytes, TOKEN_BYTES), receivers
        self.slots: list[Tensor] = []
        """The bytes of each, uint8 [slot_bytes], made by `open`; none before, and then tensors are only counted."""
        self.lent = Lent()

    def lend(self, tensors: Sequence[Tensor]) -> None:
        """Called before `open` with tensors that may be read in place (see Lent); those that cannot be are copied."""
        self.lent = Lent(tensor for tensor in tensors if tensor.device.type in self.in_place)

    @abstractmethod
    def open(self) -> Offer:
        """Create the channel. Raises ConfigError if this machine cannot serve the route."""

    def attached(self) -> None:
        """Called when all receivers have attached. Raises ConfigError if they cannot be reached after all."""
        return None

    def buckets(self, tensors: Iterator[Named]) -> Iterator[Bucket | None]:
        """Pack the tensors into one slot after the other, and ship each once the next tensor does not fit; None without slots.

        A tensor that could not be read at the next multiple of `align`, since a view of another type must start at a multiple of
        its size, begins the next bucket. One that is `lent` takes its room in the bucket, so that buckets stay the unit of
        progress, but is not copied. Raises ValueError if a tensor is larger than an empty bucket."""
        slot, used, entries = 0, 0, list[TensorEntry]()
        for name, tensor in tensors:
            if used + tensor.nbytes > self.slot_bytes or used % tensor.itemsize:
                if tensor.nbytes > self.slot_bytes:
                    raise ValueError(f"weight {name!r} has {tensor.nbytes} bytes, a bucket {self.slot_bytes}")
                yield self.ship(Bucket(slot, used, tuple(entries))) if self.slots else None
                # No receiver reads the next slot any more: the driver asks only when all have loaded the bucket before the last.
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
        """Make a filled slot available to the receivers; returns the bucket to tell them."""
        return bucket

    def close(self) -> None:
        """Free everything; idempotent."""
        self.slots.clear()
        self.lent.regions.clear()  # a receiver of this process has the same list


class Receiver(ABC):
    """The engine's end, one per process that holds weights. `index`: from 0, over all of these."""

    def __init__(self, offer: Offer, index: int) -> None:
        self.offer, self.index = offer, index
        self.slots: list[Tensor] = []
        """The sender's, of a route that maps them: set by `open`, as the regions that it lends are."""
        self.regions: list[Tensor] = []

    @abstractmethod
    def open(self) -> None:
        """Attach. Raises ConfigError with the reason if the route cannot serve this process."""

    def receive(self, bucket: Bucket) -> list[Named]:
        """The tensors of a bucket. They are valid until the caller answers the driver: clone a tensor to keep it."""
        return bucket.cut(self.slots[bucket.slot], self.regions)

    def close(self) -> None:
        """Free everything; idempotent."""
        self.slots, self.regions = [], []


class Route(ABC):
    """Both ends of a route: one file in agentrl/engines/weights, or in `plugins/` of a shelf, adds a route."""

    cost: ClassVar[float] = math.inf
    """Its place in the order that `weights.route = "auto"` tries, the cheapest first; infinite: used only if it is named."""
    receiver: ClassVar[type[Receiver]]

    @abstractmethod
    def sender(self, cfg: WeightsConfig, slot_bytes: int, receivers: int, host: str) -> Sender:
        """The trainer's end; `host` is the address at which the engine's machines reach this one."""


ROUTES: Registry[type[Route]] = Registry(
    "weights.route",
    "ROUTES",
    "agentrl.engines.weights",
    traits={
        "one_process": "stays within a process, so trainer and engine must be in the driver's",
        "cuda": "goes from GPU to GPU, and needs one at both ends",
        "own_gpus": "the engine must be on the trainer's GPUs (rollout.colocate)",
        "other_gpus": "the engine must be on other GPUs than the trainer's",
    },
)


# Engines that take weights

WakeStage = Literal["weights", "cache"]


class MembersChangedError(EngineError):
    """A process of the engine was replaced after the route was attached: attach again."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank change of some linear layers: W + alpha / rank * B A. `tensors`: `{layer}.lora_A.weight` [rank, in] and
    `{layer}.lora_B.weight` [out, rank], on the host."""

    rank: int
    alpha: float
    tensors: dict[str, Tensor]


class WeightTarget(ABC):
    """Mixed into an engine that can be trained; one without it (an API model, a replay) cannot. The caller that replaces
    weights pauses the engine before and resumes it afterwards.

    `loads_saved`: it takes weights by the names that checkpoints have (experts one by one), and not by those of transformers'
    modules (experts of a layer in one tensor).
    """

    loads_saved: ClassVar[bool] = False

    @abstractmethod
    async def pause(self) -> None:
        """Stop sampling after the current step; requests stay queued and keep the tokens that they sampled."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `pause`. The caches of running requests are recomputed with the current weights."""

    async def sleep(self) -> None:
        """Free the memory of weights and caches while the trainer uses it. The caller has paused the engine, and
        nothing is running. Raises EngineError if the engine cannot do so."""
        raise EngineError(f"{type(self).__name__} cannot sleep")

    async def wake(self, stage: WakeStage) -> None:
        """Allocate memory again, in two stages: "weights" before new weights come, "cache" after them, when the trainer has
        freed the memory that it needed to send them. Does nothing if the engine is awake."""
        return None

    async def wait_until_starved(self) -> None:
        """Return once a process lacks the current weights because it replaced another one. Never, by default."""
        await asyncio.get_running_loop().create_future()

    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """The processes that load weights, in the order of their receivers; a name changes if one is replaced."""

    @abstractmethod
    async def attach(self, offer: Offer) -> None:
        """Open a receiver in every member; an earlier one is closed. Raises ConfigError with the reason if the route cannot
        serve a member, MembersChangedError if one died meanwhile."""

    @abstractmethod
    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        """Replace the weights and drop all caches. Raises EngineError if a parameter is missing, unknown or of another
        shape; the engine then refuses to generate until it has received complete weights. Raises MembersChangedError, before
        anything is changed, if a member has no receiver."""

    @abstractmethod
    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Use this adapter on top of the weights that the engine started with, replacing an earlier one. Raises EngineError
        if it does not fit the model."""


# Routes by name

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
