"""Start worker groups: in the driver's process (inline) or as Ray actors, where the config puts their roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from agentrl.cluster.group import Backend, Pending, WorkerGroup
from agentrl.cluster.host import time_call
from agentrl.cluster.placement import check_roles
from agentrl.cluster.ray_cluster import worker_env
from agentrl.cluster.worker import Mesh, Shipment, Worker, WorkerContext
from agentrl.config.schema import ClusterConfig
from agentrl.data.rows import select
from agentrl.utils.errors import AgentrlError, DispatchError, ResourceError, UserError, WorkerError
from agentrl.utils.processor import own_threads
from agentrl.utils.threads import in_thread

# The inline backend


class InlinePending(Pending):
    """A call that runs in the caller's thread when its result is first requested."""

    def __init__(self, backend: InlineBackend, method: str, shipment: Shipment) -> None:
        self._backend, self._method, self._shipment = backend, method, shipment
        self._results: dict[int, Any] | None = None

    def wait(self) -> dict[int, Any]:
        if self._results is None:
            ranks = self._shipment.ranks
            self._results = {rank: self._backend.one(self._method, self._shipment, rank) for rank in ranks}
        return self._results

    async def await_(self) -> dict[int, Any]:
        return await in_thread("update", self.wait)


class InlineBackend(Backend):
    """Role objects in this process. More than one rank only for classes without collectives; such
    ranks run one after the other."""

    def __init__(self, cls: type[Worker], name: str, mesh: Mesh) -> None:
        if mesh.world_size > 1 and cls.collective:
            raise ResourceError(
                f"group {name!r}: {mesh.world_size} ranks were requested; backend 'inline' holds one, "
                "as torch.distributed has one rank per process: "
                "set cluster.actors = 1 or cluster.backend = 'ray'"
            )
        self._name, self._cls, self._mesh = name, cls, mesh
        self._workers: list[Worker] = []
        self.restart()

    def submit(self, method: str, shipment: Shipment) -> Pending:
        return InlinePending(self, method, shipment)

    def restart(self) -> None:
        ranks = range(self._mesh.world_size)
        self._workers = [self._cls(WorkerContext(self._name, rank, self._mesh)) for rank in ranks]

    def close(self) -> None:
        self._workers.clear()

    def one(self, method: str, shipment: Shipment, rank: int) -> Any:
        """Run one rank's part. A UserError is raised as it is, any other exception as a WorkerError."""
        kwargs = dict(shipment.kwargs)
        if shipment.parameter is not None and shipment.batch is not None:
            # A copy even of all rows, as with Ray: the method may write into it.
            kwargs[shipment.parameter] = select(shipment.batch, shipment.rows[rank])
        own_threads(self._workers[rank].threads)  # this thread may be another one than that of the last call
        try:
            with time_call(self._workers[rank], method):
                return getattr(self._workers[rank], method)(*shipment.args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            label = f"group {self._name!r}: {self._cls.__name__}.{method}, rank {rank}"
            raise WorkerError(f"{label}: {type(error).__name__}: {error}") from error


W = TypeVar("W", bound=Worker)


def launch(
    cls: type[W],
    *,
    backend: Literal["ray", "inline"] = "ray",
    world_size: int = 1,
    name: str | None = None,
    mesh: Mapping[str, int] | None = None,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    env: Mapping[str, str] | None = None,
    startup_timeout: float = 180.0,
    call_timeout: float | None = None,
    options: Mapping[str, Any] | None = None,
    on: WorkerGroup[Any] | None = None,
) -> WorkerGroup[W]:
    """A group of `world_size` workers of class `cls`, ready to be called.

    `mesh` names the axes of the ranks (default {"dp": world_size}). `num_cpus` and `num_gpus` are what
    each worker requests from Ray; `env` are environment variables of its process. `on` colocates the role in
    the processes of another group, rank by rank. `call_timeout` (seconds) bounds every call.
    Ray must be running (`agentrl.cluster.ray_cluster.start_ray`).

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
        asked: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, **(options or {})}
        if env:
            asked["runtime_env"] = {"env_vars": {**worker_env(), **env}}
        hosts = Hosts(role, [asked] * world_size, startup_timeout)
    try:
        hosts.create(role, cls, grid)
    except AgentrlError:
        hosts.release(role)  # ends processes that were started for this role, and leaves those of another group alone
        raise
    return WorkerGroup(cls, role, grid, RayBackend(role, cls, hosts, call_timeout))


def launch_roles(
    cluster: ClusterConfig,
    classes: Mapping[str, type[Worker]],
    meshes: Mapping[str, Mapping[str, int]] | None = None,
    call_timeout: float | None = None,
) -> dict[str, WorkerGroup[Any]]:
    """One group per role. A role with a pool (`cluster.roles`) gets that pool's processes, shared with the
    pool's other roles; any other role gets `cluster.actors` processes of its own. With backend "inline",
    every role lives in this process.

    Raises ConfigError for an unknown pool and ResourceError if something does not fit, with a table of
    demand and supply; everything that was started is ended.
    """
    check_roles(cluster)
    axes = meshes or {}
    placed = {str(role) for role in cluster.roles} if cluster.backend == "ray" else set()
    pooled = {role: cls for role, cls in classes.items() if role in placed}
    groups: dict[str, WorkerGroup[Any]] = {}
    try:
        if pooled:
            from agentrl.cluster.placement import launch_in_pools

            groups |= launch_in_pools(cluster, pooled, axes, call_timeout)
        for role, cls in classes.items():
            if role not in pooled:
                groups[role] = launch(
                    cls,
                    backend=cluster.backend,
                    world_size=cluster.actors,
                    name=role,
                    mesh=axes.get(role),
                    startup_timeout=cluster.startup_timeout,
                    call_timeout=call_timeout,
                )
    except AgentrlError:
        for group in groups.values():
            group.close()
        raise
    return {role: groups[role] for role in classes}
