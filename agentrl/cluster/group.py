"""A worker group as the driver sees it: `group.run(Actor.update, batch)`.

Batches split over the ranks of a mesh axis, results collected in row order, calls under way, the
group, and the test that a folder is shared by all its processes."""

from __future__ import annotations

import inspect
import os
import secrets
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.cluster.worker import (
    AllToAll,
    Call,
    Direct,
    GatherPlan,
    Mesh,
    PerRank,
    RowsOfPart,
    Shipment,
    Stored,
    Strategy,
    Worker,
    call_shape,
    positional,
    resolve,
)
from agentrl.data.packing import partition
from agentrl.data.rows import build, concat, is_ragged, lengths, nested_tensor, offsets_of, select
from agentrl.utils.errors import CheckpointError, ConfigError, DispatchError
from agentrl.utils.spans import span
from agentrl.utils.threads import in_thread

# Results of the ranks, collected


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


METRIC_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": _mean,
    "max": max,
    "min": min,
}


def reduced_metrics(label: str, parts: Sequence[Any], how: Mapping[str, str]) -> dict[str, float]:
    """One dict from the ranks' dicts, key by key, over the ranks that report the key."""
    values: dict[str, list[float]] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise DispatchError(f"{label}: collect='metrics' needs a dict from each rank, got {type(part).__name__}")
        for key, value in part.items():
            values.setdefault(key, []).append(float(value))
    # Not over all ranks: one that got no rows reports nothing, and a 0 in its name would pull means and minima down.
    return {key: METRIC_REDUCTIONS[how.get(key, "mean")](items) for key, items in values.items()}


def join_parts(label: str, parts: Sequence[Any]) -> Any:
    """TensorDicts, tensors (dense or jagged) or lists of the ranks, one after the other."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise DispatchError(f"{label}: ranks returned different types: {[type(part).__name__ for part in parts]}")
    if isinstance(first, TensorDict):
        return concat(parts)
    if isinstance(first, torch.Tensor):
        return _joined_tensors(parts)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    raise DispatchError(f"{label}: cannot collect rows of a {type(first).__name__}; return a TensorDict, tensor or list")


def _joined_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # torch cannot concatenate jagged tensors along their rows, so values and row lengths are joined below.
    if not is_ragged(parts[0]):
        return torch.cat(list(parts))
    counts = torch.cat([offsets_of(part).diff() for part in parts])
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return nested_tensor(torch.cat([part.values() for part in parts]), offsets)


def restore_order(label: str, parts: Sequence[Any], rows: Sequence[np.ndarray]) -> Any:
    """The ranks' rows in the driver's order: entry k of `parts[r]` is row `rows[r][k]`.

    Raises DispatchError if a rank returned another number of rows than it was given.
    """
    given, got = [len(row) for row in rows], [len(part) for part in parts]
    if given != got:
        raise DispatchError(f"{label}: collect='source' needs one result per row; ranks got {given}, returned {got}")
    whole = join_parts(label, parts)
    order = np.argsort(np.concatenate(list(rows)), kind="stable")
    # One rank, or rows split contiguously: saves a copy of the whole batch.
    if np.array_equal(order, np.arange(len(order))):
        return whole
    if isinstance(whole, TensorDict):
        return select(whole, order)
    if isinstance(whole, list):
        return [whole[i] for i in order.tolist()]
    # As a batch of one column, because `select` alone knows how rows of a jagged tensor are picked.
    return select(build({"value": whole}, len(order)), order).get("value")


# Rows over ranks

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
            if "dp_rank" not in batch.keys():  # noqa: SIM118 - `in` of a batch asks for an item
                raise DispatchError(f"{label}: the batch has no column dp_rank. Cut it into minibatches first (cut_update)")
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
            return join_parts(label, parts)
        return restore_order(label, parts, [shipment.rows[rank] for rank in sources])


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else str(annotation)


# Calls under way

R = TypeVar("R")


class Pending(ABC):
    """The backend's side of a call under way."""

    @property
    @abstractmethod
    def handles(self) -> dict[int, Any]:
        """Handles by rank: where that rank's result will be (an object reference, or a lazy result)."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Results by rank. Raises as `WorkerGroup.run`."""

    @abstractmethod
    async def await_(self) -> dict[int, Any]:
        """The same, awaited."""


