"""Ray for a run: join a cluster or start a local one, watch it, and stop it.

Reading order: the user's folders on workers, checks before joining a cluster, the vital processes of
a local Ray, start and stop, and work that is cancelled when the local Ray dies."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import psutil

import agentrl
from agentrl.cluster import ray_keeper
from agentrl.cluster.machine import check_ray_folder, guard_network, ray_folder, usable_gpus
from agentrl.cluster.ray_parent import WARNINGS, has_parent, report_to_parent
from agentrl.config.schema import ClusterConfig
from agentrl.env.address import DRIVER_SOURCES, known_sources
from agentrl.utils.errors import ResourceError, UserError, WorkerDiedError
from agentrl.utils.processor import PASSIVE, usable_cpus, usable_memory
from agentrl.utils.search_path import SHIPPED
from agentrl.utils.threads import in_thread

# The user's folders on the workers

SHELVES = ("envs", "tools", "rewards", "configs", "plugins")


def shelf_roots() -> list[Path]:
    """Return the folders that hold the user's shelves: the working directory, then AGENTRL_PATH."""
    given = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    return [Path.cwd(), *(Path(item).resolve() for item in given if item)]


def shipped_env(staged: Path) -> dict[str, str]:
    """Copy the user's shelves into `staged`, one folder per root; Ray sends it to the workers as their working directory.

    Returns the workers' environment variables: the folders of the copies, the driver's folders they were copied from (so that an
    `EnvRef` finds the copy of its file, never the driver's path), and the driver's paths of benchmark files (not copied)."""
    copied: dict[str, str] = {}
    for number, root in enumerate(shelf_roots()):
        for shelf in (root / shelf for shelf in SHELVES if (root / shelf).is_dir()):
            copied[f"shelf{number}"] = str(root)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
            shutil.copytree(shelf, staged / f"shelf{number}" / shelf.name, ignore=ignored)
    path, roots = os.pathsep.join(copied), os.pathsep.join(copied.values())
    return {"AGENTRL_PATH": path, SHIPPED: roots, DRIVER_SOURCES: json.dumps(known_sources())}


# Checks before joining a cluster. Ray itself retries for a minute and fills the log before it reports a failure.

REACH_S = 5.0
"""Timeout of a TCP connection to the head node."""
CLIENT = "ray://"
ANSWER_S = 20.0
"""Timeout of the head node's answer, including the import of Ray."""
PROBE = """
import sys
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import GcsClient
ensure_token_if_auth_enabled(None, create_token_if_missing=False)
GcsClient(address=sys.argv[1])
"""
"""Asks the head node for the cluster id, as a joining driver does. Runs in a subprocess, because a missing token exits the
process, and because Ray's C++ code writes its log lines directly to stderr."""


def check_join(address: str, key: str = "cluster.address") -> None:
    """Raise ResourceError if the cluster at `address` (host:port) cannot be reached or rejects this process's token.

    `key`: the setting that gave the address, cluster.address or RAY_ADDRESS. "auto": the cluster that this machine belongs to.
    A Ray client server ("ray://host:port") only has to accept a connection.
    """
    if address == "auto":
        # The address that Ray uses: RAY_ADDRESS, or the cluster with processes on this machine.
        from ray._private.services import canonicalize_bootstrap_address

        try:
            address = str(canonicalize_bootstrap_address("auto"))
        except ConnectionError:
            raise ResourceError(
                "cluster.address = 'auto': no Ray runs on this machine. Start one here (ray start --head, or ray start "
                '--address=HEAD:6379), give the head\'s address, or set cluster.address = "" for this machine alone; a run for '
                "another machine is planned with --dry-run --gpu-memory GIB --nodes 4x8"
            ) from None
    elsewhere = " (of the environment; unset it to run on this machine alone)" if key == "RAY_ADDRESS" else ""
    given = f"{key} = {address!r}{elsewhere}"
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit():
        if address in ("auto", "local"):
            return
        raise ResourceError(f'{given}: expected the head as "HOST:PORT" (6379 unless it was set), or "auto"')
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as problem:
        raise ResourceError(
            f"{given}: nothing answers there ({problem}). On the head: ray start --head --port={port}; its "
            "address must be one that this machine reaches, and no firewall may be in between"
        ) from None
    if address.startswith(CLIENT):
        return
    try:
        asked = subprocess.run([sys.executable, "-c", PROBE, address], capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{given}: something listens there, but it did not answer as a Ray head within {ANSWER_S:g} s"
        ) from None
    if asked.returncode == 0:
        return
    if "AuthenticationError" in asked.stderr:
        mode = os.environ.get("RAY_AUTH_MODE") or "not set"
        name = next((name for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(name)), "")
        token = f"{name} is set" if name else "the token would come from ~/.ray/auth_token"
        raise ResourceError(
            f"{given}: the cluster asks for a token and rejects this process's: RAY_AUTH_MODE is {mode}, {token}. Set "
            "RAY_AUTH_MODE=token, and give the head's token (there: ray get-auth-token) as RAY_AUTH_TOKEN, as a file named by "
            "RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token"
        )
    # Not an authentication error: let Ray connect and report the problem, if there is one.
    log.warning("asking the head at %s whether it can be joined failed: %s", address, asked.stderr.strip()[-500:])


