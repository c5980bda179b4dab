"""Ends a local Ray whose driver died: `python -I -S ray_keeper.py VARIABLE=VALUE`, started by `cluster/ray_cluster.py`.

The kernel kills Ray's processes with the driver, but each only after it has asked for that (PR_SET_PDEATHSIG): a process that was
just being forked survives for a minute. So this process waits for the driver's death and kills every process with the variable in
its environment, until there was none for `QUIET` seconds. Then it removes the temporary folders of vLLM's replicas and the
semaphores named after them (engines/vllm/options.py).

Stdin: one message per line; the latest is printed on stderr if the driver ends silently (killed, also by Ray). A blank
line withdraws it; an empty line reports that the driver has stopped Ray itself.

Imports nothing of agentrl, because it starts with every run. Linux only: it reads /proc.
"""

import os
import select
import signal
import sys
import time

INTERVAL = 0.5
"""Seconds between checks of the driver. The pipe does not tell: the driver's child processes may keep it open."""
QUIET = 3.0
PATIENCE = 10
"""Seconds in which a reader must take the message."""
SCRATCH = "rl-vllm-{}-"
"""Prefix of the folders of a driver's replicas; {}: its pid."""


def main(mark: bytes, driver: int) -> None:
    """Wait until `driver` (the parent) ends, then kill all processes that carry `mark`."""
    partial, message, is_open, lives = b"", b"", True, True
    while lives:
        lives = os.getppid() == driver  # checked before reading, so that the driver's last message is read
        if select.select([0] if is_open else [], [], [], INTERVAL if lives else 0)[0]:
            got = os.read(0, 1 << 16)
            is_open = bool(got)  # at EOF the driver is ending or has closed the pipe; only its death counts
            *lines, partial = (partial + got).split(b"\n")
            if b"" in lines:
                return
            message = lines[-1] if lines else message
    if message.strip():
        say(message)
    os.close(2)  # so that a reader sees EOF now
    end_all(mark)
    sweep(SCRATCH.format(driver))


def say(text: bytes) -> None:
    """Write a line on stderr from a child process: stderr may be a pipe whose reader is stuck or gone."""
    if os.fork() == 0:
        try:
            signal.alarm(PATIENCE)
            os.write(2, text + b"\n")
        finally:
            os._exit(0)


def sweep(prefix: str) -> None:
    """Remove the unlocked temporary folders that start with `prefix`, with their semaphores."""
    import fcntl  # deferred: most drivers stop their Ray themselves
    import shutil

    for parent in {os.environ.get("TMPDIR", "/tmp"), "/tmp"}:
        for name in names(parent, prefix):
            folder = f"{parent}/{name}"
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # locked by a live driver with the same pid in another container
                continue
            finally:
                os.close(descriptor)
            shutil.rmtree(folder, ignore_errors=True)
            for semaphore in names("/dev/shm", f"sem.{name}-"):
                os.unlink(f"/dev/shm/{semaphore}")  # noqa: PTH108


def names(folder: str, prefix: str) -> list[str]:
    """Return the names in `folder` that start with `prefix`; [] if it does not exist."""
    return [name for name in os.listdir(folder) if name.startswith(prefix)] if os.path.isdir(folder) else []  # noqa: PTH112, PTH208


def end_all(mark: bytes) -> None:
    """Repeat `kill_all` until it has found no process for `QUIET` seconds."""
    until = time.monotonic() + QUIET
    while time.monotonic() < until:
        if kill_all(mark):
            until = time.monotonic() + QUIET
        time.sleep(0.1)


def kill_all(mark: bytes) -> int:
    """Kill every process with `mark` in its environment; return their number."""
    if not os.path.isdir("/proc"):  # noqa: PTH112
        return 0
    found = 0
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes longer to import than all this takes to run
        if name.isdigit() and int(name) != os.getpid() and mark in _environment(name):
            try:
                os.kill(int(name), signal.SIGKILL)
            except ProcessLookupError:
                continue
            found += 1
    return found


def _environment(pid: str) -> list[bytes]:
    """Return the initial environment of a process; [] if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return file.read().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    main(sys.argv[1].encode(), int(sys.argv[2]))
