"""The Ray backend of worker groups: one actor process per rank, started and stopped together.

Each token column of a batch enters Ray's object store once."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from agentrl.cluster.group import Backend, Pending
from agentrl.cluster.host import Host, PackedCall, RemoteFailure, from_wire, to_wire
from agentrl.cluster.machine import LOOPBACK_ADDRESS, open_rendezvous
from agentrl.cluster.worker import Mesh, Shipment, Worker, WorkerContext
from agentrl.data.rows import serialize
from agentrl.utils.errors import ResourceError, StalledError, WorkerDiedError, WorkerError
from agentrl.utils.threads import in_thread

if TYPE_CHECKING:
    from tensordict import TensorDict

# The processes of a group

GRACE = 2.0
"""Seconds for a process to exit before it is killed."""

LOG_LINES, MAX_CAUSE_CHARS = 200, 500
"""Last lines of a log searched for the cause of a failed start, and characters shown of the cause."""


class Hosts:
    """`len(options)` host processes and their roles.

    `options[rank]`: Ray actor options of that rank (CPUs, GPUs, placement). `timeout` (seconds) bounds every start.
    """

    def __init__(self, name: str, options: list[dict[str, Any]], timeout: float) -> None:
        """Start all processes and wait until they answer. On ResourceError (no answer) or WorkerDiedError (one was killed), all
        processes are killed."""
        self.name, self.timeout = name, timeout
        self._options = options
        self.nodes: list[tuple[str, int, str, list[str]]] = []
        self.lost: dict[int, str] = {}
        self.roles: set[str] = set()
        remote, since = ray.remote(Host), time.time()
        # Ray must not restart or retry by itself: a fresh process has no roles, and a repeated update would train twice.
        fixed = {"max_concurrency": 1, "max_restarts": 0, "max_task_retries": 0}
        self.handles = [remote.options(**fixed, **options).remote() for options in self._options]
        refs = [handle.location.remote() for handle in self.handles]
        try:
            self.nodes = ray.get(refs, timeout=self.timeout)
            check_same_agentrl(self.handles, self.timeout)
        except RayError as error:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            why = self._explain_start_failure(len(done), error, since)  # before the kill, which frees their resources
            self.kill()  # also those that did start: they would hold resources that the next attempt needs
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise WorkerDiedError(f"group {self.name!r}: a process died while it started: {first_line(error)}") from None
            raise ResourceError(why) from None
        except ResourceError:
            self.kill()
            raise

    def _explain_start_failure(self, started: int, error: RayError, since: float) -> str:
        """Explain a failed start: an error from Ray or the processes' logs, else the lack of free resources."""
        who = f"group {self.name!r}: {started} of {len(self._options)} workers started"
        if not isinstance(error, GetTimeoutError):
            return f"{who}: {last_line(error)}"
        who += f" within {self.timeout:g} s (cluster.startup_timeout)"
        # The last error in the logs of this machine's raylet and workers since the start.
        worker: Any = importlib.import_module("ray._private.worker")
        folder = None if worker._global_node is None else Path(worker._global_node.get_logs_dir_path())
        lines = list[str]()
        for path in () if folder is None else (*folder.glob("worker-*.err"), *folder.glob("raylet.err")):
            if path.stat().st_mtime >= since:
                lines += [line.strip() for line in path.read_text(errors="replace").splitlines()[-LOG_LINES:] if line.strip()]
        faults = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b|error:|bash:|.*No such file", line)]
        if faults:
            return f"{who}: their processes exit with: {faults[-1][:MAX_CAUSE_CHARS]}"
        asked = {key: self._options[0][key] for key in ("num_cpus", "num_gpus") if self._options[0].get(key)}
        free, have = (
            {key: found[key] for key in ("CPU", "GPU") if key in found}
            for found in (ray.available_resources(), ray.cluster_resources())
        )
        return f"{who}; each asks for {asked}, the cluster has {free} free of {have}"

    def create(self, role: str, cls: type[Worker], mesh: Mesh) -> None:
        """Build one role object per host. Raises WorkerDiedError if a process died, WorkerError, ResourceError after the
        timeout, or the role's UserError."""
        # On one node loopback always works, even if the node's own address does not route back (`guard_network`).
        one_node = len({node for _, _, node, _ in self.nodes}) == 1
        address = LOOPBACK_ADDRESS if one_node else self.nodes[0][0]
        try:
            rendezvous = ray.get(self.handles[0].apply.remote(open_rendezvous, address), timeout=self.timeout)
            contexts = [WorkerContext(role, rank, mesh, rendezvous) for rank in range(len(self.handles))]
            refs = [h.create.remote(role, cls, c) for h, c in zip(self.handles, contexts, strict=True)]
            ray.get(refs, timeout=self.timeout)
        except GetTimeoutError:
            raise ResourceError(f"group {role!r}: not all workers were built within {self.timeout:g} s") from None
        except RayTaskError as error:
            if isinstance(error.cause, RemoteFailure):
                raise error.cause.as_error() from None
            raise WorkerError(f"group {role!r}: {cls.__name__} cannot be built: {error}") from None
        except RayActorError as error:
            raise WorkerDiedError(f"group {role!r}: a process died while building it: {first_line(error)}") from None
        self.roles.add(role)

    def release(self, role: str) -> None:
        """Remove a role; removing the last one ends the processes."""
        self.roles.discard(role)
        if not self.roles:
            self.end()

    def end(self) -> None:
        """End all processes; idempotent. A busy one is killed after `GRACE` seconds."""
        if self.handles and ray.is_initialized():
            # Terminate first: a killed process does not run the exit handlers of libraries.
            leaving = [handle.__ray_terminate__.remote() for handle in self.handles]
            ray.wait(leaving, num_returns=len(leaving), timeout=GRACE)
        self.kill()

    def kill(self) -> None:
        """Kill all processes; idempotent."""
        if ray.is_initialized():  # otherwise ray.kill would start a new Ray
            for handle in self.handles:
                ray.kill(handle)
        self.handles, self.nodes, self.lost = [], [], {}

    def record_lost(self, refs: dict[int, Any], within: float = 0.0) -> None:
        """Record in `lost` the ranks whose process died, waiting up to `within` seconds for the call's references."""
        done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=within)
        for rank, ref in refs.items():
            if ref not in done:
                continue
            try:
                ray.get(ref)
            except RayActorError as error:
                if error.actor_id == self.handles[rank]._actor_id.hex():  # not the actor that made an argument
                    self.lost[rank] = first_line(error)
            except RayError:
                continue