# Vital processes of a local Ray

NAMES = {"gcs_server": "its GCS", "raylet": "its raylet"}
"""Program names of the vital processes, with their names in messages."""
POLL = 0.2
"""Seconds between two checks."""
EARLY_EXIT_S = 10.0
"""Seconds. A raylet that exits earlier was killed, or will exit again; a later exit can be due to an overloaded machine."""
CLOCK_TOLERANCE_S = 1.0
"""Tolerance in seconds when comparing process start times."""


class RayletEndedError(ResourceError):
    """A starting Ray lost its raylet. `late`: after more than EARLY_EXIT_S seconds."""

    def __init__(self, late: bool) -> None:
        super().__init__("its raylet exited during the start; see raylet.out in Ray's session folder")
        self.late = late


def vitals(since: float = 0.0) -> dict[str, psutil.Process]:
    """Return the vital processes that this process started since `since` (Unix time), also ended ones; the newest per name."""
    found = {}
    for process in sorted(psutil.Process().children(), key=psutil.Process.create_time):
        with suppress(psutil.Error):
            if process.name() in NAMES and process.create_time() >= since:
                found[process.name()] = process
    return found


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@contextmanager
def wait_for_raylet(seconds: float) -> Iterator[None]:
    """Give a starting Ray `seconds` inside the context; raises RayletEndedError as soon as its raylet exits.

    Ray polls for its node for only 30 s; this patch makes each poll wait for the answer."""
    services: Any = importlib.import_module("ray._private.services")
    ask, since = services.get_node, time.time() - CLOCK_TOLERANCE_S

    def ask_again(*args: Any, **keywords: Any) -> Any:
        began, raylet = time.monotonic(), vitals(since).get("raylet")
        while True:
            try:
                return ask(*args, **keywords)
            except RuntimeError:  # the node is not registered yet
                passed = time.monotonic() - began
                raylet = raylet or vitals(since).get("raylet")  # the raylet may not have started yet
                if raylet is not None and _has_ended(raylet):
                    raise RayletEndedError(passed > EARLY_EXIT_S) from None
                if passed > seconds:
                    raise
            time.sleep(POLL)

    with patch.object(services, "get_node", ask_again):
        yield


# Start and stop

log = logging.getLogger(__name__)

MARK = "AGENTRL_RAY"
"""Variable in the environment of every process of a local Ray; each local Ray has its own random value."""

NO_RECORDS = "RAY_task_events_report_interval_ms"
"""Value 0 disables task events. The GCS keeps those of the last 100,000 calls (13 MiB more per 1,000 updates), which only the
dashboard reads."""

NICENESS = "RAY_worker_niceness"
"""Ray's increment of its workers' niceness; the default 15 gives another busy program 28 times the CPU time of a worker."""
LEAST_STORE = 80 << 20
"""Least bytes of an object store; Ray refuses less than 75 MiB."""

MAX_CHARS = 2000
"""Maximum characters of one Ray message in the log."""


@dataclass(slots=True)
class _LocalRay:
    """A Ray started by this process: its mark, the process that ends it if this one is killed, and its vital processes."""

    mark: bytes
    keeper: subprocess.Popen[bytes] | None
    vital: dict[str, psutil.Process] = field(default_factory=dict)


_local_ray: _LocalRay | None = None
_exit_message = ""


