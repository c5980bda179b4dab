"""What travels: buckets of bytes, and entries that say which tensor lies where in one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
Named = tuple[str, Tensor]
Wire = tuple[int, int, str, list[list[Any]]]


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
    """What is told of one bucket: `nbytes` bytes in slot `slot` (see Sender), cut as `entries` say. `file` is the disk
    route's."""

    slot: int
    nbytes: int
    entries: tuple[TensorEntry, ...]
    file: str = ""

    def with_aliases(self, tied: Mapping[str, str]) -> Bucket:
        """The same bytes, a tied parameter also under its further names. `tied`: further name -> name."""
        more = [replace(entry, name=alias) for entry in self.entries for alias, name in tied.items() if name == entry.name]
        return replace(self, entries=(*self.entries, *more))

    def to_wire(self) -> Wire:
        """The same in lists, for channels that carry no classes."""
        entries = [[e.name, e.dtype, list(e.shape), e.offset, e.source] for e in self.entries]
        return (self.slot, self.nbytes, self.file, entries)

    def cut(self, flat: Tensor) -> list[Named]:
        """The tensors inside the bucket's bytes `flat`, uint8 [nbytes or more], without a copy."""
        return [(entry.name, tensor_in(flat, entry)) for entry in self.entries]

    @classmethod
    def from_wire(cls, wire: Wire) -> Bucket:
        slot, nbytes, file, entries = wire
        cut = tuple(TensorEntry(name, dtype, tuple(shape), at, source) for name, dtype, shape, at, source in entries)
        return cls(slot, nbytes, cut, file)


class Stream:
    """Tensors in order, with a look at the next one: whoever fills a bucket must know whether it still fits."""

    def __init__(self, tensors: Iterator[Named]) -> None:
        self._tensors = tensors
        self._next = next(tensors, None)

    @property
    def done(self) -> bool:
        return self._next is None

    def peek(self) -> Named:
        """The next tensor, which stays. It is valid until the call of `advance`."""
        assert self._next is not None
        return self._next

    def advance(self) -> None:
        self._next = None  # the last reference to it, which may be a whole layer's
        self._next = next(self._tensors, None)


def fill(stream: Stream, room: int, buffer: Tensor | None) -> tuple[list[TensorEntry], int]:
    """Pack tensors into `buffer` (uint8 [room]) until the next one does not fit; entries and bytes used.

    Without a buffer the tensors are counted and left: ranks other than 0 stay in step so. A tensor larger
    than an empty bucket raises ValueError.
    """
    entries: list[TensorEntry] = []
    used = 0
    while not stream.done:
        name, tensor = stream.peek()
        if used + tensor.nbytes > room:
            if not entries:
                raise ValueError(f"weight {name!r} has {tensor.nbytes} bytes, a bucket {room}")
            break
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), used, name))
        if buffer is not None:
            tensor_in(buffer, entries[-1]).copy_(tensor.detach())
        used += -(-tensor.nbytes // ALIGN) * ALIGN
        stream.advance()
    return entries, min(used, room)


def tensor_in(buffer: Tensor, entry: TensorEntry) -> Tensor:
    """The tensor of an entry inside a bucket, without a copy."""
    return buffer[entry.offset : entry.offset + entry.nbytes].view(torch_dtype(entry.dtype)).view(entry.shape)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that `str(dtype)` shortens to `name`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