def check_same_agentrl(handles: list[Any], timeout: float) -> None:
    """Raise ResourceError, with both paths, if a worker imported another agentrl: another file, or on another machine
    other contents."""

    def source(_: object, digest: bool) -> tuple[str, str, str]:  # nested, so that it is pickled by value, not imported there
        import hashlib
        import sys
        from pathlib import Path
        from platform import node

        file = str(sys.modules["agentrl"].__file__)
        found = hashlib.sha256()
        for path in sorted(Path(file).parent.rglob("*.py")) if digest else ():
            found.update(path.relative_to(Path(file).parent).as_posix().encode() + b"\0" + path.read_bytes())
        return node(), file, found.hexdigest()

    own = source(None, False)
    others = [handle for handle, at in zip(handles, _answers(handles, source, False, timeout), strict=True) if at != own]
    own = source(None, bool(others))
    for machine, file, digest in _answers(others, source, True, timeout):
        if digest != own[2]:
            raise ResourceError(
                f"the workers on {machine} run another agentrl ({file}) than this process ({own[1]}), so they would train "
                "with other code. Install the same one on all machines, and leave the start of a local Ray to agentrl"
            )


def _answers(handles: list[Any], function: Callable[..., Any], argument: object, timeout: float) -> list[Any]:
    return list(ray.get([handle.__ray_call__.remote(function, argument) for handle in handles], timeout=timeout))


def last_line(error: BaseException) -> str:
    """Return the last line of an exception's text, where Python names the cause."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# Columns in the object store

BY_COLUMN_BYTES = 1 << 20
"""A batch with fewer bytes of token columns is sent as one object: copying them costs less than another object."""


@dataclass(slots=True)
class _StoredColumn:
    """Reference to a stored column. `version`: torch's count of in-place writes. `ray`: (job id, node id)."""

    column: weakref.ref[torch.Tensor]
    version: int
    ray: tuple[str, str]
    ref: Any


class Columns(dict[int, _StoredColumn]):
    """Object references by column. A column written to since is stored again; a garbage-collected one is freed."""

    def put(self, batch: TensorDict) -> list[Any]:
        """Store a batch; returns the references from which `Host.call` rebuilds it."""
        serialized = serialize(batch)
        if sum(array.nbytes for array in serialized.ragged.values()) < BY_COLUMN_BYTES:
            return [ray.put(serialized)]
        head = replace(serialized, ragged={name: array[:0] for name, array in serialized.ragged.items()})
        return [ray.put(head), *(self._ref(batch.get(name), array) for name, array in serialized.ragged.items())]

    def _ref(self, nested: Any, array: Any) -> Any:
        column: torch.Tensor = nested._values  # the same object for every view that `values()` returns
        context, key = ray.get_runtime_context(), id(column)
        # Each new local Ray numbers its jobs from one; only its node ids differ.
        here = (context.get_job_id(), context.get_node_id())
        held = self.get(key)
        # Python reuses the id of a freed tensor, so the weak reference decides. An in-place write raises `_version`, and a
        # restart of Ray invalidates all references.
        if held is None or held.column() is not column or (held.version, held.ray) != (column._version, here):
            gone = weakref.ref(column, lambda _: self.pop(key, None))
            held = self[key] = _StoredColumn(gone, column._version, here, ray.put(array))
        return held.ref