def worker_env() -> dict[str, str]:
    """Return the environment of every worker on this machine: one OpenMP thread (a role asks torch for more), and AGENTRL_PATH.

    A worker's working directory is not the driver's, so the driver's is prepended to AGENTRL_PATH.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **{name: os.environ.get(name, value) for name, value in PASSIVE.items()},
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
        "AGENTRL_PATH": os.pathsep.join(str(root) for root in shelf_roots()),
        # Ray's agents and vLLM's engine cores set a process title (setproctitle), which would overwrite their environment
        # including MARK, so that `ray_keeper` would not find them.
        "SPT_NOENV": "1",
    }


def start_ray(cluster: ClusterConfig, *, object_store_bytes: int | None = None) -> bool:
    """Start a local Ray or join the cluster at `cluster.address`; return True if the caller must stop it.

    False: Ray was already running (other than by `join_to_ask`) and is used as it is. Removes an empty RAY_ADDRESS, which
    Ray would take for an address. Sends the user's shelves to the workers of a joined cluster. Raises ResourceError if the
    cluster does not start or cannot be reached.
    """
    if os.environ.get("RAY_ADDRESS") == "":
        del os.environ["RAY_ADDRESS"]
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    guard_network(multi_node=bool(address))
    import ray  # deferred: Ray reads the environment on import

    global _joined_to_ask
    connects = not ray.is_initialized()
    started_here, _joined_to_ask = connects or _joined_to_ask, False
    if connects:
        if address:
            check_join(address, "cluster.address" if cluster.address else "RAY_ADDRESS")
            report_to_parent(ray="the raylet of this machine, or the cluster's GCS")
            with tempfile.TemporaryDirectory(prefix="agentrl-shelf-") as staged:
                # Ray packs and uploads the folder while it connects.
                env = {**worker_env(), **shipped_env(Path(staged))}
                _init(address, {"address": address, "runtime_env": {"env_vars": env, "working_dir": staged}})
        else:
            create_token()
            _start_local(cluster.startup_timeout, object_store_bytes)
    return started_here


_joined_to_ask = False
"""True if this process has joined a cluster only by `join_to_ask`."""


def join_to_ask(cluster: ClusterConfig) -> None:
    """Join the cluster to query its nodes before a run is opened; the run then reuses and closes the connection."""
    global _joined_to_ask
    _joined_to_ask = start_ray(cluster)


def stop_asking() -> None:
    """Close the connection of `join_to_ask` if no run has reused it."""
    if _joined_to_ask:
        stop_ray()


def _start_local(timeout: float, object_store_bytes: int | None) -> None:
    check_ray_folder()
    until, others = time.monotonic() + timeout, 0
    while True:
        try:
            return _start_once(timeout, object_store_bytes)
        except ResourceError as error:
            cause = error.__cause__
            others += not (isinstance(cause, RayletEndedError) and cause.late)
            if others > 1 or time.monotonic() >= until:  # a single exit may be a killed process
                raise
            log.warning("%s; it is started again", error)


def _start_once(timeout: float, object_store_bytes: int | None) -> None:
    global _local_ray
    node: Any = importlib.import_module("ray._private.node").Node
    value, since = secrets.token_hex(16), time.time() - CLOCK_TOLERANCE_S
    # Set in the environment, which Ray's workers inherit: as a `runtime_env` the variables would not fit the workers that Ray
    # starts in advance, so each would be started a second time.
    variables = {**worker_env(), MARK: value, **{name: os.environ.get(name, "0") for name in (NO_RECORDS, NICENESS)}}
    # Start the keeper first: the driver may be killed while Ray starts, even by Ray if the raylet dies during registration.
    report_to_parent(ray="the GCS or the raylet of the Ray that it is starting")
    before, keeper = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS), None  # blocked for the keeper too
    try:
        if sys.platform == "linux":  # on other systems Ray has a similar process
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", ray_keeper.__file__, f"{MARK}={value}", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if has_parent() else None,
                start_new_session=True,  # so that Ctrl-C does not reach it
            )
        _local_ray = _LocalRay(f"{MARK}={value}".encode(), keeper)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _brief_keeper()
    idle: dict[str, Any] = {name: lambda self, **_: None for name in UNUSED_SERVICES}
    own = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with (
            wait_for_raylet(timeout),
            patch.object(sys.modules[__name__], "_starting", True),
            patch.multiple(node, create=True, **idle),
        ):
            _init(None, _local(object_store_bytes))
    except BaseException:
        ray_keeper.end_all(_local_ray.mark)  # also processes that are still being forked
        _release_keeper()
        raise
    finally:  # not `patch.dict`: it empties the environment briefly, and drops the variables that Ray has set
        for name, text in own.items():
            os.environ.pop(name) if text is None else os.environ.update({name: text})
    _local_ray.vital = vitals(since)
    report_to_parent(ray=" or ".join(f"{NAMES[name]} (pid {process.pid})" for name, process in _local_ray.vital.items()))


_starting = False
"""True while Ray starts its processes."""


def _block_warnings() -> None:
    # These signals go to all processes of a job, and would end Ray before the run has finished its step. Ray blocks SIGINT the
    # same way. Blocked only in the child: in the driver they must interrupt a start that waits in one long call.
    if _starting:
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)


os.register_at_fork(after_in_child=_block_warnings)  # Python calls this because Ray starts its processes with a `preexec_fn`


UNUSED_SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Services that a local Ray does not need: the autoscaler, the log monitor (`log_to_driver` is off), and the dashboard server,
which is off too, but `ray.init` waits for it: 2 s of a core."""


