"""Ends a local Ray whose driver died: `python -I -S ray_keeper.py VARIABLE=VALUE`, started by `cluster/ray_cluster.py`.

Ray has the kernel kill its processes with the driver, but each only after it has asked for that: one that was being forked lives
on for a minute. This process waits for the driver's death and kills every process in whose environment the
variable is, until none was there for `QUIET` seconds. Then it removes the temporary files of vLLM's replicas, and the semaphores
that are named after their folder (engines/vllm/options.py).

Stdin has what to say on stderr if the driver ends without a word of its own (killed, or by Ray): a line, of which the latest
counts; a blank one takes it back. An empty line says that the driver has stopped Ray itself.

Nothing of agentrl is imported: this starts with every run. Linux alone: it reads /proc.
"""

import os
import select
import signal
import sys
import time

INTERVAL = 0.5
"""Seconds between looks at the driver. Its pipe alone may stay open: processes that it forked hold a copy."""
QUIET = 3.0
PATIENCE = 10
"""Seconds in which a line has to be taken."""
SCRATCH = "rl-vllm-{}-"
"""How the folder of a driver's replicas begins."""


def main(mark: bytes, driver: int) -> None:
    """Wait for the end of `driver` (our parent), then kill what carries `mark`."""
    told, said, is_open, lives = b"", b"", True, True
    while lives:
        lives = os.getppid() == driver  # asked before it is read: what it told at last is there
        if select.select([0] if is_open else [], [], [], INTERVAL if lives else 0)[0]:
            got = os.read(0, 1 << 16)
            is_open = bool(got)  # else the driver is ending, or closed it; its death is what counts
            *lines, told = (told + got).split(b"\n")
            if b"" in lines:
                return
            said = lines[-1] if lines else said
    if said.strip():
        say(said)
    os.close(2)  # who reads it need not wait for the rest
    end_all(mark)
    sweep(SCRATCH.format(driver))


def say(text: bytes) -> None:
    """Write a line on stderr, by a process of its own: it may be a pipe that nobody reads, or whose reader is gone."""
    if os.fork() == 0:
        try:
            signal.alarm(PATIENCE)
            os.write(2, text + b"\n")
        finally:
            os._exit(0)


def sweep(prefix: str) -> None:
    """Remove the folders of temporary files that begin so and that nobody holds, each with its semaphores."""
    import fcntl  # only now: most drivers stop their Ray themselves
    import shutil

    for parent in {os.environ.get("TMPDIR", "/tmp"), "/tmp"}:
        for name in names(parent, prefix):
            folder = f"{parent}/{name}"
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # of a living driver of this number in another container
                continue
            finally:
                os.close(descriptor)
            shutil.rmtree(folder, ignore_errors=True)
            for semaphore in names("/dev/shm", f"sem.{name}-"):
                os.unlink(f"/dev/shm/{semaphore}")  # noqa: PTH108


def names(folder: str, prefix: str) -> list[str]:
    """Names in a folder, if it exists, that begin so."""
    return [name for name in os.listdir(folder) if name.startswith(prefix)] if os.path.isdir(folder) else []  # noqa: PTH112, PTH208


def end_all(mark: bytes) -> None:
    """`kill_all`, until there was none for `QUIET` seconds."""
    until = time.monotonic() + QUIET
    while time.monotonic() < until:
        if kill_all(mark):
            until = time.monotonic() + QUIET
        time.sleep(0.1)


def kill_all(mark: bytes) -> int:
    """Kill every process that has `mark` in its environment; returns how many there were."""
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
    """Environment with which the process was started; nothing if it has ended or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            return file.read().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    main(sys.argv[1].encode(), int(sys.argv[2]))
