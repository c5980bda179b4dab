"""Ray for a run: join a cluster or start a local one, watch it, and stop it.

Reading order: whether a cluster can be joined, the user's folders on its workers, the vital
processes of a local Ray, start and stop, and work that is cancelled when the local Ray dies."""

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
from agentrl.cluster.ray_parent import WARNINGS, has_parent, tell
from agentrl.config.schema import ClusterConfig
from agentrl.env.address import DRIVER_SOURCES, known_sources
from agentrl.utils.errors import ResourceError, UserError, WorkerDiedError
from agentrl.utils.processor import PASSIVE, usable_cpus, usable_memory
from agentrl.utils.search_path import SHIPPED
from agentrl.utils.threads import in_thread

# The user's folders on the workers

SHELVES = ("envs", "tools", "rewards", "configs", "plugins")


def shelf_roots() -> list[Path]:
    """Folders that hold the user's shelves: the working directory, then AGENTRL_PATH."""
    given = os.environ.get("AGENTRL_PATH", "").split(os.pathsep)
    return [Path.cwd(), *(Path(item).resolve() for item in given if item)]


def shipped_env(staged: Path) -> dict[str, str]:
    """Copy every shelf of the user into `staged`, one folder per root, which Ray sends to the workers as their working directory.

    Returns the workers' environment variables: where the copies are, and of which folders of the driver they are copies, so that
    an `EnvRef` finds the copy of its file and never the driver's path; and where the driver has the files of benchmarks, which
    are not copied."""
    copied: dict[str, str] = {}
    for number, root in enumerate(shelf_roots()):
        for shelf in (root / shelf for shelf in SHELVES if (root / shelf).is_dir()):
            copied[f"shelf{number}"] = str(root)
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")
            shutil.copytree(shelf, staged / f"shelf{number}" / shelf.name, ignore=ignored)
    path, roots = os.pathsep.join(copied), os.pathsep.join(copied.values())
    return {"AGENTRL_PATH": path, SHIPPED: roots, DRIVER_SOURCES: json.dumps(known_sources())}


# Whether a running cluster can be joined: found out before Ray tries, which takes a minute of log lines to say no.

REACH_S = 5.0
"""For a plain connection to the head."""
CLIENT = "ray://"
ANSWER_S = 20.0
"""For the head's answer, with the time to import Ray."""
PROBE = """
import sys
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import GcsClient
ensure_token_if_auth_enabled(None, create_token_if_missing=False)
GcsClient(address=sys.argv[1])
"""
"""Asks the head for the cluster's id, as a joining driver does. In a process of its own, because a missing token ends the
process, and because Ray writes its log lines past Python."""


def check_join(address: str, key: str = "cluster.address") -> None:
    """Raise ResourceError if the cluster at `address` (host:port) cannot be reached, or does not take this process's token.

    `key`: what named it, cluster.address or RAY_ADDRESS. "auto" is the cluster that this machine belongs to; a Ray
    client's server ("ray://host:port") must only answer.
    """
    if address == "auto":
        address = _here()
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
            f"{given}: the cluster asks for a token, and it does not take this process's: RAY_AUTH_MODE is {mode}, {token}. Set "
            "RAY_AUTH_MODE=token, and give the head's token (there: ray get-auth-token) as RAY_AUTH_TOKEN, as a file named by "
            "RAY_AUTH_TOKEN_PATH, or in ~/.ray/auth_token"
        )
    # Not refused by name: Ray itself will say what is wrong, or that all is well.
    log.warning("asking the head at %s whether it can be joined failed: %s", address, asked.stderr.strip()[-500:])


def _here() -> str:
    """The address that Ray takes "auto" for: RAY_ADDRESS, or the cluster whose processes run on this machine."""
    from ray._private.services import canonicalize_bootstrap_address

    try:
        return str(canonicalize_bootstrap_address("auto"))
    except ConnectionError:
        raise ResourceError(
            "cluster.address = 'auto': no Ray runs on this machine. Start one here (ray start --head, or ray start "
            '--address=HEAD:6379), give the head\'s address, or set cluster.address = "" for this machine alone; a run for '
            "another machine is planned with --dry-run --gpu-memory GIB --nodes 4x8"
        ) from None


