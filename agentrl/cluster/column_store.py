"""Token columns of batches in Ray's object store: each lies there once, for as long as the driver holds it.

A training step ships its batch several times (reference, values, proximal policy, updates), with a column or two
added each time. What was put for one call is found again for the next, and for every group of workers.
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
"""Batches whose token columns are smaller go as one object: a further object costs more than their copy."""


@dataclass(frozen=True, slots=True)
class Head:
    """A serialized form without its token columns, which follow it as arguments of their own, in this order."""

    wire: SerializedBatch
    names: tuple[str, ...]


@dataclass(slots=True)
class _Held:
    """Where a column lies; `version` is torch's count of writes to it, `job` the connection to Ray."""

    column: weakref.ref[torch.Tensor]
    version: int
    job: str
    ref: Any


class Columns:
    """References by column. A column that the driver wrote to since is put anew; one that it let go of is freed."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def lay(self, batch: TensorDict) -> list[Any]:
        """References that `whole` makes the batch's serialized form of, on a worker."""
        wire = serialize(batch)
        if sum(array.nbytes for array in wire.ragged.values()) < BY_COLUMN_BYTES:
            return [ray.put(wire)]
        head = Head(replace(wire, ragged={}), tuple(wire.ragged))
        return [ray.put(head), *(self._ref(batch.get(name), array) for name, array in wire.ragged.items())]

    def _ref(self, nested: Any, array: Any) -> Any:
        column: torch.Tensor = nested._values  # the one object behind every view that `values()` gives
        job, key = ray.get_runtime_context().get_job_id(), id(column)
        held = self._held.get(key)
        if held is None or held.column() is not column or (held.version, held.job) != (column._version, job):
            gone = weakref.ref(column, lambda _: self._held.pop(key, None))
            held = self._held[key] = _Held(gone, column._version, job, ray.put(array))
        return held.ref


def rejoined(parts: Sequence[Any]) -> list[Any]:
    """On a worker: the pieces that the arguments of a call are made of, each head with its columns again."""
    rest, pieces = iter(parts), []
    for part in rest:
        if isinstance(part, Head):
            part = replace(part.wire, ragged={name: next(rest) for name in part.names})
        pieces.append(part)
    return pieces


COLUMNS = Columns()