def lost_ray_processes() -> str:
    """Name the vital processes of this process's local Ray that have ended; "" if none have, or there is no local Ray."""
    if _local_ray is None:
        return ""
    return " and ".join(f"{NAMES[name]} (pid {process.pid})" for name, process in _local_ray.vital.items() if _has_ended(process))


def abandon_ray() -> None:
    """End a broken local Ray without calling it, because it may never answer. Blocks for some seconds. Until `stop_ray`, Ray does
    not restart by itself on a further call."""
    import ray

    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = False
    if _local_ray is not None:
        ray_keeper.end_all(_local_ray.mark)
    ray.shutdown()
    _release_keeper()


def create_token() -> None:
    """Generate a token for the Ray that this process is about to start, unless RAY_AUTH_MODE, or a token of the user, is set.

    Ray listens on every interface, and a client can run code. Since 2.60 a new local Ray requires a token by default, but would
    write it to ~/.ray/auth_token, which others may read. Here the token stays in the environment that Ray's processes inherit.
    Call before the first Ray of this process starts, else its processes have another token."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def asks_for_token() -> bool:
    """Return True if the Ray that this process uses requires a token."""
    raylet: Any = importlib.import_module("ray._raylet")
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def open_ports() -> list[str]:
    """Return the non-loopback ports on which this process and its children listen, as "address:port program"."""
    own = psutil.Process()
    found = []
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            found += [f"{at.ip}:{at.port} {process.name()}" for at in sockets if not ipaddress.ip_address(at.ip).is_loopback]
    return sorted(found)


def is_connected() -> bool:
    """Return True if this process is connected to Ray."""
    if sys.modules.get("ray") is None:  # Ray reads the environment on import, and `start_ray` may have to set that first
        return False
    import ray

    return bool(ray.is_initialized())


@contextmanager
def ray_of(cluster: ClusterConfig) -> Iterator[None]:
    """Run the body with Ray (`start_ray`), and stop Ray afterwards unless it was already running."""
    began = start_ray(cluster)
    try:
        yield
    finally:
        if began:
            stop_ray()


def _init(address: str | None, options: dict[str, Any]) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Else Ray replaces the log handlers of the calling program.
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    constants: Any = importlib.import_module("ray._private.ray_constants")
    # Keep the handler of SIGTERM. Ray's own handler ends Ray's processes and then this one in the middle of its work, with exit
    # code 15; a second one, in C++, prints a stack. Without a Python handler Ray's stays: the default action would end this
    # process at once and leave Ray's processes behind.
    before, utils = signal.getsignal(signal.SIGTERM), importlib.import_module("ray._private.utils")
    keep: Any = patch.object(utils, "set_sigterm_handler", lambda handler: None) if callable(before) else nullcontext()
    try:
        # Run workers with this process's Python. Under `uv run`, Ray would run `uv run` per worker in a copy of the working
        # directory, which fails in a subfolder of a project and does not find packages that only the environment has.
        with keep, patch.object(constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False, create=True):
            ray.init(**quiet, **options, job_config=_job())
    except Exception as error:  # Ray raises a plain Exception if its raylet ends during the start
        raise ResourceError(f"Ray does not start (cluster.address = {address!r}): {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:  # Ray sets it there alone
            signal.signal(signal.SIGTERM, before)
    worker: Any = importlib.import_module("ray._private.worker")
    # By default it prints the last lines of a raylet's log to the terminal, into the display.
    worker.print_to_stdstream = lambda data, **_: log.warning("Ray: %s", " ".join(map(str, data.get("lines", ())))[:MAX_CHARS])


def _job() -> Any:
    """Return a job config whose workers have this process's module search path. Ray would put the working directory first, where
    another agentrl, or a module named like one of Python's, may be."""
    from ray.job_config import JobConfig

    class Job(JobConfig):
        def _serialize(self) -> Any:
            if self._py_driver_sys_path:  # empty if the workers have a working directory of their own (`start_ray`)
                # agentrl's folder too: an editable install may rely on a finder, which Python asks only after all of these. The
                # working directory is for modules that only a worker imports.
                folders = [*sys.path, str(Path(agentrl.__file__).parents[1]), os.curdir]
                known = dict.fromkeys(str(Path(one).absolute()) for one in folders)
                self._py_driver_sys_path[:] = reversed(known)  # a worker prepends them one by one
            return super()._serialize()

    return Job()


