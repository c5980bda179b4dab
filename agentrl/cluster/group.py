"""A worker group as the driver sees it: `group.run(Actor.update, batch)`.

Splits batches over the ranks of a mesh axis, collects results in row order, and tests that all
processes of a group share a folder."""

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

# Results of the ranks


def mean_metrics(label: str, parts: Sequence[Any]) -> dict[str, float]:
    """Average each key over the ranks that report it."""
    values: dict[str, list[float]] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise DispatchError(f"{label}: collect='metrics' needs a dict from each rank, got {type(part).__name__}")
        for key, value in part.items():
            values.setdefault(key, []).append(float(value))
    # Not over all ranks: a rank without rows reports nothing, and counting it as 0 would lower the mean.
    return {key: sum(items) / len(items) for key, items in values.items()}


def restore_order(label: str, parts: Sequence[Any], rows: Sequence[np.ndarray]) -> TensorDict:
    """Restore the driver's row order: entry k of `parts[r]` is row `rows[r][k]`.

    Raises DispatchError if a rank did not return a TensorDict with one row per row that it received.
    """
    for part in parts:
        if not is_batch(part):
            raise DispatchError(f"{label}: collect='source' needs a TensorDict from each rank, got {type(part).__name__}")
    given, got = [len(row) for row in rows], [len(part) for part in parts]
    if given != got:
        raise DispatchError(f"{label}: collect='source' needs one result per row; ranks got {given}, returned {got}")
    whole = concat(parts)
    order = np.argsort(np.concatenate(list(rows)), kind="stable")
    # With one rank, or rows already in order, this saves a copy of the batch.
    return whole if np.array_equal(order, np.arange(len(order))) else select(whole, order)


# Rows over ranks


def batch_of(label: str, args: tuple[Any, ...]) -> TensorDict:
    """Return the first argument of a call. Raises DispatchError if it is missing or no TensorDict."""
    if not args:
        raise DispatchError(f"{label}: no argument is given for the batch, which comes first")
    if not is_batch(args[0]):
        raise DispatchError(f"{label}: the first argument must be a TensorDict, it is a {type(args[0]).__name__}")
    batch: TensorDict = args[0]
    return batch


@dataclass(frozen=True)
class Shard(Strategy):
    """Split the first argument, a TensorDict, by rows along the mesh axis "dp"; every rank gets all other arguments.

    A rank may get zero rows. Ranks with the same coordinate of "dp" (for example tensor-parallel peers) get the same rows; the
    result is taken from one of them.

    - `balance`: "tokens" balances tokens per rank; "column" reads the rank from the row column `dp_rank` (-1: no rank; not
      allowed if `collect` is "source").
    - `stays`: columns that no worker reads; they are not sent.
    - `collect`: "source" restores the driver's row order (the method returns one entry per row); "metrics" averages dicts of
      numbers key by key, and lists of such dicts position by position.
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
        # In row order: adjacent rows are then copied as one slice, and results come back nearly in order.
        shards = [np.flatnonzero(owner == rank) for rank in range(count)]
        # Sequence-parallel peers compute each micro-batch together, so they need the same rows.
        rows = {rank: shards[place] for rank, place in enumerate(places)}
        return Shipment(args[1:], kwargs, list(rows), batch.exclude(*self.stays) if self.stays else batch, rows)

    def gather(self, label: str, results: Mapping[int, Any], shipment: Shipment, mesh: Mesh) -> Any:
        sources = np.unique(mesh.places("dp"), return_index=True)[1].tolist()  # the first rank of each coordinate
        parts = [results[rank] for rank in sources]
        if self.collect == "source":
            return restore_order(label, parts, [shipment.rows[rank] for rank in sources])
        if set(map(type, parts)) == {list}:
            return [mean_metrics(label, each) for each in zip(*parts, strict=True)]
        return mean_metrics(label, parts)


# Pending calls

R = TypeVar("R")


class Pending(ABC):
    """A call whose results are pending."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Return the results by rank. Raises the errors of `WorkerGroup.run`."""

    async def await_(self) -> dict[int, Any]:
        """Await the results; by default `wait` in a thread."""
        return await in_thread("update", self.wait)


# The group

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")
T = TypeVar("T")


