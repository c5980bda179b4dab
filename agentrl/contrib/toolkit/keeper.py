"""Run a command and end all its processes: `python -I -S keeper.py [--stdin] COMMAND...`, for agents, servers, test files.

The keeper starts the command in a new session and exits with its exit code. It adopts every process of the command whose parent
has ended (Linux's "child subreaper"), also one detached by a double fork. When the command ends, the keeper's stdin closes,
its parent dies, or the keeper gets a signal, all remaining processes get SIGTERM, and SIGKILL `GRACE` seconds later. With
`--stdin` the command reads the keeper's stdin, and has `LAST` seconds to end after stdin closes.

Imports nothing of agentrl, to start fast: it runs once per episode.
"""

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial

GRACE = 0.3
"""Seconds between SIGTERM and SIGKILL."""
LAST = 1.0
"""Seconds for a command that reads stdin to end after stdin closes."""
NOT_STARTED = 127
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def main(command: list[str]) -> int:
    """Run the command to its end; return its exit code, 128 + the signal that ended it, or 127 if it cannot be started."""
    reads = command[0] == "--stdin"
    command = command[reads:]
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("this system cannot keep the processes of a command together (PR_SET_CHILD_SUBREAPER)", file=sys.stderr)
        return NOT_STARTED
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        stdin = None if reads else subprocess.DEVNULL
        # The kernel kills the child when this process dies.
        dies = partial(_libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        child = subprocess.Popen(command, stdin=stdin, start_new_session=True, preexec_fn=dies)
    except OSError as problem:
        print(f"{command[0]}: {problem.strerror}", file=sys.stderr)
        return NOT_STARTED
    if reads:  # else the reader could not see that the command has closed its output
        os.close(1)
    code = _wait(child, woken, reads)
    end_all()
    return 128 - code if code < 0 else code


def _wait(child: "subprocess.Popen[bytes]", woken: int, reads: bool) -> int:
    """Wait for the child and return its exit code, or -SIGTERM after a request to stop. `reads`: the child reads stdin."""
    poll, until = select.poll(), math.inf
    poll.register(woken, select.POLLIN)
    poll.register(0, select.POLLRDHUP if reads else select.POLLIN)
    while True:
        readable = dict(poll.poll(None if until == math.inf else max(0.0, until - time.monotonic()) * 1000))
        code = child.poll()
        if code is not None:
            return code
        if 0 in readable and reads:
            poll.unregister(0)
            until = time.monotonic() + LAST
        elif (0 in readable and not os.read(0, 1)) or time.monotonic() >= until:
            return -signal.SIGTERM
        if woken in readable and set(os.read(woken, 4096)) & {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}:
            return -signal.SIGTERM
        _reap(child.pid)


def _reap(but: int) -> None:
    """Collect the exit codes of adopted processes except `but`, to leave no zombies."""
    for pid in descendants():
        if pid != but and stat_of(pid)[0] == "Z":
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # its own parent will collect it
                continue


def end_all() -> None:
    """End every descendant by SIGTERM, then SIGKILL after GRACE. Repeats, because processes may fork during the search."""
    killing, until = signal.SIGTERM, time.monotonic() + GRACE
    signaled: set[int] = set()
    while True:
        _reap(0)
        left = {pid for pid in descendants() if stat_of(pid)[0] != "Z"}
        if not left:
            return
        if time.monotonic() >= until:
            killing, signaled = signal.SIGKILL, set()
        for pid in left - signaled:
            try:
                os.kill(pid, killing)
            except ProcessLookupError:
                continue
        signaled |= left
        time.sleep(0.01)


def descendants() -> set[int]:
    """Return the IDs of all processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib takes longer to import than all this takes to run
        if name.isdigit():
            children.setdefault(stat_of(int(name))[1], []).append(int(name))
    found: set[int] = set()
    new = children.get(os.getpid(), [])
    while new:
        found.update(new)
        new = [pid for parent in new for pid in children.get(parent, []) if pid not in found]
    return found


def stat_of(pid: int) -> tuple[str, int]:
    """Return a process's state ("Z": it has ended) and its parent's ID; ("Z", 0) if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            # Skip the name in parentheses, which may hold any characters.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return fields[0].decode(), int(fields[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
