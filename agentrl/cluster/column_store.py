"""Token columns of batches in Ray's object store: each is stored once, for as long as the driver holds it.

A training step ships its batch several times (reference, values, proximal policy, updates), with a column or two
added each time. A column that was put for one call is reused by the next, for every group of workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch
from tensordict import TensorDict

from agentrl.batch.serialization import SerializedBatch, serialize

BY_COLUMN_BYTES = 1 << 20
"""Batches with smaller token columns go as one object: another object costs more than copying them."""


@dataclass(frozen=True, slots=True)
class Head:
    """A serialized batch without its token columns, which follow it as separate arguments, in the order of `names`."""

    serialized: SerializedBatch
    names: tuple[str, ...]


@dataclass(slots=True)
class _Held:
    """Where a column is stored; `version` is torch's count of writes to it, `ray` the connection to Ray."""

    column: weakref.ref[torch.Tensor]
    version: int
    ray: tuple[str, str]
    ref: Any


class Columns:
    """References by column. A column that the driver has written to since is put again; one that it dropped is freed."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, batch: TensorDict) -> list[Any]:
        """References from which `rejoined`, on a worker, makes the batch's serialized form."""
        serialized = serialize(batch)
        if sum(array.nbytes for array in serialized.ragged.values()) < BY_COLUMN_BYTES:
            return [ray.put(serialized)]
        head = Head(replace(serialized, ragged={}), tuple(serialized.ragged))
        return [ray.put(head), *(self._ref(batch.get(name), array) for name, array in serialized.ragged.items())]

    def _ref(self, nested: Any, array: Any) -> Any:
        column: torch.Tensor = nested._values  # the same object for every view that `values()` returns
        context, key = ray.get_runtime_context(), id(column)
        # Each new local Ray counts its jobs from one; its nodes have other ids than the last one's.
        here = (context.get_job_id(), context.get_node_id())
        held = self._held.get(key)
        # An id is reused once its tensor is gone, so the weak reference decides. A write in place raises `_version`, and
        # after a restart of Ray the old one's references are dangling.
        if held is None or held.column() is not column or (held.version, held.ray) != (column._version, here):
            gone = weakref.ref(column, lambda _: self._held.pop(key, None))
            held = self._held[key] = _Held(gone, column._version, here, ray.put(array))
        return held.ref


def rejoined(parts: Sequence[Any]) -> list[Any]:
    """On a worker: the pieces of a call's batch, each head joined with its columns again."""
    rest, pieces = iter(parts), []
    for part in rest:
        if isinstance(part, Head):
            part = replace(part.serialized, ragged={name: next(rest) for name in part.names})
        pieces.append(part)
    return pieces


COLUMNS = Columns()
