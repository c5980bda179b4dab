"""Dispatch strategies: what a worker group does with a call's arguments and results, as data.

A strategy is a frozen value in a worker class's `dispatch_table`. `check` runs once, when the class is
defined; `scatter` turns one call into what each rank gets; `gather` turns the ranks' results into one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from tensordict import TensorDict

from agentrl.batch.balance import partition
from agentrl.batch.rows import lengths
from agentrl.cluster.collect import METRIC_REDUCTIONS, joined, reduced_metrics, reordered
from agentrl.cluster.mesh import Mesh
from agentrl.errors import DispatchError

Collect = Literal["source", "concat", "metrics", "none"]


@dataclass(slots=True)
class Shipment:
    """One call, split: what all ranks share and what each rank gets of its own.

    `args` and `kwargs` go to every rank in `ranks`. Where `parameter` is set, that parameter's value is
    per rank: row numbers of `batch` (`rows[rank]`), or `items[rank]` as it is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ranks: list[int]
    parameter: str | None = None
    batch: Any = None
    rows: dict[int, np.ndarray] | None = None
    items: dict[int, Any] | None = None


@dataclass(frozen=True)
class Strategy(ABC):
    """Base of all strategies."""

    def check(self, where: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        """Raise DispatchError where a method's signature (self left out) does not fit."""
        return None

    @abstractmethod
    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        """Split one call. `names` are the method's parameter names. Raises DispatchError."""

    @abstractmethod
    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        """One result from the ranks' results."""


def call_shape(function: Any) -> tuple[list[inspect.Parameter], Any]:
    """A method's parameters without `self`, and its return annotation."""
    signature = inspect.signature(function)
    return list(signature.parameters.values())[1:], signature.return_annotation


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _batch_parameter(
    where: str, name: str | None, parameters: Sequence[inspect.Parameter], kind: str
) -> None:
    usable = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if name is None and not usable:
        raise DispatchError(
            f"{where}: {kind} needs a parameter for {kind.split('(')[0].lower()} data, it has none"
        )
    if name is not None and name not in [parameter.name for parameter in usable]:
        raise DispatchError(
            f"{where}: {kind} names the parameter {name!r}; the method has {[p.name for p in usable]}"
        )


@dataclass(frozen=True)
class Broadcast(Strategy):
    """The same arguments to every rank; `run` waits for all and gives rank 0's result."""

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        return Shipment(args, kwargs, list(range(mesh.world_size)))

    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[0]


@dataclass(frozen=True)
class RankZero(Strategy):
    """Rank 0 alone runs the method. Not for methods that enter a collective."""

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        return Shipment(args, kwargs, [0])

    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[0]


@dataclass(frozen=True)
class Direct(Strategy):
    """One rank, chosen by the call (`WorkerGroup.run_on`), runs the method."""

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        raise DispatchError(f"{where} is Direct: call it with `run_on(rank, ...)`")

    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return results[shipment.ranks[0]]


@dataclass(frozen=True)
class AllToAll(Strategy):
    """Each rank gets its own first argument (`WorkerGroup.scatter`); the results come back as a list."""

    def check(self, where: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        _batch_parameter(where, None, parameters, "AllToAll()")

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        if not args or not isinstance(args[0], PerRank):
            raise DispatchError(f"{where} is AllToAll: call it with `scatter([one item a rank], ...)`")
        items = list(args[0].items)
        if len(items) != mesh.world_size:
            raise DispatchError(f"{where}: {len(items)} items for {mesh.world_size} ranks")
        _, args, kwargs = _take(where, names[0], names, args, kwargs)
        ranks = list(range(mesh.world_size))
        return Shipment(args, kwargs, ranks, names[0], items=dict(zip(ranks, items, strict=True)))

    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        return [results[rank] for rank in shipment.ranks]


@dataclass(frozen=True)
class PerRank:
    """The per-rank first arguments of an AllToAll call."""

    items: Sequence[Any]


@dataclass(frozen=True)
class Shard(Strategy):
    """Each rank along a mesh axis gets its rows of a TensorDict batch.

    Any number of rows over any number of ranks is legal: a rank may get zero rows. Ranks that share a
    coordinate of `mesh` (for example tensor-parallel peers) get the same rows; results are taken from
    one of them.

    - `argument`: the parameter that holds the batch, by default the first; all others (a function
      shipped along, for example) go to every rank.
    - `balance`: None splits contiguously into nearly equal row counts; "tokens" splits by a n + b n^2
      over row lengths (`cost`); "column" takes the rank from the batch's row column `dp_rank`.
    - `collect`: "source" puts the ranks' rows (TensorDict, tensor or list, one entry a row) back in
      the driver's row order; "concat" joins them in rank order; "metrics" reduces dicts of numbers to
      one, key by key, by `metrics` ("sum", "mean", "max", "min"; "mean" where not named); "none" drops them.
    """

    mesh: str = "dp"
    collect: Collect = "source"
    balance: Literal["tokens", "column"] | None = None
    argument: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict, hash=False)
    cost: tuple[float, float] = (1.0, 0.0)

    def check(self, where: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        _batch_parameter(where, self.argument, parameters, "Shard()")
        chosen = next(p for p in parameters if self.argument in (None, p.name))
        declared = "" if chosen.annotation is inspect.Parameter.empty else _text(chosen.annotation)
        if declared and not any(word in declared for word in ("TensorDict", "Any", "object")):
            raise DispatchError(
                f"{where}: Shard() ships a TensorDict as {chosen.name!r}, declared as {declared}"
            )
        if returns in (None, "None") and self.collect != "none":
            raise DispatchError(
                f"{where}: Shard(collect={self.collect!r}) needs a result, the method returns None"
            )
        if self.collect not in ("source", "concat", "metrics", "none"):
            raise DispatchError(f"{where}: unknown collect {self.collect!r}")
        if self.balance not in (None, "tokens", "column"):
            raise DispatchError(f"{where}: unknown balance {self.balance!r}")
        wrong = {key: how for key, how in self.metrics.items() if how not in METRIC_REDUCTIONS}
        if wrong:
            raise DispatchError(
                f"{where}: unknown metric reductions {wrong}; known: {sorted(METRIC_REDUCTIONS)}"
            )

    def scatter(
        self, where: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
    ) -> Shipment:
        name = self.argument or names[0]
        batch, args, kwargs = _take(where, name, names, args, kwargs)
        if not isinstance(batch, TensorDict):
            raise DispatchError(f"{where}: {name!r} must be a TensorDict, it is a {type(batch).__name__}")
        shards = self._shards(where, batch, mesh.size(self.mesh))
        ranks = list(range(mesh.world_size))
        rows = {rank: shards[mesh.index(rank, self.mesh)] for rank in ranks}
        return Shipment(args, kwargs, ranks, name, batch=batch, rows=rows)

    def _shards(self, where: str, batch: TensorDict, count: int) -> list[np.ndarray]:
        if self.balance == "column":
            owner = np.asarray(batch.get("dp_rank"))
            if len(owner) and (owner.min() < 0 or owner.max() >= count):
                raise DispatchError(f"{where}: column dp_rank names rank {owner.max()}, the axis has {count}")
            return [np.flatnonzero(owner == rank) for rank in range(count)]
        if self.balance == "tokens":
            tokens = lengths(batch).numpy().astype(np.float64)
            costs = self.cost[0] * tokens + self.cost[1] * tokens * tokens
            return [np.sort(np.asarray(part, dtype=np.int64)) for part in partition(costs, count)]
        return np.array_split(np.arange(len(batch), dtype=np.int64), count)

    def gather(self, where: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        sources = mesh.sources(self.mesh)
        parts = [results[rank] for rank in sources]
        if self.collect == "none":
            return None
        if self.collect == "metrics":
            return reduced_metrics(where, parts, self.metrics)
        if self.collect == "concat":
            return joined(where, parts)
        assert shipment.rows is not None
        return reordered(where, parts, [shipment.rows[rank] for rank in sources])


def _take(
    where: str, name: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The value given for parameter `name`; arguments after it become keyword arguments."""
    if len(args) > len(names):
        raise DispatchError(f"{where} takes {list(names)}, it was given {len(args)} positional arguments")
    if name in kwargs:
        return kwargs[name], args, {key: value for key, value in kwargs.items() if key != name}
    at = list(names).index(name)
    if at >= len(args):
        raise DispatchError(f"{where}: no argument given for {name!r}")
    after = dict(zip(names[at + 1 :], args[at + 1 :], strict=False))
    return args[at], args[:at], {**after, **kwargs}