# Vital processes of a local Ray

NAMES = {"gcs_server": "its GCS", "raylet": "its raylet"}
"""Vital processes, by program name."""
POLL = 0.2
"""Seconds between two looks."""
SOON = 10.0
"""Seconds. A raylet that ends before has another cause than a machine with too much to do: it was killed, or will end again."""
CLOCK = 1.0
"""Seconds by which the time at which a process began may be off."""


class RayletEndedError(ResourceError):
    """A Ray that starts has lost its raylet. `late`: after it had waited."""

    def __init__(self, late: bool) -> None:
        super().__init__("its raylet has ended while it started; why is in raylet.out, in Ray's folder")
        self.late = late


def vitals(since: float = 0.0) -> dict[str, psutil.Process]:
    """Those that this process has started since that `time.time()`, the newest of each name; one that has ended, too."""
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
def patient(seconds: float) -> Iterator[None]:
    """In the body, a Ray that starts has so long. Ray asks for its node in a loop of 30 s, of which each question waits for the
    answer here. Raises RayletEndedError, from there, as soon as the raylet has ended."""
    services: Any = importlib.import_module("ray._private.services")
    ask, since = services.get_node, time.time() - CLOCK

    def ask_again(*args: Any, **keywords: Any) -> Any:
        began, raylet = time.monotonic(), vitals(since).get("raylet")
        while True:
            try:
                return ask(*args, **keywords)
            except RuntimeError:  # it is not there yet
                passed = time.monotonic() - began
                raylet = raylet or vitals(since).get("raylet")  # its program may only be about to begin
                if raylet is not None and _has_ended(raylet):
                    raise RayletEndedError(passed > SOON) from None
                if passed > seconds:
                    raise
            time.sleep(POLL)

    with patch.object(services, "get_node", ask_again):
        yield


# Start and stop

log = logging.getLogger(__name__)

MARK = "AGENTRL_RAY"
"""In the environment of every process of a local Ray, with a value of its own."""

NO_RECORDS = "RAY_task_events_report_interval_ms"
"""0: Ray's processes send no records of calls. The control store keeps those of the last 100,000, 13 MiB more in 1,000 updates,
for lists and timelines that nobody asks a Ray without a dashboard for."""

NICENESS = "RAY_worker_niceness"
"""What Ray adds to its workers' niceness, by default 15: a busy program then has 28 times the processor time of a replica."""
LEAST_STORE = 80 << 20
"""Bytes of an object store; Ray refuses less than 75 MiB."""

LONGEST = 2000
"""Characters of one message of Ray's in the log."""


@dataclass(slots=True)
class _LocalRay:
    """A Ray that this process started: what its processes carry, who ends them if this process is killed, and the vital ones."""

    mark: bytes
    keeper: subprocess.Popen[bytes] | None
    vital: dict[str, psutil.Process] = field(default_factory=dict)


_own: _LocalRay | None = None
_last_words = ""


