"""The Shard strategy: sends rows of a batch to the ranks along a mesh axis and collects their results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from tensordict import TensorDict

from agentrl.batch.balance import partition
from agentrl.batch.rows import lengths
from agentrl.cluster.collect import METRIC_REDUCTIONS, joined, reduced_metrics, reordered
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.shipment import GatherPlan, RowsOfPart, Shipment, Stored
from agentrl.cluster.strategy import Call, Strategy, positional
from agentrl.errors import DispatchError

Collect = Literal["source", "concat", "metrics", "none"]


@dataclass(frozen=True)
class Shard(Strategy):
    """Each rank along a mesh axis gets its rows of a TensorDict batch.

    Any number of rows over any number of ranks is legal: a rank may get zero rows. Ranks that share a
    coordinate of `mesh` (for example tensor-parallel peers) get the same rows; results are taken from
    one of them.

    - `argument`: the parameter that holds the batch, by default the first; all others (for example a
      function) go to every rank.
    - `balance`: None splits contiguously into nearly equal row counts; "tokens" splits by a n + b n^2
      over row lengths (`cost`); "column" takes the rank from the batch's row column `dp_rank`
      (-1: the row goes to no rank; not allowed if `collect` is "source").
    - `stays`: columns that no worker reads and that are therefore not sent.
    - `collect`: "source" puts the ranks' rows (TensorDict, tensor or list, one entry per row) back into
      the driver's row order; "concat" joins them in rank order; "metrics" reduces dicts of numbers to
      one, key by key, by `metrics` ("sum", "mean", "max", "min"; by default "mean"), and lists of such dicts
      to one list, place by place; "none" drops them.

    The batch may be a future of another group (`Future.value`). If that has as many pieces as this
    mesh axis has ranks, rank i gets piece i; otherwise its rows are split again. In both cases the rows do not
    pass through the driver.
    """

    mesh: str = "dp"
    collect: Collect = "source"
    balance: Literal["tokens", "column"] | None = None
    argument: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict, hash=False)
    cost: tuple[float, float] = (1.0, 0.0)
    stays: tuple[str, ...] = ()

    def check(self, label: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        usable = positional(parameters)
        if not usable:
            raise DispatchError(f"{label}: Shard() passes a TensorDict, the method has no parameter for it")
        if self.argument is not None and self.argument not in usable:
            raise DispatchError(f"{label}: Shard() names the parameter {self.argument!r}; the method has {usable}")
        chosen = next(p for p in parameters if p.name == (self.argument or usable[0]))
        declared = _text(chosen.annotation)
        if declared and not any(word in declared for word in ("TensorDict", "Any", "object")):
            raise DispatchError(f"{label}: Shard() passes a TensorDict as {chosen.name!r}, which is declared as {declared}")
        if returns in (None, "None") and self.collect != "none":
            raise DispatchError(f"{label}: Shard(collect={self.collect!r}) needs a result, the method returns None")
        self._check_options(label)

    def _check_options(self, label: str) -> None:
        if self.collect not in ("source", "concat", "metrics", "none"):
            raise DispatchError(f"{label}: unknown collect {self.collect!r}")
        if self.balance not in (None, "tokens", "column"):
            raise DispatchError(f"{label}: unknown balance {self.balance!r}")
        wrong = {key: how for key, how in self.metrics.items() if how not in METRIC_REDUCTIONS}
        if wrong:
            raise DispatchError(f"{label}: unknown metric reductions {wrong}; known: {sorted(METRIC_REDUCTIONS)}")

    def scatter(self, call: Call, mesh: Mesh) -> Shipment:
        label = call.label
        name = self.argument or call.names[0]
        batch, rest = call.take(name)
        count = mesh.size(self.mesh)
        shipment = Shipment(rest.args, rest.kwargs, list(range(mesh.world_size)), parameter=name, batch=batch)
        # Ranks with the same coordinate get the same rows: sequence-parallel peers compute each micro-batch together.
        axis = {rank: mesh.index(rank, self.mesh) for rank in shipment.ranks}
        if isinstance(batch, TensorDict):
            shards = self._shards(label, batch, count)
            shipment.batch = batch.exclude(*self.stays) if self.stays else batch
            shipment.rows = {rank: shards[axis[rank]] for rank in shipment.ranks}
        elif isinstance(batch, Stored):
            shares = self._stored(label, batch, count)
            shipment.gather_plans = {rank: shares[axis[rank]][0] for rank in shipment.ranks}
            known = {rank: shares[axis[rank]][1] for rank in shipment.ranks}
            shipment.rows = {rank: rows for rank, rows in known.items() if rows is not None}
        else:
            raise DispatchError(f"{label}: {name!r} must be a TensorDict, it is a {type(batch).__name__}")
        return shipment

    def _shards(self, label: str, batch: TensorDict, count: int) -> list[np.ndarray]:
        if self.balance == "column":
            owner = np.asarray(batch.get("dp_rank"))
            least = 0 if self.collect == "source" else -1
            if len(owner) and (owner.min() < least or owner.max() >= count):
                wrong = owner.max() if owner.max() >= count else owner.min()
                raise DispatchError(f"{label}: column dp_rank names rank {wrong}, the axis has {count}")
            return [np.flatnonzero(owner == rank) for rank in range(count)]
        if self.balance == "tokens":
            tokens = lengths(batch).numpy().astype(np.float64)
            costs = self.cost[0] * tokens + self.cost[1] * tokens * tokens
            # Sorted: adjacent rows are then copied as one span, and results come back nearly in order.
            return [np.sort(np.asarray(part, dtype=np.int64)) for part in partition(costs, count)]
        return list(np.array_split(np.arange(len(batch), dtype=np.int64), count))

    def _stored(self, label: str, stored: Stored, count: int) -> list[tuple[GatherPlan, Any]]:
        """GatherPlan and row numbers (None if unknown) of each coordinate."""
        # The driver's own copy has the columns by which rows are balanced; without one, only counts are known.
        if stored.known is not None:
            return [(stored.gather_plan(rows), rows) for rows in self._shards(label, stored.known, count)]
        # As they are: rank i gets what rank i made, and nothing is cut or joined.
        if len(stored.pieces) == count:
            held: list[Any] = [None] * count if stored.rows is None else list(stored.rows)
            return [(GatherPlan((RowsOfPart(piece),)), held[piece]) for piece in range(count)]
        if stored.rows is None or self.balance is not None:
            raise DispatchError(
                f"{label}: a future of {len(stored.pieces)} pieces for {count} ranks: "
                "splitting it again needs collect='source' where it was made and balance=None here"
            )
        every = np.arange(sum(len(part) for part in stored.rows), dtype=np.int64)
        return [(stored.gather_plan(part), part) for part in np.array_split(every, count)]

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        sources = mesh.sources(self.mesh)
        parts = [results[rank] for rank in sources]
        if self.collect == "none":
            return None
        if self.collect == "metrics" and all(isinstance(part, list) for part in parts):
            return [reduced_metrics(label, each, self.metrics) for each in zip(*parts, strict=True)]
        if self.collect == "metrics":
            return reduced_metrics(label, parts, self.metrics)
        if self.collect == "concat" or not shipment.rows:
            return joined(label, parts)
        return reordered(label, parts, [shipment.rows[rank] for rank in sources])


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else str(annotation)
