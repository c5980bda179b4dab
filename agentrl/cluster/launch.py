"""Start worker groups in the driver's process (inline) or as Ray actors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from agentrl.cluster.group import Backend, Pending, WorkerGroup
from agentrl.cluster.host import AROUND_CALLS
from agentrl.cluster.worker import Mesh, Shipment, Worker, WorkerContext
from agentrl.data.rows import select
from agentrl.utils.errors import AgentrlError, DispatchError, ResourceError, UserError, WorkerError, fault_text
from agentrl.utils.processor import set_cpu_threads
from agentrl.utils.threads import fork_safe

# The inline backend


@dataclass(frozen=True)
class InlinePending(Pending):
    """A call that `wait`, called once, runs in the caller's thread."""

    backend: InlineBackend
    method: str
    shipment: Shipment

    def wait(self) -> dict[int, Any]:
        """Run each rank's part, after the group's earlier calls. Raises a UserError unchanged, any other as a WorkerError."""
        method, shipment, results = self.method, self.shipment, dict[int, Any]()
        with self.backend.turn:  # the call of a cancelled caller runs on
            for rank in shipment.ranks:
                worker = self.backend.workers[rank]
                # Copy even if all rows are selected, as Ray does: the method may write into the batch.
                rows = () if shipment.batch is None else (select(shipment.batch, shipment.rows[rank]),)
                set_cpu_threads(worker.threads)  # this thread may differ from that of the last call
                try:
                    with ExitStack() as stack:
                        for around in AROUND_CALLS:
                            stack.enter_context(around(worker, method))
                        results[rank] = getattr(worker, method)(*rows, *shipment.args, **shipment.kwargs)
                except UserError:
                    raise
                except Exception as error:
                    label = f"group {worker.context.group!r}: {type(worker).__name__}.{method}, rank {rank}"
                    raise WorkerError(f"{label}: {fault_text(error)}") from error
        return results


class InlineBackend(Backend):
    """Role objects in this process. Only classes without collectives may have several ranks, which run one after the other."""

    def __init__(self, cls: type[Worker], name: str, mesh: Mesh) -> None:
        if mesh.world_size > 1 and cls.collective:
            raise ResourceError(
                f"group {name!r}: {mesh.world_size} ranks were requested; backend 'inline' holds one, "
                "as torch.distributed has one rank per process: "
                "set cluster.actors = 1 or cluster.backend = 'ray'"
            )
        self.workers = [cls(WorkerContext(name, rank, mesh)) for rank in range(mesh.world_size)]
        self.turn = fork_safe(threading.Lock())

    def submit(self, method: str, shipment: Shipment) -> Pending:
        return InlinePending(self, method, shipment)

    def close(self) -> None:
        self.workers.clear()


W = TypeVar("W", bound=Worker)


def launch(
    cls: type[W],
    *,
    backend: Literal["ray", "inline"] = "ray",
    world_size: int = 1,
    name: str | None = None,
    mesh: Mapping[str, int] | None = None,
    num_cpus: float = 1.0,
    startup_timeout: float = 180.0,
    call_timeout: float | None = None,
    on: WorkerGroup[Any] | None = None,
) -> WorkerGroup[W]:
    """Start a group of `world_size` workers of class `cls`. Needs a running Ray (`start_ray`) unless inline.

    `mesh`: sizes of the mesh axes (default {"dp": world_size}). `num_cpus`: CPU slots per worker. `on`: colocate the role in the
    processes of another group, rank by rank. `call_timeout`: limit of every call in seconds.

    Raises ResourceError if the workers cannot be placed within `startup_timeout` seconds, DispatchError if the ranks
    do not fit the mesh or the other group.
    """
    role = name or cls.__name__.lower()
    if world_size < 1:
        raise DispatchError(f"group {role!r}: world_size must be at least 1, not {world_size}")
    grid = Mesh.of(mesh, world_size)
    if backend == "inline":
        return WorkerGroup(cls, role, grid, InlineBackend(cls, role, grid))
    from agentrl.cluster.ray_group import Hosts, RayBackend

    if on is not None:
        if not isinstance(on.backend, RayBackend) or on.world_size != world_size:
            raise DispatchError(f"group {role!r}: sharing the processes of {on.name!r} needs 'ray' and {on.world_size} ranks")
        hosts = on.backend.hosts
        if role in hosts.roles:
            raise DispatchError(f"group {role!r}: the processes of {on.name!r} already hold a role of that name")
    else:
        hosts = Hosts(role, [{"num_cpus": num_cpus, "num_gpus": 0.0}] * world_size, startup_timeout)
    try:
        hosts.create(role, cls, grid)
    except AgentrlError:
        hosts.release(role)  # ends processes started for this role, but not those of another group
        raise
    return WorkerGroup(cls, role, grid, RayBackend(role, cls, hosts, call_timeout))
