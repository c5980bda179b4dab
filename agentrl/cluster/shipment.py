"""One call, split: the arguments that all ranks share and those of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class RowsOfPart:
    """Rows of one stored piece; with `rows` None, the whole piece as it is."""

    piece: int
    rows: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """How a worker builds one argument from stored pieces: the rows of `takes` are joined, then
    put in `order` (None: left as they are)."""

    takes: tuple[RowsOfPart, ...]
    order: np.ndarray | None = None


@dataclass(slots=True)
class Stored:
    """A batch stored in pieces where the workers can read it; the driver only knows which rows it has.

    `pieces` are object references ("ray") or values ("inline"), one per source rank. `rows[p]` are the
    numbers, in the whole batch, of piece p's rows in their order; `rows` is None if the ranks chose
    their rows themselves. `known` is the driver's own copy, if it has one.
    """

    pieces: list[Any]
    rows: list[np.ndarray] | None
    known: TensorDict | None = None

    def gather_plan(self, rows: np.ndarray) -> GatherPlan:
        """How to build the rows `rows` of the whole batch, in this order. Needs `self.rows`."""
        assert self.rows is not None
        total = sum(len(part) for part in self.rows)
        piece_of = np.empty(total, dtype=np.int64)
        place_of = np.empty(total, dtype=np.int64)
        for piece, part in enumerate(self.rows):
            piece_of[part] = piece
            place_of[part] = np.arange(len(part))
        owners = piece_of[rows]
        # Grouped by piece, so that each piece is read once; `order` restores the requested order afterwards.
        takes: list[RowsOfPart] = []
        came: list[np.ndarray] = []
        for piece in np.unique(owners).tolist():
            wanted = np.flatnonzero(owners == piece)
            takes.append(RowsOfPart(piece, place_of[rows[wanted]]))
            came.append(wanted)
        if not takes:  # no rows: any piece will do, since it has the columns
            return GatherPlan((RowsOfPart(0, np.empty(0, dtype=np.int64)),))
        order = np.argsort(np.concatenate(came), kind="stable")
        return GatherPlan(tuple(takes), None if np.array_equal(order, np.arange(len(order))) else order)


@dataclass(slots=True)
class Shipment:
    """One call to the ranks `ranks`.

    `args` and `kwargs` are the same for all. `own[rank]` are keyword arguments of that rank alone.
    If a batch is dispatched by rows, `batch` is the argument of `parameter`: rank r gets the rows `rows[r]`
    of a TensorDict, or those that `gather_plans[r]` takes from a Stored batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: list[int]
    own: dict[int, dict[str, Any]] = field(default_factory=dict)
    parameter: str | None = None
    batch: TensorDict | Stored | None = None
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    gather_plans: dict[int, GatherPlan] = field(default_factory=dict)