class Backend(ABC):
    """Runs the workers of one group."""

    @abstractmethod
    def submit(self, method: str, shipment: Shipment) -> Pending:
        """Send a call to the ranks of the shipment. Raises WorkerDiedError if one is known to be dead."""

    def in_processes(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Pending | None:
        """Start a function in every process of the group; None if the workers run in the caller's process."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End the workers; idempotent."""


@dataclass(eq=False)
class WorkerGroup(Generic[W]):
    """Workers of one class, one per rank of a mesh."""

    cls: type[W]
    name: str
    mesh: Mesh
    backend: Backend

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    def run(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `method` on all ranks and combine the results by its dispatch strategy.

        Raises DispatchError if the arguments do not fit, WorkerError with worker, rank, method and the
        remote traceback, WorkerDiedError if a process died, StalledError after the group's
        `call_timeout`, or a UserError that the worker raised.
        """
        name, strategy = resolve(self.cls, method)
        label = f"{self.cls.__name__}.{name}"
        shipment = strategy.scatter(label, args, kwargs, self.mesh)
        combined: R = strategy.gather(label, self.backend.submit(name, shipment).wait(), shipment, self.mesh)
        return combined

    async def arun(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`run` without blocking the event loop, neither by the workers nor by serializing a batch."""
        with span("call", f"{self.name}: {method.__name__}", track="calls"):
            name, strategy = resolve(self.cls, method)
            label = f"{self.cls.__name__}.{name}"
            # Only Shard serializes and joins batches, which is long enough to block the event loop.
            heavy = isinstance(strategy, Shard)

            def send() -> tuple[Shipment, Pending]:
                shipment = strategy.scatter(label, args, kwargs, self.mesh)
                return shipment, self.backend.submit(name, shipment)

            shipment, pending = await in_thread("batch", send) if heavy else send()
            gather = partial(strategy.gather, label, await pending.await_(), shipment, self.mesh)
            combined: R = await in_thread("batch", gather) if heavy else gather()
            return combined

    def run_all(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call `method` and return the results of all ranks, in rank order."""
        name, strategy = resolve(self.cls, method)
        shipment = strategy.scatter(f"{self.cls.__name__}.{name}", args, kwargs, self.mesh)
        results = self.backend.submit(name, shipment).wait()
        return [results[rank] for rank in shipment.ranks]

    async def in_processes(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an importable function in each process and return the results in rank order; [] if the workers run in the
        driver's process. Raises the errors of `run`."""
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


# Folders shared by the driver and a group's processes. Equal paths prove nothing, so files are written and read:
#
# before a run    `check_shared`: each side writes a token file and looks for the other's
# after a save    `check_arrived`: the driver sees every file that a process of the group sees
#
# An NFS client may answer from its cache for some seconds. Opening a folder or file asks the server again; a stat does not.

PATIENCE = 5.0
"""Seconds until files of another machine must be visible."""
POLL = 0.05
_PREFIX = ".agentrl-shared-"


def machine_name() -> str:
    """Return this machine's host name, with its address in a Ray cluster."""
    name = socket.gethostname()
    # Do not import Ray: a process that has not imported it is in no cluster.
    ray = sys.modules.get("ray")
    return f"{name} ({ray.util.get_node_ip_address()})" if ray is not None and ray.is_initialized() else name


async def check_shared(group: WorkerGroup[Any], folder: Path, key: str) -> None:
    """Raise ConfigError if the driver and a process of `group` cannot read each other's files in `folder`.

    `key`: the config key that sets the folder. Takes up to PATIENCE seconds per missing file.
    """
    token = _PREFIX + secrets.token_hex(8)
    try:
        # In both directions: each machine may have its own folder of that path, or one may mount it read-only.
        (folder / token).write_text(token)
        answers = await group.in_processes(answer_token, str(folder), token, PATIENCE)
        for rank, (place, file, fault) in enumerate(answers):
            unseen = [] if fault else await in_thread("files", missing_in_time, folder, {file: len(token)}, PATIENCE)
            if unseen:
                fault = "this process does not see the file that the group's process wrote"
            if fault:
                raise ConfigError(
                    f"{key}: rank {rank} of the group {group.name!r}, on {place}, and this process, on {machine_name()}, do "
                    f"not share the folder {folder}: {fault}. Set {key} to a folder that all nodes mount at the same path"
                )
    finally:
        # The token's prefix matches all answers and no other run's files.
        for left in folder.glob(f"{token}*"):
            left.unlink(missing_ok=True)


def answer_token(folder: str, token: str, patience: float) -> tuple[str, str, str]:
    """Look for the driver's token and write an answer file next to it; runs in a process of the group.

    Returns the machine, the name of the answer file, and the problem with the folder, or ""."""
    # A random name per rank: with a common one, a single rank that shares the folder would answer for all.
    place, own = machine_name(), f"{token}-{secrets.token_hex(8)}"
    if missing_in_time(Path(folder), {token: len(token)}, patience):
        return place, own, "the group's process does not see the file that this one wrote"
    try:
        (Path(folder) / own).write_text(token)
    except OSError as problem:
        return place, own, f"the group's process cannot write there ({problem})"
    return place, own, ""


async def check_arrived(group: WorkerGroup[Any], folder: Path, what: str) -> None:
    """Raise CheckpointError if a process of `group` sees a file in `folder` that the driver misses or sees with another size.

    Such a process wrote to a local disk. `what` names the saved object in the message."""
    for rank, (place, files) in enumerate(await group.in_processes(files_in, str(folder))):
        if missing := await in_thread("files", missing_in_time, folder, files, PATIENCE):
            raise CheckpointError(
                f"{what}: {missing[0]} ({len(missing)} of {len(files)} files), which rank {rank} of the group "
                f"{group.name!r} has on {place}, is not in {folder} on {machine_name()}: all nodes must share that folder "
                "(set out to one that they mount at the same path)"
            )


def files_in(folder: str) -> tuple[str, dict[str, int]]:
    """Return this machine's name and the size in bytes of each file below `folder`."""
    sizes = {str(path.relative_to(folder)): _size(path) for path in sorted(Path(folder).rglob("*"))}
    return machine_name(), {name: size for name, size in sizes.items() if size is not None}


def missing_in_time(folder: Path, files: Mapping[str, int], patience: float) -> list[str]:
    """Return those of `files` (name -> bytes) that do not appear in `folder` with their size within `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        for parent in {(folder / name).parent for name in files}:
            with suppress(OSError):  # it may not exist, or not yet
                os.listdir(parent)  # noqa: PTH208 - refreshes the NFS cache
        # Sizes too: a name may appear before all bytes of the file.
        missing = sorted(name for name, size in files.items() if _size(folder / name) != size)
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(POLL)


def _size(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:  # a folder, or missing
        return None