def worker_env() -> dict[str, str]:
    """Environment of every worker process on this machine: one OpenMP thread (a role asks torch for more), and the user's shelf.

    A worker's working directory is not the driver's, which is why the driver's is prepended to AGENTRL_PATH.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **{name: os.environ.get(name, value) for name, value in PASSIVE.items()},
        "TOKENIZERS_PARALLELISM": os.environ.get("TOKENIZERS_PARALLELISM", "false"),
        "AGENTRL_PATH": os.pathsep.join(str(root) for root in shelf_roots()),
        # Ray's agents and vLLM's engine cores give themselves a title (setproctitle), and would write it over their environment,
        # MARK included: whoever ends a Ray would not know them.
        "SPT_NOENV": "1",
    }


def start_ray(cluster: ClusterConfig, *, object_store_bytes: int | None = None) -> bool:
    """Start a local Ray, or join the cluster at `cluster.address`: True. If Ray is already running, it is used as it is: False,
    unless this process only asked it for its nodes (`join_to_ask`): the caller owns that connection, and stops it.

    An empty RAY_ADDRESS is removed first (Ray would take it for an address). On a joined cluster the user's
    shelves are sent to the workers. Raises ResourceError if the cluster does not start or cannot be reached.
    """
    if os.environ.get("RAY_ADDRESS") == "":
        del os.environ["RAY_ADDRESS"]
    address = cluster.address or os.environ.get("RAY_ADDRESS")
    guard_network(multi_node=bool(address))
    import ray  # only now: it reads the environment when it is imported

    global _asking
    connects = not ray.is_initialized()
    started_here, _asking = connects or _asking, False
    if connects:
        if address:
            check_join(address, "cluster.address" if cluster.address else "RAY_ADDRESS")
            tell(ray="the raylet of this machine, or the cluster's GCS,")
            with tempfile.TemporaryDirectory(prefix="agentrl-shelf-") as staged:
                # Ray packs and uploads the folder while it connects.
                env = {**worker_env(), **shipped_env(Path(staged))}
                _init(address, {"address": address, "runtime_env": {"env_vars": env, "working_dir": staged}})
        else:
            own_token()
            _start_local(cluster.startup_timeout, object_store_bytes)
    return started_here


_asking = False
"""Whether this process has joined a cluster for `join_to_ask` alone."""


def join_to_ask(cluster: ClusterConfig) -> None:
    """Join the cluster to ask for its nodes, before a run is opened; the run goes on with the connection, and closes it."""
    global _asking
    _asking = start_ray(cluster)


def stop_asking() -> None:
    """Close the connection of `join_to_ask`, if no run went on with it."""
    if _asking:
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
            if others > 1 or time.monotonic() >= until:  # once may be a process that was killed
                raise
            log.warning("%s; it is started again", error)


def _start_once(timeout: float, object_store_bytes: int | None) -> None:
    global _own
    node: Any = importlib.import_module("ray._private.node").Node
    value, since = secrets.token_hex(16), time.time() - CLOCK
    # In the environment, which Ray passes on to its workers: as its `runtime_env` the variables would make the workers useless
    # that it starts in advance, each of which would be started a second time.
    variables = {**worker_env(), MARK: value, **{name: os.environ.get(name, "0") for name in (NO_RECORDS, NICENESS)}}
    # Its keeper first: the driver may be killed while Ray starts; also by Ray, if the raylet is gone as it registers there.
    tell(ray="the GCS or the raylet of the Ray that it is starting")
    before, keeper = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS), None  # for the keeper too
    try:
        if sys.platform == "linux":  # elsewhere there is Ray's own
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", ray_keeper.__file__, f"{MARK}={value}", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if has_parent() else None,
                start_new_session=True,  # Ctrl-C is not for it
            )
        _own = _LocalRay(f"{MARK}={value}".encode(), keeper)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _instruct()
    idle: dict[str, Any] = {name: lambda self, **_: None for name in UNASKED}
    own = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with (
            patient(timeout),
            patch.object(sys.modules[__name__], "_starting", True),
            patch.multiple(node, create=True, **idle),
        ):
            _init(None, _local(object_store_bytes))
    except BaseException:
        ray_keeper.end_all(_own.mark)  # what had started, and what that was about to start
        _let_go()
        raise
    finally:  # these alone, not by `patch.dict`, which empties the environment for a moment, and forgets what Ray has set
        for name, text in own.items():
            os.environ.pop(name) if text is None else os.environ.update({name: text})
    _own.vital = vitals(since)
    tell(ray=" or ".join(f"{NAMES[name]} (pid {process.pid})" for name, process in _own.vital.items()))


_starting = False
"""True while Ray starts its processes."""


def _block_warnings() -> None:
    # Sent to all processes of a job, these signals would end Ray's before the run has finished its step. Ray blocks SIGINT so.
    # In the child alone: blocked in the driver, they would not interrupt a start that waits in one long call.
    if _starting:
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)


os.register_at_fork(after_in_child=_block_warnings)  # Ray's processes have a `preexec_fn`, so that Python calls this


UNASKED = ("start_monitor", "start_log_monitor", "start_api_server")
"""What a Ray of one machine starts and nobody asks: an autoscaler with nothing to scale, who brings workers' output to a driver
that takes none (`log_to_driver`), and the server of a dashboard that is off, for which `ray.init` waits: 2 s of a core."""


def ray_gone() -> str:
    """Lost processes among those that this process's local Ray cannot do without; "" if nothing, or if it has none."""
    if _own is None:
        return ""
    return " and ".join(f"{NAMES[name]} (pid {process.pid})" for name, process in _own.vital.items() if _has_ended(process))


