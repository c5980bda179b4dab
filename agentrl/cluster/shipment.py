"""One call, split: what all ranks share and what each rank gets of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class RowsOfPart:
    """Rows of one stored piece; `rows` None takes the piece as it is."""

    piece: int
    rows: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How a worker builds one argument from stored pieces: the rows taken, one after the other, then
    put in `order` (None: as they come)."""

    takes: tuple[RowsOfPart, ...]
    order: np.ndarray | None = None


@dataclass(slots=True)
class Stored:
    """A batch that lies in pieces where the workers can read it; the driver knows its rows only.

    `pieces` are object references ("ray") or values ("inline"), one a source rank. `rows[p]` are the
    row numbers, in the order of the whole, that piece p holds in this order; None where the ranks chose
    their rows themselves. `known` is the driver's own copy where it has one.
    """

    pieces: list[Any]
    rows: list[np.ndarray] | None
    known: TensorDict | None = None

    def gather_plan(self, rows: np.ndarray) -> GatherPlan:
        """How to build `rows` of the whole, in this order. Needs `self.rows`."""
        assert self.rows is not None
        total = sum(len(part) for part in self.rows)
        piece_of = np.empty(total, dtype=np.int64)
        place_of = np.empty(total, dtype=np.int64)
        for piece, part in enumerate(self.rows):
            piece_of[part] = piece
            place_of[part] = np.arange(len(part))
        owners = piece_of[rows]
        takes: list[RowsOfPart] = []
        came: list[np.ndarray] = []
        for piece in np.unique(owners).tolist():
            wanted = np.flatnonzero(owners == piece)
            takes.append(RowsOfPart(piece, place_of[rows[wanted]]))
            came.append(wanted)
        if not takes:  # no rows: any piece tells the columns
            return GatherPlan((RowsOfPart(0, np.empty(0, dtype=np.int64)),))
        order = np.argsort(np.concatenate(came), kind="stable")
        return GatherPlan(tuple(takes), None if np.array_equal(order, np.arange(len(order))) else order)


@dataclass(slots=True)
class Shipment:
    """One call to the ranks `ranks`.

    `args` and `kwargs` are the same for all. `own[rank]` are keyword arguments of that rank alone.
    `batch`, where a batch is dispatched by rows, is the parameter `parameter`: rank r gets `rows[r]`
    of a TensorDict, or what `gather_plans[r]` says of a Stored batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: list[int]
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    parameter: str | None = None
    batch: TensorDict | Stored | None = None
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    gather_plans: dict[int, GatherPlan] = field(default_factory=dict)
