"""Start a worker group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.inline import InlineBackend
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.runtime import worker_env
from agentrl.cluster.worker import Worker
from agentrl.errors import AgentrlError, DispatchError

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
    Ray must be running (`agentrl.cluster.runtime.start_ray`).

    Raises ResourceError if the workers cannot be placed within `startup_timeout` seconds, DispatchError if the ranks
    do not fit the mesh or the other group.
    """
    role = name or cls.__name__.lower()
    if world_size < 1:
        raise DispatchError(f"group {role!r}: world_size must be at least 1, not {world_size}")
    grid = Mesh.of(mesh, world_size)
    if backend == "inline":
        return WorkerGroup(cls, role, grid, InlineBackend(cls, role, grid))
    from agentrl.cluster.actors import RayBackend
    from agentrl.cluster.hosts import Hosts

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