COLUMNS = Columns()


BY_VALUE_BYTES = 64 * 1024
"""Bytes of arguments up to which they are sent with each call; larger ones enter the object store once."""

REPORT_S = 10.0
"""Seconds within which Ray reports a dead process; an error of one rank waits this long for the other ranks' answers."""


@dataclass(slots=True)
class RayPending(Pending):
    """Object references of one call, by rank."""

    backend: RayBackend
    method: str
    refs: dict[int, Any]

    def wait(self) -> dict[int, Any]:
        try:
            values = ray.get(list(self.refs.values()), timeout=self.backend.call_timeout)
        except RayError as error:
            raise self.backend.explain(self.method, self.refs, error) from None
        return self._deserialize(values)

    async def await_(self) -> dict[int, Any]:
        try:
            async with asyncio.timeout(self.backend.call_timeout):
                values = await asyncio.gather(*self.refs.values())
        except (RayError, TimeoutError) as error:
            # In a thread: it waits for Ray to report dead ranks.
            raise await in_thread("batch", self.backend.explain, self.method, self.refs, error) from None
        # Copying rows out of shared memory takes long enough to block the event loop.
        return await in_thread("batch", self._deserialize, values)

    def _deserialize(self, values: list[Any]) -> dict[int, Any]:
        return {rank: from_wire(value) for rank, value in zip(self.refs, values, strict=True)}


@dataclass(eq=False, slots=True)
class RayBackend(Backend):
    """One role on a set of hosts."""

    role: str
    cls: type[Worker]
    hosts: Hosts
    call_timeout: float | None

    def submit(self, method: str, shipment: Shipment) -> Pending:
        if self.hosts.lost:
            raise WorkerDiedError(self._describe_loss(method))
        # Arguments are pickled once for all ranks, and sent by value if small, else by an object store reference.
        buffers: list[pickle.PickleBuffer] = []
        values = (tuple(map(to_wire, shipment.args)), {key: to_wire(value) for key, value in shipment.kwargs.items()})
        common: Any = ray.cloudpickle.dumps(values, protocol=5, buffer_callback=buffers.append)
        size = len(common) + sum(buffer.raw().nbytes for buffer in buffers)
        if buffers or size > BY_VALUE_BYTES:  # Ray ships plain bytes without pickling
            common = PackedCall(common, list(buffers))
        if size > BY_VALUE_BYTES:
            common = ray.put(common)
        parts = [] if shipment.batch is None else COLUMNS.put(shipment.batch)
        handles, rows = self.hosts.handles, shipment.rows
        calls = {rank: handles[rank].call.remote(self.role, method, common, rows.get(rank), *parts) for rank in shipment.ranks}
        return RayPending(self, method, calls)

    def in_processes(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Pending:
        name = getattr(function, "func", function).__name__
        if self.hosts.lost:
            raise WorkerDiedError(self._describe_loss(name))
        refs = {rank: handle.apply.remote(function, *args) for rank, handle in enumerate(self.hosts.handles)}
        return RayPending(self, name, refs)

    def close(self) -> None:
        self.hosts.release(self.role)

    def explain(self, method: str, refs: dict[int, Any], error: BaseException) -> Exception:
        """Convert an error from Ray into the one that the driver raises."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, RemoteFailure):
            # The peers of a killed rank see their connection close before Ray reports the death.
            self.hosts.record_lost(refs, within=REPORT_S)
            return WorkerDiedError(self._describe_loss(method)) if self.hosts.lost else error.cause.as_error()
        if isinstance(error, TimeoutError):  # Ray's GetTimeoutError is one
            done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in refs.items() if ref not in done]
            return StalledError(f"{self._label(method)}: no answer from ranks {late} within {self.call_timeout:g} s")
        self.hosts.record_lost(refs)
        if self.hosts.lost:
            return WorkerDiedError(self._describe_loss(method))
        if isinstance(error, RayTaskError):
            return WorkerError(f"{self._label(method)}: {error}")
        # No process of this group died, so the lost one is the worker that produced an argument.
        return WorkerDiedError(f"{self._label(method)}: an argument that it waits for is lost: {first_line(error)}")

    def _label(self, method: str) -> str:
        return f"group {self.role!r}: {self.cls.__name__}.{method}"

    def _describe_loss(self, method: str) -> str:
        lost, nodes = self.hosts.lost, self.hosts.nodes
        named = [f"rank {rank} (pid {nodes[rank][1]} on {nodes[rank][0]}): {lost[rank]}" for rank in sorted(lost)]
        return f"{self._label(method)}: worker process gone: {'; '.join(named)}"