class Future(Generic[R]):
    """Pending result of `WorkerGroup.submit`. `result()` or `await` brings the value to the driver; `value` stands for it in
    another group's call, whose workers then read it directly."""

    def __init__(self, label: str, pending: Pending, gather: Callable[[dict[int, Any]], R], stored: Stored | None) -> None:
        self._label, self._pending, self._gather, self._stored = label, pending, gather, stored

    def result(self) -> R:
        """Wait for the call. Raises as `WorkerGroup.run`."""
        return self._gather(self._pending.wait())

    def __await__(self) -> Generator[Any, None, R]:
        return self._result().__await__()

    async def _result(self) -> R:
        results = await self._pending.await_()
        if self._stored is None:  # no rows to join, so gathering is quick
            return self._gather(results)
        return await in_thread("batch", self._gather, results)

    @property
    def value(self) -> R:
        """A placeholder for the result, with the same static type, for the batch argument of another group's call.

        Raises DispatchError if the call's results are not rows (collect "metrics" or "none").
        """
        if self._stored is None:
            raise DispatchError(f"{self._label}: only rows (collect 'source' or 'concat') can be passed on")
        stand_in: Any = self._stored
        result: R = stand_in
        return result


# The group

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
T = TypeVar("T")


class Backend(ABC):
    """Home of one group's workers."""

    @abstractmethod
    def submit(self, method: str, shipment: Shipment) -> Pending:
        """Send a call to the ranks of the shipment. Raises WorkerDiedError if one of them is known to be gone."""

    def in_processes(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Pending | None:
        """Start a plain function in every process of the group; None if the workers live in the caller's process."""
        return None

    @abstractmethod
    def put(self, batch: TensorDict) -> Any:
        """Store a batch where the workers can read it."""

    @abstractmethod
    def restart(self) -> None:
        """Replace the workers with fresh ones."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; idempotent."""


class WorkerGroup(Generic[W]):
    """Workers of one class under one name, on the ranks of one mesh."""

    def __init__(self, cls: type[W], name: str, mesh: Mesh, backend: Backend) -> None:
        self.cls = cls
        self.name = name
        self.mesh = mesh
        self.backend = backend

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on the group and wait; its strategy combines the ranks' results into one.

        Raises DispatchError for a call that does not fit, WorkerError naming worker, rank and method
        with the remote traceback, WorkerDiedError if a process is gone, StalledError after the
        group's `call_timeout`, or the worker's own UserError.
        """
        return self.submit(method, *args, **kwargs).result()

    async def arun(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, awaited: the event loop keeps running while a batch is split and shipped and while the workers work."""
        with span("call", f"{self.name}: {method.__name__}", track="calls"):
            return await self._arun(method, *args, **kwargs)

    async def _arun(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        # Only a Shard does enough work before the call to block the event loop: it plans and serializes a whole batch.
        if isinstance(resolve(self.cls, method)[1], Shard):
            return await (await in_thread("batch", partial(self.submit, method, *args, **kwargs)))
        return await self.submit(method, *args, **kwargs)

    def submit(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start `method` and return at once; see Future. Inline, it runs when its result is first requested."""
        name, strategy, shipment = self._split(method, args, kwargs)
        pending = self.backend.submit(name, shipment)
        label = f"{self.cls.__name__}.{name}"

        def gather(results: dict[int, Any]) -> R:
            result: R = strategy.gather(label, results, shipment, self.mesh)
            return result

        return Future(label, pending, gather, self._stored(strategy, shipment, pending))

    def run_all(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`run`, but with the results of all ranks, in rank order."""
        name, _, shipment = self._split(method, args, kwargs)
        results = self.backend.submit(name, shipment).wait()
        return [results[rank] for rank in shipment.ranks]

    def run_on(self, rank: int, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `Direct` method on one rank."""
        name, strategy = resolve(self.cls, method)
        if not isinstance(strategy, Direct) or not 0 <= rank < self.world_size:
            raise DispatchError(f"{self.cls.__name__}.{name} on rank {rank}: needs Direct() and 0 <= rank < {self.world_size}")
        result: R = self.backend.submit(name, Shipment(args, dict(kwargs), [rank])).wait()[rank]
        return result

    def scatter(
        self,
        method: Callable[Concatenate[W, T, P], R],
        items: Sequence[T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Call an `AllToAll` method: the first argument of rank i is `items[i]`; returns all results, in rank order."""
        name, strategy, shipment = self._split(method, (PerRank(tuple(items)), *args), kwargs)
        if not isinstance(strategy, AllToAll):
            raise DispatchError(f"{self.cls.__name__}.{name} is {strategy}: `scatter` is for AllToAll methods")
        results = self.backend.submit(name, shipment).wait()
        return [results[rank] for rank in shipment.ranks]

    async def in_processes(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an importable function in each process of the group and return the results, in rank order; nothing if the
        workers live in the driver's process. Raises as `run`."""
        pending = self.backend.in_processes(partial(function, **kwargs), args)
        results = {} if pending is None else await pending.await_()
        return [results[rank] for rank in sorted(results)]

    def put(self, batch: TensorDict) -> TensorDict:
        """Store a batch where the workers can read it, once, for several calls; returns a placeholder for it."""
        # Typed as a batch, so that calls that take it still type-check; Shard unwraps it.
        stand_in: Any = Stored([self.backend.put(batch)], [np.arange(len(batch), dtype=np.int64)], batch)
        stored: TensorDict = stand_in
        return stored

    def restart(self) -> None:
        """Replace all worker processes with fresh ones, colocated roles included; their state is lost.

        Raises ResourceError if they cannot be placed in time.
        """
        self.backend.restart()

    def close(self) -> None:
        """End the workers; idempotent."""
        self.backend.close()

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _split(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Strategy, Shipment]:
        name, strategy = resolve(self.cls, method)
        names = tuple(positional(call_shape(method)[0]))
        call = Call(f"{self.cls.__name__}.{name}", names, args, dict(kwargs))
        return name, strategy, strategy.scatter(call, self.mesh)

    def _stored(self, strategy: Strategy, shipment: Shipment, pending: Pending) -> Stored | None:
        if not isinstance(strategy, Shard) or strategy.collect not in ("source", "concat"):
            return None
        sources = self.mesh.sources(strategy.mesh)
        # With collect="concat" a method may return any rows, so their numbers in the whole are not known.
        known = strategy.collect == "source" and bool(shipment.rows)
        rows = [shipment.rows[rank] for rank in sources] if known else None
        return Stored([pending.handles[rank] for rank in sources], rows)


# Folders that the driver and a group's processes must share: proven with files, never assumed because the paths are equal.
#
# before a run    `check_shared`: each side writes a token and looks for the other's
# after a save    `check_arrived`: the driver has every file that a process of the group sees
#
# NFS may answer from its cache for some seconds. Opening a folder makes a client ask the server again, so every look here
# lists the folder again.

PATIENCE = 5.0
"""Seconds until what another machine wrote must be seen."""
POLL = 0.05
_PREFIX = ".agentrl-shared-"


@dataclass(frozen=True, slots=True)
class Seen:
    """A process's view of a folder: relative path -> bytes. `place`: its machine."""

    place: str
    files: dict[str, int]


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """A process's answer to a token: the name of the file that it wrote, or what is wrong with the folder there."""

    place: str
    file: str
    fault: str = ""


def this_place() -> str:
    """Host name of this machine, and its address in the cluster if it is part of one."""
    name = socket.gethostname()
    # Not imported: if nobody else has, this process is no part of a cluster.
    ray = sys.modules.get("ray")
    return f"{name} ({ray.util.get_node_ip_address()})" if ray is not None and ray.is_initialized() else name


async def check_shared(group: WorkerGroup[Any], folder: Path, key: str) -> None:
    """Raise ConfigError if a process of `group` and the driver do not read each other's files in `folder`.

    `key`: the config key that sets the folder. It may take PATIENCE seconds to find out that a file is missing.
    """
    token = _PREFIX + secrets.token_hex(8)
    try:
        # Both ways: two machines may each have a folder of that path, or one may mount it read-only.
        (folder / token).write_text(token)
        answers: list[TokenAnswer] = await group.in_processes(answer_token, str(folder), token, PATIENCE)
        for rank, found in enumerate(answers):
            fault = found.fault or await in_thread("files", _missing_answer, folder, found.file)
            if fault:
                raise ConfigError(
                    f"{key}: rank {rank} of the group {group.name!r}, on {found.place}, and this process, on {this_place()}, do "
                    f"not share the folder {folder}: {fault}. Set {key} to a folder that all nodes mount at the same path"
                )
    finally:
        # By the token, so that all answers go too, and no other run's files.
        for left in folder.glob(f"{token}*"):
            left.unlink(missing_ok=True)


def answer_token(folder: str, token: str, patience: float) -> TokenAnswer:
    """In a process of the group: look for the driver's token, and write a file of its own next to it."""
    # A random name: with one name for all ranks, a single one that shares the folder would answer for the others.
    place, own = this_place(), f"{token}-{secrets.token_hex(8)}"
    if not seen_in_time(lambda: token in _names(Path(folder)), patience):
        return TokenAnswer(place, own, "the group's process does not see the file that this one wrote")
    try:
        (Path(folder) / own).write_text(token)
    except OSError as problem:
        return TokenAnswer(place, own, f"the group's process cannot write there ({problem})")
    return TokenAnswer(place, own)


async def check_arrived(group: WorkerGroup[Any], folder: Path, what: str) -> None:
    """Raise CheckpointError if a process of `group` sees a file in `folder` that the driver does not, or another size of it:
    then it wrote to a disk of its own. `what`: what was written, for the message."""
    for rank, seen in enumerate(await group.in_processes(files_in, str(folder))):
        missing = await in_thread("files", _not_arrived, folder, seen.files)
        if missing:
            raise CheckpointError(
                f"{what}: {missing[0]} ({len(missing)} of {len(seen.files)} files), which rank {rank} of the group "
                f"{group.name!r} has on {seen.place}, is not in {folder} on {this_place()}: all nodes must share that folder "
                "(set out to one that they mount at the same path)"
            )


def files_in(folder: str) -> Seen:
    """The files below a folder as this process sees them; none if the folder is missing."""
    return Seen(this_place(), _sizes(Path(folder)))


def seen_in_time(look: Callable[[], bool], patience: float) -> bool:
    """Return True if `look` is true within `patience` seconds."""
    deadline = time.monotonic() + patience
    while not look():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def _missing_answer(folder: Path, name: str) -> str:
    arrived = seen_in_time(lambda: name in _names(folder), PATIENCE)
    return "" if arrived else "this process does not see the file that the group's process wrote"


def _not_arrived(folder: Path, files: dict[str, int]) -> list[str]:
    """Those of `files` that are not in `folder` with their sizes in time."""

    def missing() -> list[str]:
        here = _sizes(folder)
        # Sizes too: a name may be there before all of its bytes are.
        return sorted(name for name, size in files.items() if here.get(name) != size)

    return [] if seen_in_time(lambda: not missing(), PATIENCE) else missing()


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:  # not there, or not yet
        return set()


def _sizes(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        try:
            with path.open("rb") as file:  # opening asks the server, which a stat of a cached entry does not
                sizes[str(path.relative_to(folder))] = os.fstat(file.fileno()).st_size
        except OSError:  # a folder, or a temporary file that is gone again
            continue
    return sizes
