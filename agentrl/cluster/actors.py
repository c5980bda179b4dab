"""The Ray backend: one actor process a rank."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from agentrl.batch.wire import to_wire
from agentrl.cluster.dispatch import Shipment
from agentrl.cluster.group import Backend
from agentrl.cluster.host import Host, Packed, RemoteFailure, unwire, wire
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import ResourceError, StalledError, WorkerDiedError, WorkerError

INLINE_BYTES = 64 * 1024
"""Arguments up to this size travel with each call; larger ones go into the object store once."""


@dataclass(slots=True)
class Hosts:
    """Processes that hold roles: actor handles in rank order, and who uses them."""

    handles: list[Any]
    roles: list[str] = field(default_factory=list)
    nodes: list[tuple[str, int, str]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)


class RayBackend(Backend):
    """A role on a set of hosts."""

    def __init__(self, role: str, cls: type[Worker], hosts: Hosts, call_timeout: float | None) -> None:
        self.role, self.cls, self.hosts, self.call_timeout = role, cls, hosts, call_timeout

    def call(self, method: str, shipment: Shipment) -> dict[int, Any]:
        refs = self.submit(method, shipment)
        try:
            values = ray.get(refs, timeout=self.call_timeout)
        except (RayTaskError, RayActorError, GetTimeoutError) as error:
            raise self.explain(method, shipment.ranks, refs, error) from None
        return {rank: unwire(value) for rank, value in zip(shipment.ranks, values, strict=True)}

    async def acall(self, method: str, shipment: Shipment) -> dict[int, Any]:
        refs = self.submit(method, shipment)
        try:
            async with asyncio.timeout(self.call_timeout):
                values = await asyncio.gather(*refs)
        except (RayTaskError, RayActorError, TimeoutError) as error:
            raise self.explain(method, shipment.ranks, refs, error) from None
        return {rank: unwire(value) for rank, value in zip(shipment.ranks, values, strict=True)}

    def submit(self, method: str, shipment: Shipment) -> list[Any]:
        """Send one call to its ranks; one object reference a rank, in the shipment's order."""
        if self.hosts.lost:
            raise WorkerDiedError(self._lost(method))
        common = pack_arguments(shipment.args, shipment.kwargs)
        parts = () if shipment.rows is None else (ray.put(to_wire(shipment.batch)),)
        refs = []
        for rank in shipment.ranks:
            own: Any = None
            if shipment.rows is not None:
                own = shipment.rows[rank]
            elif shipment.items is not None:
                own = wire(shipment.items[rank])
            host = self.hosts.handles[rank]
            refs.append(host.call.remote(self.role, method, shipment.parameter, common, own, *parts))
        return refs

    def close(self) -> None:
        if self.role in self.hosts.roles:
            self.hosts.roles.remove(self.role)
        if not self.hosts.roles:
            for handle in self.hosts.handles:
                ray.kill(handle)
            self.hosts.handles = []

    def explain(
        self, method: str, ranks: Sequence[int], refs: Sequence[Any], error: BaseException
    ) -> Exception:
        """The error that the driver raises for what Ray reported."""
        if isinstance(error, RayTaskError):
            return self._failed(method, error)
        if isinstance(error, (GetTimeoutError, TimeoutError)):
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            late = [rank for rank, ref in zip(ranks, refs, strict=True) if ref not in done]
            return StalledError(
                f"{self._where(method)}: no answer from ranks {late} within {self.call_timeout:g} s"
            )
        self._note_dead(ranks, refs)
        return WorkerDiedError(self._lost(method))

    def _failed(self, method: str, error: RayTaskError) -> Exception:
        cause = error.cause
        if not isinstance(cause, RemoteFailure):
            return WorkerError(f"{self._where(method)}: {error}")
        where = f"{self._where(method)}, rank {cause.rank}"
        if cause.user_error is not None:
            return cause.user_error(f"{cause.message} ({where})")
        return WorkerError(f"{where}: {cause.kind}: {cause.message}\n--- remote traceback ---\n{cause.trace}")

    def _note_dead(self, ranks: Sequence[int], refs: Sequence[Any]) -> None:
        done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        for rank, ref in zip(ranks, refs, strict=True):
            if ref not in done:
                continue
            try:
                ray.get(ref)
            except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
                self.hosts.lost[rank] = str(error).strip().splitlines()[0]
            except RayTaskError:
                continue

    def _where(self, method: str) -> str:
        return f"group {self.role!r}: {self.cls.__name__}.{method}"

    def _lost(self, method: str) -> str:
        names = [self._describe(rank) for rank in sorted(self.hosts.lost)]
        return f"{self._where(method)}: worker process gone: {'; '.join(names)}"

    def _describe(self, rank: int) -> str:
        if rank < len(self.hosts.nodes):
            address, pid, _ = self.hosts.nodes[rank]
            return f"rank {rank} (pid {pid} on {address}): {self.hosts.lost[rank]}"
        return f"rank {rank}: {self.hosts.lost[rank]}"


