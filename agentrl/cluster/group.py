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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import numpy as np

from agentrl.cluster.worker import Mesh, Shipment, Strategy, Worker, resolve
from agentrl.data.packing import partition
from agentrl.data.rows import Ragged, concat, is_batch, select
from agentrl.utils.errors import CheckpointError, ConfigError, DispatchError
from agentrl.utils.spans import span
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

# Results of the ranks, collected


def mean_metrics(label: str, parts: Sequence[Any]) -> dict[str, float]:
    """One dict from the ranks' dicts: the mean of each key over the ranks that report it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise DispatchError(f"{label}: collect='metrics' needs a dict from each rank, got {type(part).__name__}")
        for key, value in part.items():
            values.setdefault(key, []).append(float(value))
    # Not over all ranks: one that got no rows reports nothing, and a 0 in its name would pull means down.
    return {key: sum(items) / len(items) for key, items in values.items()}


def restore_order(label: str, parts: Sequence[Any], rows: Sequence[np.ndarray]) -> TensorDict:
    """The ranks' rows in the driver's order: entry k of `parts[r]` is row `rows[r][k]`.

    Raises DispatchError if a rank returned no TensorDict, or another number of rows than it was given.
    """
    for part in parts:
        if not is_batch(part):
            raise DispatchError(f"{label}: collect='source' needs a TensorDict from each rank, got {type(part).__name__}")
    given, got = [len(row) for row in rows], [len(part) for part in parts]
    if given != got:
        raise DispatchError(f"{label}: collect='source' needs one result per row; ranks got {given}, returned {got}")
    whole = concat(parts)
    order = np.argsort(np.concatenate(list(rows)), kind="stable")
    # One rank, or rows that lie in order: saves a copy of the whole batch.
    return whole if np.array_equal(order, np.arange(len(order))) else select(whole, order)


# Rows over ranks


def batch_of(label: str, args: tuple[Any, ...]) -> TensorDict:
    """The batch of a call, its first argument. Raises DispatchError for another, and for none."""
    if not args:
        raise DispatchError(f"{label}: no argument is given for the batch, which comes first")
    if not is_batch(args[0]):
        raise DispatchError(f"{label}: the first argument must be a TensorDict, it is a {type(args[0]).__name__}")
    batch: TensorDict = args[0]
    return batch


@dataclass(frozen=True)
class Shard(Strategy):
    """Each rank along the mesh axis "dp" gets its rows of the first argument, a TensorDict; all others go to every rank.

    Any number of rows over any number of ranks is legal: a rank may get zero rows. Ranks that share a coordinate of "dp" (for
    example tensor-parallel peers) get the same rows; results are taken from one of them.

    - `balance`: "tokens" balances the tokens of the rows; "column" takes the rank from the batch's row column `dp_rank` (-1: the
      row goes to no rank; not allowed if `collect` is "source").
    - `stays`: columns that no worker reads and that are therefore not sent.
    - `collect`: "source" puts the ranks' rows, one entry per row, back into the driver's row order; "metrics" reduces dicts of
      numbers to one of their means, key by key, and lists of such dicts to one list, place by place.
    """

    collect: Literal["source", "metrics"] = "source"
    balance: Literal["tokens", "column"] = "tokens"
    stays: tuple[str, ...] = ()

    def check(self, label: str, parameters: Sequence[inspect.Parameter], returns: Any) -> None:
        first = next(iter(parameters), None)
        if first is None or first.kind is not first.POSITIONAL_OR_KEYWORD:
            raise DispatchError(f"{label}: Shard() passes a TensorDict, the method has no parameter for it")
        declared = "" if first.annotation is inspect.Parameter.empty else str(first.annotation)
        if declared and not any(word in declared for word in ("TensorDict", "Any", "object")):
            raise DispatchError(f"{label}: Shard() passes a TensorDict as {first.name!r}, which is declared as {declared}")
        if returns in (None, "None"):
            raise DispatchError(f"{label}: Shard(collect={self.collect!r}) needs a result, the method returns None")
        for name, value, known in (
            ("collect", self.collect, ("source", "metrics")),
            ("balance", self.balance, ("tokens", "column")),
        ):
            if value not in known:
                raise DispatchError(f"{label}: unknown {name} {value!r}")

    def scatter(self, label: str, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Shipment:
        batch, places = batch_of(label, args), mesh.places("dp")
        count = places[-1] + 1
        if self.balance == "tokens":
            owner = partition(Ragged.of(batch).lengths, count)
        else:
            if "dp_rank" not in batch.keys():  # noqa: SIM118 - `in` of a batch asks for an item
                raise DispatchError(f"{label}: the batch has no column dp_rank. Cut it into minibatches first (cut_update)")
            owner = np.asarray(batch.get("dp_rank"))
            least = 0 if self.collect == "source" else -1
            if len(owner) and (owner.min() < least or owner.max() >= count):
                wrong = owner.max() if owner.max() >= count else owner.min()
                raise DispatchError(f"{label}: column dp_rank names rank {wrong}, the axis has {count}")
        # In order: adjacent rows are then copied as one span, and results come back nearly in order.
        shards = [np.flatnonzero(owner == rank) for rank in range(count)]
        # Ranks with the same coordinate get the same rows: sequence-parallel peers compute each micro-batch together.
        rows = {rank: shards[place] for rank, place in enumerate(places)}
        return Shipment(args[1:], kwargs, list(rows), batch.exclude(*self.stays) if self.stays else batch, rows)

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        sources = np.unique(mesh.places("dp"), return_index=True)[1].tolist()  # the first rank of each place
        parts = [results[rank] for rank in sources]
        if self.collect == "source":
            return restore_order(label, parts, [shipment.rows[rank] for rank in sources])
        if set(map(type, parts)) == {list}:
            return [mean_metrics(label, each) for each in zip(*parts, strict=True)]
        return mean_metrics(label, parts)


# Calls under way

R = TypeVar("R")


class Pending(ABC):
    """The backend's side of a call under way."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Results by rank. Raises as `WorkerGroup.run`."""

    async def await_(self) -> dict[int, Any]:
        """The same, awaited; in a thread, unless the backend has a better way."""
        return await in_thread("update", self.wait)


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
    def close(self) -> None:
        """End the workers; idempotent."""


