"""The parent of a driver that uses Ray: it stays if Ray ends the driver from within, and knows what to say then.

As soon as the driver's connection to the object store, which the raylet has, turns out to be broken, by a call or by the release
of an object, Ray ends the driver with `_Exit(1)`: without a word, past every handler of Python's, and with no setting against it
(Ray 2.60, `StoreConn::ExitIfErrorStatus`). So `agentrl train`, `sft`, `eval` and `rollout` are two processes. The one that was
started forks the driver before anything large is imported; it waits, passes signals on, and ends as the driver did. Linux
alone."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agentrl.utils.errors import EngineError, ResourceError, StalledError, WorkerDiedError, WorkerError
from agentrl.utils.terminal import console

PR_SET_PDEATHSIG = 1
WARNINGS = (signal.SIGHUP, signal.SIGUSR1)
"""What a terminal that closes sends, and a batch system (Slurm's --signal=USR1@120) before it ends a job."""
LOSSES = (WorkerDiedError, WorkerError, EngineError, ResourceError, StalledError)
"""Errors that a loss of Ray, or of its processes, may have led to."""

_to_parent: int | None = None


@dataclass(frozen=True, slots=True)
class DriverEnd:
    """End of a driver. `code`: as in a process of its own. `told`: its last words. `stopping`: it had been asked to stop."""

    pid: int
    code: int
    told: Mapping[str, Any]
    stopping: bool

    @property
    def by_ray(self) -> str:
        """That Ray has ended it, as a user should read it; "" if it ended by itself."""
        if self.code != 1 or "over" in self.told or not (self.told.get("ray") and "folder" in self.told):
            return ""
        return f"Ray has ended the driver (pid {self.pid}) from within, as it does where it finds {self.told['ray']} gone"

    @property
    def silent(self) -> bool:
        """True if its run has failed and it has not said why: Ray, or something else, ended it first."""
        return self.code != 0 and "over" not in self.told and "folder" in self.told


def stop_signals() -> list[signal.Signals]:
    """Signals that ask a run to stop. Without those that whoever started it has ignored (`nohup`)."""
    given = [number for number in WARNINGS if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *given]


def restarting(why: object, restarts: int, limit: int) -> str:
    """Message about a run that restarts."""
    return f"{why}; restarting from the newest checkpoint ({restarts} of {limit})"


def unsaid(then: str) -> str:
    """Message about a process without a parent that has ended silently. `then`: how a user goes on with its run."""
    return (
        f"agentrl: the driver (pid {os.getpid()}) has ended without a word: it was killed, or Ray ended it from within, as it "
        f"does where it finds its GCS or its raylet gone; {then}"
    )


def has_parent() -> bool:
    """Return True if this process is a driver with a parent, which passes signals on."""
    return _to_parent is not None


def tell(**facts: object) -> None:
    """From a driver to its parent, if it has one: `folder`, `restarts` and `max_restarts` of its run, `then`: how a user goes
    on with that, `ray`: the processes that Ray cannot do without ("": it has stopped Ray), `error`: why its run failed, `over`:
    from now on it ends by itself."""
    if _to_parent is not None:
        os.write(_to_parent, json.dumps(facts).encode() + b"\n")


@contextmanager
def error_told() -> Iterator[None]:
    """Tell the parent what the body raises, before anything is closed: closing may end this process. But not what a loss of Ray
    may have led to."""
    tell(error="")
    try:
        yield
    except LOSSES:
        raise
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            tell(error=f"{type(error).__name__}: {error}")
        raise


def end_of_driver() -> DriverEnd | None:
    """None in a new process, which is to be the driver and dies with this one; in this one its end, once that has come. None in
    this process if it cannot be forked: not on Linux, or with threads."""
    global _to_parent
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return None
    sys.stdout.flush(), sys.stderr.flush()
    ours, theirs = os.pipe()
    waits = {*stop_signals(), signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who started us may have ignored it; there would be no end to wait for
    before, parent = signal.pthread_sigmask(signal.SIG_BLOCK, waits), os.getpid()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(ours)
        _to_parent = theirs
        return None
    os.close(theirs)
    code: int | None = None
    stopping = False
    try:
        # Signals to this process are for the driver; one from the terminal (which the kernel sends, to the whole group) it has.
        while code is None:
            seen = signal.sigwaitinfo(waits)
            if seen.si_signo != signal.SIGCHLD:
                stopping = True
                if seen.si_code <= 0:  # SI_USER, SI_TKILL ...: of a process
                    os.kill(pid, seen.si_signo)
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        told = _read(ours)
    finally:
        os.close(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if "over" not in told and sys.stdout.isatty():
        console().show_cursor()  # the display had hidden it
    return DriverEnd(pid, code, told, stopping)


def die_of(number: int) -> int:
    """End this process by a signal, without a core: the driver's is there. The first process of a container cannot; then the
    exit code that says so."""
    import resource

    sys.stdout.flush(), sys.stderr.flush()
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has none
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _read(pipe: int) -> dict[str, Any]:
    """All messages, the latest of each kind. Others may hold the other end: this does not wait for them."""
    os.set_blocking(pipe, False)
    text = b""
    with suppress(BlockingIOError):
        while more := os.read(pipe, 1 << 16):
            text += more
    found: dict[str, Any] = {}
    for line in text.splitlines():
        found |= json.loads(line)
    return found