def pack_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Arguments pickled once: by value where small, else a reference into the object store."""
    buffers: list[pickle.PickleBuffer] = []
    shipped = (tuple(wire(x) for x in args), {key: wire(x) for key, x in kwargs.items()})
    data = ray.cloudpickle.dumps(shipped, protocol=5, buffer_callback=buffers.append)
    packed = Packed(data, list(buffers))
    size = len(data) + sum(buffer.raw().nbytes for buffer in buffers)
    return packed if size <= INLINE_BYTES else ray.put(packed)


def start_hosts(count: int, name: str, options: dict[str, Any], timeout: float) -> Hosts:
    """Start `count` host processes and wait until all answer.

    Raises ResourceError where they did not all start in `timeout` seconds; none is left behind.
    """
    remote = ray.remote(Host)
    handles = [
        remote.options(max_concurrency=1, max_restarts=0, max_task_retries=0, **options).remote()
        for _ in range(count)
    ]
    hosts = Hosts(handles)
    refs = [handle.where.remote() for handle in handles]
    try:
        hosts.nodes = ray.get(refs, timeout=timeout)
    except (GetTimeoutError, RayActorError, RayTaskError) as error:
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for handle in handles:
            ray.kill(handle)
        asked = {key: options[key] for key in ("num_cpus", "num_gpus") if options.get(key)}
        cause = "" if isinstance(error, GetTimeoutError) else f" ({str(error).strip().splitlines()[0]})"
        raise ResourceError(
            f"group {name!r}: {len(done)} of {count} workers started within {timeout:g} s{cause}; each asks for {asked}, "
            f"the cluster has {_brief(ray.available_resources())} free of {_brief(ray.cluster_resources())}"
        ) from None
    return hosts


def _brief(resources: dict[str, float]) -> dict[str, float]:
    return {key: resources[key] for key in ("CPU", "GPU") if key in resources}


def create_role(hosts: Hosts, role: str, cls: type[Worker], mesh: Mesh, timeout: float) -> None:
    """Build one role object a host. Raises what the role's constructor raised."""
    one_node = len({node for _, _, node in hosts.nodes}) == 1
    address = "127.0.0.1" if one_node else hosts.nodes[0][0]
    rendezvous = ray.get(hosts.handles[0].listen.remote(address), timeout=timeout)
    refs = [
        handle.create.remote(role, cls, WorkerContext(role, rank, mesh, rendezvous))
        for rank, handle in enumerate(hosts.handles)
    ]
    backend = RayBackend(role, cls, hosts, timeout)
    try:
        ray.get(refs, timeout=timeout)
    except (RayTaskError, RayActorError, GetTimeoutError) as error:
        raise backend.explain("__init__", range(len(refs)), refs, error) from None
    hosts.roles.append(role)
