"""The processes of a worker group under Ray: started together, known by rank, replaced together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from agentrl.cluster.address import LOOPBACK_ADDRESS
from agentrl.cluster.host import Host, RemoteFailure
from agentrl.cluster.mesh import Mesh
from agentrl.cluster.worker import Worker, WorkerContext
from agentrl.errors import ResourceError, WorkerDiedError, WorkerError

GRACE = 2.0
"""Seconds that a process gets to exit by itself."""

Role = tuple[type[Worker], Mesh]


class Hosts:
    """`len(options)` host processes and the roles that they hold.

    `options[rank]` are Ray's actor options of that rank (CPUs, GPUs, placement). `timeout` (seconds)
    bounds every start; `on_end`, if set, is called once when they end.
    """

    def __init__(self, name: str, options: list[dict[str, Any]], timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self._options = options
        self.on_end: Callable[[], None] | None = None
        self.handles: list[Any] = []
        self.nodes: list[tuple[str, int, str]] = []
        self.lost: dict[int, str] = {}
        self.roles: dict[str, Role] = {}
        self._start()

    def _start(self) -> None:
        """Start all processes and wait until they answer. Raises ResourceError if they do not, WorkerDiedError if one was
        killed, and leaves none behind."""
        remote = ray.remote(Host)
        # Ray must not restart or retry by itself: a fresh process has no roles, and a repeated update would train twice.
        fixed = {"max_concurrency": 1, "max_restarts": 0, "max_task_retries": 0}
        self.handles = [remote.options(**fixed, **options).remote() for options in self._options]
        refs = [handle.location.remote() for handle in self.handles]
        try:
            self.nodes = ray.get(refs, timeout=self.timeout)
        except (GetTimeoutError, RayActorError, RayTaskError) as error:
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            self.kill()  # also those that did start: they would keep their resources from the next attempt
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise WorkerDiedError(f"group {self.name!r}: a process died while it started: {first_line(error)}") from None
            raise ResourceError(self._not_placed(len(done), error)) from None

    def _not_placed(self, started: int, error: BaseException) -> str:
        asked = {key: self._options[0][key] for key in ("num_cpus", "num_gpus") if self._options[0].get(key)}
        cause = "" if isinstance(error, GetTimeoutError) else f" ({first_line(error)})"
        free, have = cpus_and_gpus(ray.available_resources()), cpus_and_gpus(ray.cluster_resources())
        return (
            f"group {self.name!r}: {started} of {len(self._options)} workers started within "
            f"{self.timeout:g} s{cause}; each asks for {asked}, the cluster has {free} free of {have}"
        )

    def create(self, role: str, cls: type[Worker], mesh: Mesh) -> None:
        """Build one role object per host. Raises WorkerDiedError if a process is gone, WorkerError, or the role's UserError."""
        # On one node loopback always works, even if the node's own address does not route back (see guard.py).
        one_node = len({node for _, _, node in self.nodes}) == 1
        address = LOOPBACK_ADDRESS if one_node else self.nodes[0][0]
        try:
            rendezvous = ray.get(self.handles[0].listen.remote(address), timeout=self.timeout)
            contexts = [WorkerContext(role, rank, mesh, rendezvous) for rank in range(len(self.handles))]
            refs = [h.create.remote(role, cls, c) for h, c in zip(self.handles, contexts, strict=True)]
            ray.get(refs, timeout=self.timeout)
        except GetTimeoutError:
            raise ResourceError(f"group {role!r}: not all workers were built within {self.timeout:g} s") from None
        except RayTaskError as error:
            raise _not_built(role, cls, error) from None
        except RayActorError as error:
            raise WorkerDiedError(f"group {role!r}: a process died while building it: {first_line(error)}") from None
        self.roles[role] = (cls, mesh)

    def cards(self) -> list[list[str]]:
        """The GPUs of each rank."""
        found: list[list[str]] = ray.get([handle.cards.remote() for handle in self.handles], timeout=self.timeout)
        return found

    def restart(self) -> None:
        """Kill the remaining processes, start fresh ones and build every role again, without its old state."""
        self.kill()
        self._start()
        for role, (cls, mesh) in list(self.roles.items()):
            self.create(role, cls, mesh)

    def release(self, role: str) -> None:
        """Drop a role; the processes end with their last role."""
        self.roles.pop(role, None)
        if not self.roles:
            self.end()

    def end(self) -> None:
        """End all processes; idempotent. A busy one is killed after `GRACE` seconds."""
        if self.handles and ray.is_initialized():
            # Asked before they are killed: a killed process runs no exit handlers, and libraries have some.
            leaving = [handle.__ray_terminate__.remote() for handle in self.handles]
            ray.wait(leaving, num_returns=len(leaving), timeout=GRACE)
        self.kill()
        if self.on_end is not None and ray.is_initialized():
            self.on_end()
        self.on_end = None

    def kill(self) -> None:
        """Kill all processes; idempotent."""
        if ray.is_initialized():  # otherwise ray.kill would start a new Ray
            for handle in self.handles:
                ray.kill(handle)
        self.handles, self.nodes, self.lost = [], [], {}

    def note_lost(self, refs: dict[int, Any], within: float = 0.0) -> None:
        """Record the processes that are gone, found by a failed call's references, of which each is answered or waited for
        `within` seconds."""
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

    def describe_lost(self) -> str:
        """The lost ranks with process ids and Ray's reason."""
        found = {rank: self.nodes[rank] for rank in self.lost}
        named = [f"rank {r} (pid {found[r][1]} on {found[r][0]}): {self.lost[r]}" for r in sorted(self.lost)]
        return "; ".join(named)


def _not_built(role: str, cls: type[Worker], error: RayTaskError) -> Exception:
    if isinstance(error.cause, RemoteFailure):
        return error.cause.as_error()
    return WorkerError(f"group {role!r}: {cls.__name__} cannot be built: {error}")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def cpus_and_gpus(resources: dict[str, float]) -> dict[str, float]:
    """CPUs and GPUs of a Ray resource table."""
    return {key: resources[key] for key in ("CPU", "GPU") if key in resources}