def _local(object_store_bytes: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "address": "local",
        # Ray would count all cores of the machine, also those that this process may not use.
        "num_cpus": usable_cpus(),
        # Ray would also count GPUs that the installed torch cannot use, and assign them to ranks that then find none.
        "num_gpus": usable_gpus(),
        "include_dashboard": False,
    }
    memory = usable_memory()
    if not object_store_bytes and memory.total < psutil.virtual_memory().total:
        # Ray sees only the limit of a container's outermost cgroup; the computation is otherwise Ray's default.
        object_store_bytes = max(LEAST_STORE, min(int(0.3 * memory.free), shutil.disk_usage("/dev/shm").free * 95 // 100))
    if object_store_bytes:
        options["object_store_memory"] = object_store_bytes
    if os.environ.get("AGENTRL_NODE_IP"):
        options["_node_ip_address"] = os.environ["AGENTRL_NODE_IP"]
    folder = ray_folder()
    if folder is not None:
        options["_temp_dir"] = folder
    return options


def stop_ray() -> None:
    """Disconnect from Ray and end a local one, with processes that a dead raylet or GCS would leave behind."""
    global _joined_to_ask
    import ray

    _joined_to_ask = False
    report_to_parent(ray="")  # from now on another cause ends this process
    ray.shutdown()
    while _local_ray is not None and ray_keeper.kill_all(_local_ray.mark):
        time.sleep(0.02)
    _release_keeper()
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"


@contextmanager
def exit_message(text: str) -> Iterator[None]:
    """Inside the context, the local Ray's keeper prints `text` on stderr as one line if this process ends silently.

    With a parent process the keeper prints nothing: the parent has seen the exit and reports it."""
    global _exit_message
    _exit_message = "" if has_parent() else text
    _brief_keeper()
    try:
        yield
    finally:
        _exit_message = ""
        _brief_keeper()


def _brief_keeper() -> None:
    if _local_ray is not None and _local_ray.keeper is not None and _local_ray.keeper.stdin is not None:
        with suppress(BrokenPipeError):  # it was killed
            _local_ray.keeper.stdin.write(f"{' '.join(_exit_message.splitlines()) or ' '}\n".encode())
            _local_ray.keeper.stdin.flush()


def _release_keeper() -> None:
    """Tell the keeper that Ray has stopped, so that it exits."""
    global _local_ray
    local, _local_ray = _local_ray, None
    if local is not None and local.keeper is not None:
        with suppress(BrokenPipeError):  # it was killed
            local.keeper.communicate(b"\n")


# Work that is cancelled when Ray dies

T = TypeVar("T")

WORK_POLL_S = 0.5
"""Seconds between two checks of Ray's processes."""
RAY_EXIT_S = 5.0
"""Seconds within which a dying process of Ray has exited. A raylet that lost an agent ends its actors first, so the work fails
before the raylet is gone."""
END_S = 60.0
"""Seconds in which the work and Ray must end after the loss of one."""


async def while_ray_lives(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as a task and return its result. If this process's local Ray loses its GCS or raylet, end all of that Ray,
    cancel the work, and raise WorkerDiedError, which names the lost process."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=WORK_POLL_S))[0]:
            if lost := lost_ray_processes():
                raise await _abandon_work(task, lost)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    # An error of the work may be a consequence of the loss.
    if (error := task.exception()) is not None:
        mistake = isinstance(error, UserError) and not isinstance(error, ResourceError)
        until = time.monotonic() + (0 if mistake else RAY_EXIT_S)
        while _local_ray is not None and not lost_ray_processes() and time.monotonic() < until:
            await asyncio.sleep(WORK_POLL_S / 10)
        if lost := lost_ray_processes():
            raise await _abandon_work(task, lost)
    return task.result()


async def _abandon_work(task: asyncio.Task[Any], lost: str) -> WorkerDiedError:
    log.error("Ray has lost %s", lost)
    try:
        async with asyncio.timeout(END_S):
            await in_thread("batch", abandon_ray)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
    except TimeoutError:
        log.error("work in progress has not ended within %g s", END_S)
    if task.done() and not task.cancelled():
        task.exception()  # retrieve it, else asyncio logs an unretrieved exception
    stop_ray()
    return WorkerDiedError(f"Ray has failed: {lost} on this machine has died")