def abandon_ray() -> None:
    """End a local Ray that is no more one, without asking it anything: it may never answer. Until
    `stop_ray` no other starts by itself, as Ray would for whatever is still asked of it. For some seconds this blocks."""
    import ray

    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = False
    if _own is not None:
        ray_keeper.end_all(_own.mark)
    ray.shutdown()
    _let_go()


def own_token() -> None:
    """Give the Ray that this process is about to start a token of its own, unless the user chose one, or none (RAY_AUTH_MODE).

    Ray listens on every interface, and who reaches it runs code: a new local Ray therefore asks for a token (since 2.60, by
    default), and would write one to ~/.ray/auth_token, which others may read. It stays in this process's environment, which Ray's
    processes inherit. Before the first Ray of this process, or its processes would know another one."""
    mode = os.environ.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token" or "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def asks_for_token() -> bool:
    """Return True if the Ray that this process uses refuses who has no token."""
    raylet: Any = importlib.import_module("ray._raylet")
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def open_ports() -> list[str]:
    """Ports on which this process and its children listen for other machines: "address:port program"."""
    own = psutil.Process()
    found = []
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            sockets = [one.laddr for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
            found += [f"{at.ip}:{at.port} {process.name()}" for at in sockets if not ipaddress.ip_address(at.ip).is_loopback]
    return sorted(found)


def is_connected() -> bool:
    """Return True if this process uses a Ray already."""
    if sys.modules.get("ray") is None:  # it reads the environment when it is imported, which `start_ray` may have to set first
        return False
    import ray

    return bool(ray.is_initialized())


@contextmanager
def ray_of(cluster: ClusterConfig) -> Iterator[None]:
    """Ray for the body, as `start_ray`; it is stopped afterwards, unless it was already running."""
    began = start_ray(cluster)
    try:
        yield
    finally:
        if began:
            stop_ray()


def _init(address: str | None, options: dict[str, Any]) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray would otherwise replace the log handlers of the program that calls us.
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    constants: Any = importlib.import_module("ray._private.ray_constants")
    # SIGTERM does what it did before, inside and afterwards. Ray's own handler ends its processes, and then this one, in the
    # middle of what that is doing, with the exit code 15; a second one, in C++, prints a stack. What nobody handles is left to
    # it: the signal would end this process at once, and leave what Ray has begun.
    before, utils = signal.getsignal(signal.SIGTERM), importlib.import_module("ray._private.utils")
    keep: Any = patch.object(utils, "set_sigterm_handler", lambda handler: None) if callable(before) else nullcontext()
    try:
        # Workers run this process's Python. Under `uv run` Ray would run `uv run` for each, in a copy of the working directory,
        # which refuses a subfolder of a project and finds no package that the environment alone has.
        with keep, patch.object(constants, "RAY_ENABLE_UV_RUN_RUNTIME_ENV", False, create=True):
            ray.init(**quiet, **options, job_config=_job())
    except Exception as error:  # a raylet that ends while it starts is a plain Exception
        raise ResourceError(f"Ray does not start (cluster.address = {address!r}): {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:  # Ray takes it over there alone
            signal.signal(signal.SIGTERM, before)
    worker: Any = importlib.import_module("ray._private.worker")
    # It would print the last lines of a raylet's log into the display, say.
    worker.print_to_stdstream = lambda said, **_: log.warning("Ray: %s", " ".join(map(str, said.get("lines", ())))[:LONGEST])


def _job() -> Any:
    """A job whose workers search for modules as this process does. Ray would put the working directory first, where
    another agentrl, or a module named as one of Python's, would be imported instead."""
    from ray.job_config import JobConfig

    class Job(JobConfig):
        def _serialize(self) -> Any:
            if self._py_driver_sys_path:  # empty where the workers have a folder of their own (`start_ray`)
                # agentrl's folder too: an editable install may be found by a finder, which Python asks after all of these. The
                # working directory is for modules that only a worker imports.
                folders = [*sys.path, str(Path(agentrl.__file__).parents[1]), os.curdir]
                known = dict.fromkeys(str(Path(one).absolute()) for one in folders)
                self._py_driver_sys_path[:] = reversed(known)  # a worker puts one after the other in front
            return super()._serialize()

    return Job()


def _local(object_store_bytes: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "address": "local",
        # Ray would count the machine's cores, also those that this process must not use.
        "num_cpus": usable_cpus(),
        # It would also count GPUs that the installed torch cannot use, and give them to ranks that then find none.
        "num_gpus": usable_gpus(),
        "include_dashboard": False,
    }
    memory = usable_memory()
    if not object_store_bytes and memory.total < psutil.virtual_memory().total:
        # Ray sees the limit of a container's outermost control group alone; the rest is as it would choose.
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
    """Disconnect from Ray; a local one ends, with what it would leave behind if one of its processes had died before."""
    global _asking
    import ray

    _asking = False
    tell(ray="")  # from now on an end of this process has another cause
    ray.shutdown()
    while _own is not None and ray_keeper.kill_all(_own.mark):
        time.sleep(0.02)
    _let_go()
    hook: Any = importlib.import_module("ray._private.auto_init_hook")
    hook.enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"


@contextmanager
def last_words(text: str) -> Iterator[None]:
    """Inside, the keeper of a Ray of this process's own says `text` on stderr, as one line, if the process ends without a word of
    its own. If it has a parent, that says it, which has seen how it ended."""
    global _last_words
    _last_words = "" if has_parent() else text
    _instruct()
    try:
        yield
    finally:
        _last_words = ""
        _instruct()


def _instruct() -> None:
    """Tell the keeper what to say."""
    if _own is not None and _own.keeper is not None and _own.keeper.stdin is not None:
        with suppress(BrokenPipeError):  # it was killed
            _own.keeper.stdin.write(f"{' '.join(_last_words.splitlines()) or ' '}\n".encode())
            _own.keeper.stdin.flush()


def _let_go() -> None:
    """Tell the keeper that Ray has stopped."""
    global _own
    local, _own = _own, None
    if local is not None and local.keeper is not None:
        with suppress(BrokenPipeError):  # it was killed
            local.keeper.communicate(b"\n")


# Work that is cancelled when Ray dies

T = TypeVar("T")

LOOK = 0.5
"""Seconds between two looks at Ray's processes."""
SETTLE = 5.0
"""Seconds in which a process of Ray's that has begun to end is gone. A raylet that lost an agent ends its actors first, and the
work fails of those."""
END_S = 60.0
"""Seconds in which the work, and Ray, must have ended once one of them is gone."""


async def while_ray_lives(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in a task of its own. If meanwhile the local Ray that this process started loses its GCS or its
    raylet, all of that Ray is ended, then the work is cancelled and WorkerDiedError raised, which names the process."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            if lost := ray_gone():
                raise await _given_up(task, lost)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    # Its own error may be what the loss has led to.
    if (error := task.exception()) is not None:
        mistake = isinstance(error, UserError) and not isinstance(error, ResourceError)
        until = time.monotonic() + (0 if mistake else SETTLE)
        while _own is not None and not ray_gone() and time.monotonic() < until:
            await asyncio.sleep(LOOK / 10)
        if lost := ray_gone():
            raise await _given_up(task, lost)
    return task.result()


async def _given_up(task: asyncio.Task[Any], lost: str) -> WorkerDiedError:
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
        task.exception()  # of the loss: else asyncio says that nobody asked
    stop_ray()
    return WorkerDiedError(f"Ray is no more: {lost} on this machine is gone")
