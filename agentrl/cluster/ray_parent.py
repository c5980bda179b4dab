"""The parent of a driver that uses Ray. It survives if Ray ends the driver from within, and reports that.

When a call or the release of an object finds the connection to the raylet's object store broken, Ray ends the driver with
`_Exit(1)`: silently, without running Python's exit handlers, and no setting prevents it (Ray 2.60,
`StoreConn::ExitIfErrorStatus`). So `agentrl train`, `sft`, `eval` and `rollout` are two processes: the first forks the driver
before any large import, waits, forwards signals, and exits as the driver did. Linux only."""

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
"""Signals of a closing terminal (SIGHUP) and of a batch system before it ends a job (Slurm's --signal=USR1@120)."""
LOSSES = (WorkerDiedError, WorkerError, EngineError, ResourceError, StalledError)
"""Errors that a loss of Ray or its processes may cause."""

_to_parent: int | None = None


@dataclass(frozen=True, slots=True)
class DriverEnd:
    """Exit of a driver. `code`: its exit code. `facts`: the facts it reported. `stopping`: it had been asked to stop."""

    pid: int
    code: int
    facts: Mapping[str, Any]
    stopping: bool

    @property
    def by_ray(self) -> str:
        """The message that Ray has ended the driver from within; "" if it has not."""
        if self.code != 1 or "over" in self.facts or not (self.facts.get("ray") and "folder" in self.facts):
            return ""
        return f"Ray has ended the driver (pid {self.pid}) from within, as it does when it has lost {self.facts['ray']}"

    @property
    def silent(self) -> bool:
        """True if a failed run ended without an explanation: Ray or something else ended the process first."""
        return self.code != 0 and "over" not in self.facts and "folder" in self.facts


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop, except those that its parent ignores (`nohup`)."""
    given = [number for number in WARNINGS if signal.getsignal(number) is not signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *given]


def restarting(why: object, restarts: int, limit: int) -> str:
    """Return the message about a restarting run."""
    return f"{why}; restarting from the newest checkpoint ({restarts} of {limit})"


def silent_exit_message(then: str) -> str:
    """Return the message for a driver without a parent that ends silently. `then`: how to continue its run."""
    return (
        f"agentrl: the driver (pid {os.getpid()}) has ended silently: it was killed, or Ray ended it from within, as it "
        f"does when it has lost its GCS or its raylet; {then}"
    )


def has_parent() -> bool:
    """Return True if this process is a driver whose parent forwards signals."""
    return _to_parent is not None


def report_to_parent(**facts: object) -> None:
    """Report facts of a driver to its parent, if it has one: `folder`, `restarts` and `max_restarts` of its run, `then` (how to
    continue it), `ray` (Ray's vital processes; "": stopped), `error` (of the run), `over` (the driver now exits by itself)."""
    if _to_parent is not None:
        os.write(_to_parent, json.dumps(facts).encode() + b"\n")


@contextmanager
def report_error() -> Iterator[None]:
    """Report an exception of the body to the parent before any cleanup, which may end this process. Skips errors that a loss of
    Ray may cause."""
    report_to_parent(error="")
    try:
        yield
    except LOSSES:
        raise
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            report_to_parent(error=f"{type(error).__name__}: {error}")
        raise


def end_of_driver() -> DriverEnd | None:
    """Fork the driver. Returns None in the driver, which dies with this process; here, waits for its exit and returns that. If
    it cannot fork (not on Linux, or with several threads), returns None here."""
    global _to_parent
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return None
    sys.stdout.flush(), sys.stderr.flush()
    ours, theirs = os.pipe()
    waits = {*stop_signals(), signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if inherited as ignored, there would be no exit status to wait for
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
        # Forward signals to the driver, except those that the kernel sends to the whole group (Ctrl-C): the driver has these.
        while code is None:
            seen = signal.sigwaitinfo(waits)
            if seen.si_signo != signal.SIGCHLD:
                stopping = True
                if seen.si_code <= 0:  # SI_USER, SI_TKILL ...: sent by a process
                    os.kill(pid, seen.si_signo)
            elif os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        facts = _read(ours)
    finally:
        os.close(ours)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if "over" not in facts and sys.stdout.isatty():
        console().show_cursor()  # which the display had hidden
    return DriverEnd(pid, code, facts, stopping)


def exit_by_signal(number: int) -> int:
    """End this process by a signal, without a second core dump. Returns the exit code for it, because the first process of a
    container survives the signal."""
    import resource

    sys.stdout.flush(), sys.stderr.flush()
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


def _read(pipe: int) -> dict[str, Any]:
    """Read all messages and keep the latest value per fact. Does not wait: others may hold the write end open."""
    os.set_blocking(pipe, False)
    text = b""
    with suppress(BlockingIOError):
        while more := os.read(pipe, 1 << 16):
            text += more
    found: dict[str, Any] = {}
    for line in text.splitlines():
        found |= json.loads(line)
    return found
