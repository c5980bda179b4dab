"""The unit of transfer: buckets of bytes, and entries that say where each tensor is in a bucket."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
"""Bytes at whose multiples tensors begin in a bucket; PACKED: they follow each other without gaps."""
PACKED = 1
Named = tuple[str, Tensor]
PlainBucket = tuple[int, int, str, list[list[Any]]]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a bucket: its parameter's name, `dtype` as torch names it, and the byte `offset` of its first
    element. `source` is the name that it was packed under. `lent`: it was not copied into the bucket, but lies in that one of
    the sender's regions (see Lent), from that byte on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    source: str
    lent: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * torch_dtype(self.dtype).itemsize


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

    def to_plain(self) -> PlainBucket:
        """The same as plain values, for channels that cannot carry classes (such as vLLM's RPC)."""
        entries = [[e.name, e.dtype, list(e.shape), e.offset, e.source, e.lent] for e in self.entries]
        return (self.slot, self.nbytes, self.file, entries)

    def cut(self, flat: Tensor, regions: Sequence[Tensor] = ()) -> list[Named]:
        """The tensors inside the bucket's bytes `flat`, uint8 [nbytes or more], without a copy; those that were lent inside of
        `regions` (each uint8), if they are given."""
        return [(entry.name, tensor_in(flat, entry, regions)) for entry in self.entries]

    @classmethod
    def from_plain(cls, plain: PlainBucket) -> Bucket:
        slot, nbytes, file, entries = plain
        cut = tuple(
            TensorEntry(name, dtype, tuple(shape), at, source, None if lent is None else (lent[0], lent[1]))
            for name, dtype, shape, at, source, lent in entries
        )
        return cls(slot, nbytes, cut, file)


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


NOTHING_LENT = Lent()


class Stream:
    """Tensors in order, with a peek at the next one, because filling a bucket requires to know whether it still fits."""

    def __init__(self, tensors: Iterator[Named]) -> None:
        self._tensors = tensors
        self._next = next(tensors, None)

    @property
    def done(self) -> bool:
        return self._next is None

    def peek(self) -> Named:
        """The next tensor, without consuming it. It is valid until `advance` is called."""
        assert self._next is not None
        return self._next

    def advance(self) -> None:
        self._next = None  # drops the last reference first: two whole layers must not be in memory at once
        self._next = next(self._tensors, None)


def fill(
    stream: Stream, room: int, buffer: Tensor | None, align: int = ALIGN, lent: Lent = NOTHING_LENT
) -> tuple[list[TensorEntry], int]:
    """Pack tensors into `buffer` (uint8 [room]) until the next one does not fit; returns entries and bytes used.

    Each begins at a multiple of `align` bytes; a tensor that could not be read there, since a view of another type must start at
    a multiple of its size, begins the next bucket. A tensor that is `lent` takes its room in the bucket, so that buckets stay
    the unit of progress, but is not copied.

    Without a buffer the tensors are only counted, which keeps ranks other than 0 in step. Raises ValueError if a tensor
    is larger than an empty bucket.
    """
    entries: list[TensorEntry] = []
    used = 0
    while not stream.done:
        name, tensor = stream.peek()
        if used + tensor.nbytes > room or used % tensor.itemsize:
            if not entries:
                raise ValueError(f"weight {name!r} has {tensor.nbytes} bytes, a bucket {room}")
            break
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), used, name, lent.find(tensor)))
        if buffer is not None and entries[-1].lent is None:
            tensor_in(buffer, entries[-1]).copy_(tensor.detach())
        used += -(-tensor.nbytes // align) * align
        stream.advance()
    # The last tensor's alignment may reach past the buffer.
    return entries, min(used, room)


def tensor_in(buffer: Tensor, entry: TensorEntry, regions: Sequence[Tensor] = ()) -> Tensor:
    """The tensor of an entry inside a bucket, or inside of `regions` if it was lent and they are given; without a copy."""
    start = entry.offset
    if entry.lent is not None and regions:
        buffer, start = regions[entry.lent[0]], entry.lent[1]
    return buffer[start : start + entry.nbytes].view(torch_dtype(entry.dtype)).view(entry.shape)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of the name `name`, for example "bfloat16"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