@dataclass(eq=False)
class WorkerGroup(Generic[W]):
    """Workers of one class under one name, on the ranks of one mesh."""

    cls: type[W]
    name: str
    mesh: Mesh
    backend: Backend

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on the group and wait; its strategy combines the ranks' results into one.

        Raises DispatchError for a call that does not fit, WorkerError naming worker, rank and method
        with the remote traceback, WorkerDiedError if a process is gone, StalledError after the
        group's `call_timeout`, or the worker's own UserError.
        """
        name, strategy = resolve(self.cls, method)
        label = f"{self.cls.__name__}.{name}"
        shipment = strategy.scatter(label, args, kwargs, self.mesh)
        combined: R = strategy.gather(label, self.backend.submit(name, shipment).wait(), shipment, self.mesh)
        return combined

    async def arun(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run`, awaited: the event loop keeps running while a batch is split and shipped and while the workers work."""
        with span("call", f"{self.name}: {method.__name__}", track="calls"):
            name, strategy = resolve(self.cls, method)
            label = f"{self.cls.__name__}.{name}"
            # Only a Shard works enough before and after the call to block the event loop: it serializes and joins batches.
            heavy = isinstance(strategy, Shard)

            def send() -> tuple[Shipment, Pending]:
                shipment = strategy.scatter(label, args, kwargs, self.mesh)
                return shipment, self.backend.submit(name, shipment)

            shipment, pending = await in_thread("batch", send) if heavy else send()
            gather = partial(strategy.gather, label, await pending.await_(), shipment, self.mesh)
            combined: R = await in_thread("batch", gather) if heavy else gather()
            return combined

    def run_all(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """`run`, but with the results of all ranks, in rank order."""
        name, strategy = resolve(self.cls, method)
        shipment = strategy.scatter(f"{self.cls.__name__}.{name}", args, kwargs, self.mesh)
        results = self.backend.submit(name, shipment).wait()
        return [results[rank] for rank in shipment.ranks]

    async def in_processes(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an importable function in each process of the group and return the results, in rank order; nothing if the
        workers live in the driver's process. Raises as `run`."""
        pending = self.backend.in_processes(partial(function, **kwargs), args)
        results = {} if pending is None else await pending.await_()
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End the workers; idempotent."""
        self.backend.close()

    def __enter__(self) -> WorkerGroup[W]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# Folders that the driver and a group's processes must share: proven with files, never assumed because the paths are equal.
#
# before a run    `check_shared`: each side writes a token and looks for the other's
# after a save    `check_arrived`: the driver has every file that a process of the group sees
#
# NFS may answer from its cache for some seconds. Opening a folder or a file makes a client ask the server again, which a stat of
# a cached entry does not.

PATIENCE = 5.0
"""Seconds until what another machine wrote must be seen."""
POLL = 0.05
_PREFIX = ".agentrl-shared-"


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
        answers = await group.in_processes(answer_token, str(folder), token, PATIENCE)
        for rank, (place, file, fault) in enumerate(answers):
            unseen = [] if fault else await in_thread("files", missing_in_time, folder, {file: len(token)}, PATIENCE)
            if unseen:
                fault = "this process does not see the file that the group's process wrote"
            if fault:
                raise ConfigError(
                    f"{key}: rank {rank} of the group {group.name!r}, on {place}, and this process, on {this_place()}, do "
                    f"not share the folder {folder}: {fault}. Set {key} to a folder that all nodes mount at the same path"
                )
    finally:
        # By the token, so that all answers go too, and no other run's files.
        for left in folder.glob(f"{token}*"):
            left.unlink(missing_ok=True)


def answer_token(folder: str, token: str, patience: float) -> tuple[str, str, str]:
    """In a process of the group: look for the driver's token, and write a file of its own next to it. Returns the machine, the
    name of that file, and the problem of the folder there, or ""."""
    # A random name: with one name for all ranks, a single one that shares the folder would answer for the others.
    place, own = this_place(), f"{token}-{secrets.token_hex(8)}"
    if missing_in_time(Path(folder), {token: len(token)}, patience):
        return place, own, "the group's process does not see the file that this one wrote"
    try:
        (Path(folder) / own).write_text(token)
    except OSError as problem:
        return place, own, f"the group's process cannot write there ({problem})"
    return place, own, ""


async def check_arrived(group: WorkerGroup[Any], folder: Path, what: str) -> None:
    """Raise CheckpointError if a process of `group` sees a file in `folder` that the driver does not, or another size of it:
    then it wrote to a disk of its own. `what`: the written thing, for the message."""
    for rank, (place, files) in enumerate(await group.in_processes(files_in, str(folder))):
        if missing := await in_thread("files", missing_in_time, folder, files, PATIENCE):
            raise CheckpointError(
                f"{what}: {missing[0]} ({len(missing)} of {len(files)} files), which rank {rank} of the group "
                f"{group.name!r} has on {place}, is not in {folder} on {this_place()}: all nodes must share that folder "
                "(set out to one that they mount at the same path)"
            )


def files_in(folder: str) -> tuple[str, dict[str, int]]:
    """This process's machine, and the bytes of each file below a folder as it sees them; none if the folder is missing."""
    sizes = {str(path.relative_to(folder)): _size(path) for path in sorted(Path(folder).rglob("*"))}
    return this_place(), {name: size for name, size in sizes.items() if size is not None}


def missing_in_time(folder: Path, files: Mapping[str, int], patience: float) -> list[str]:
    """Those of `files` that are not in `folder` with their bytes within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        for parent in {(folder / name).parent for name in files}:
            with suppress(OSError):  # not there, or not yet
                os.listdir(parent)  # noqa: PTH208 - for its effect on a cache
        # Sizes too: a name may be there before all of its bytes are.
        missing = sorted(name for name, size in files.items() if _size(folder / name) != size)
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(POLL)


def _size(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:  # a folder, or a file that is not there
        return None
