"""The unit of transfer: buckets of bytes, and entries that say where each tensor is in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    element. `source` is the name that it was packed under."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    source: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """The description of one bucket: `nbytes` bytes in slot `slot` (see Sender), cut into `entries`. `file` is used by the
    disk route only."""

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
        entries = [[e.name, e.dtype, list(e.shape), e.offset, e.source] for e in self.entries]
        return (self.slot, self.nbytes, self.file, entries)

    def cut(self, flat: Tensor) -> list[Named]:
        """The tensors inside the bucket's bytes `flat`, uint8 [nbytes or more], without a copy."""
        return [(entry.name, tensor_in(flat, entry)) for entry in self.entries]

    @classmethod
    def from_plain(cls, plain: PlainBucket) -> Bucket:
        slot, nbytes, file, entries = plain
        cut = tuple(TensorEntry(name, dtype, tuple(shape), at, source) for name, dtype, shape, at, source in entries)
        return cls(slot, nbytes, cut, file)


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


def fill(stream: Stream, room: int, buffer: Tensor | None, align: int = ALIGN) -> tuple[list[TensorEntry], int]:
    """Pack tensors into `buffer` (uint8 [room]) until the next one does not fit; returns entries and bytes used.

    Each begins at a multiple of `align` bytes; a tensor that could not be read there, since a view of another type must start at
    a multiple of its size, begins the next bucket.

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
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), used, name))
        if buffer is not None:
            tensor_in(buffer, entries[-1]).copy_(tensor.detach())
        used += -(-tensor.nbytes // align) * align
        stream.advance()
    # The last tensor's alignment may reach past the buffer.
    return entries, min(used, room)


def tensor_in(buffer: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor of an entry inside a bucket, without a copy."""
    return buffer[entry.offset : entry.offset + entry.nbytes].view(torch_dtype(entry.dtype)).view(entry.shape)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of the name `name`, for example "bfloat16"."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
