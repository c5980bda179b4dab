"""The processes of a worker group under Ray: started together, known by rank, replaced together."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from pathlib import Path
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

MOST_LINES, MOST_LETTERS = 200, 500
"""Of a log that is searched for why a process has not started, and of what is shown of it."""

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
            why = self._not_started(len(done), error, since)  # before its processes, and what they take, are gone
            self.kill()  # also those that did start: they would keep their resources from the next attempt
            if isinstance(error, RayActorError) and not error.actor_init_failed:
                raise WorkerDiedError(f"group {self.name!r}: a process died while it started: {first_line(error)}") from None
            raise ResourceError(why) from None
        except ResourceError:
            self.kill()
            raise

    def _not_started(self, started: int, error: RayError, since: float) -> str:
        """Tell a fault of the processes, which Ray or their logs have, from places that are taken."""
        who = f"group {self.name!r}: {started} of {len(self._options)} workers started"
        if not isinstance(error, GetTimeoutError):
            return f"{who}: {last_line(error)}"
        who += f" within {self.timeout:g} s (cluster.startup_timeout)"
        if said := said_by_processes(since):
            return f"{who}: their processes end with: {said}"
        asked = {key: self._options[0][key] for key in ("num_cpus", "num_gpus") if self._options[0].get(key)}
        free, have = cpus_and_gpus(ray.available_resources()), cpus_and_gpus(ray.cluster_resources())
        return f"{who}; each asks for {asked}, the cluster has {free} free of {have}"

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


def check_same_agentrl(handles: list[Any], timeout: float) -> None:
    """Raise ResourceError, with both paths, if a worker has imported another agentrl than this process: another file, or on
    another machine other contents."""

    def source(_: object, digest: bool) -> tuple[str, str, str]:  # inside a function: so it travels by value, past that agentrl
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


def said_by_processes(since: float) -> str:
    """The last error that this machine's raylet or its workers have written since that `time.time()`; "" if there is none."""
    worker: Any = importlib.import_module("ray._private.worker")
    if worker._global_node is None:
        return ""
    folder, lines = Path(worker._global_node.get_logs_dir_path()), list[str]()
    for path in (*folder.glob("worker-*.err"), *folder.glob("raylet.err")):
        if path.stat().st_mtime >= since:
            lines += [line.strip() for line in path.read_text(errors="replace").splitlines()[-MOST_LINES:] if line.strip()]
    faults = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b|error:|bash:|.*No such file", line)]
    return faults[-1][:MOST_LETTERS] if faults else ""


def last_line(error: BaseException) -> str:
    """The last line of an exception's text, in which Python names the cause."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()


def first_line(error: BaseException) -> str:
    """The first line of an exception's text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def cpus_and_gpus(resources: dict[str, float]) -> dict[str, float]:
    """CPUs and GPUs of a Ray resource table."""
    return {key: resources[key] for key in ("CPU", "GPU") if key in resources}
