"""Run a program in its own process group within limits, and kill it with its children."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from agentrl.contrib.sandboxes.contract import End, ExecResult
from agentrl.utils.errors import SandboxError
from agentrl.utils.threads import DaemonThreads

START_SECONDS = 60.0
CHECK_S = 0.05
"""Seconds between two checks of a running program's limits."""
WATCHES = DaemonThreads("sandbox", 256)
STATUS = "AGENTRL_STATUS"
"""Variable with the path of the status pipe."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Limits of one run, checked from outside. `wall`: seconds from the first status byte, or from the start without a status
    pipe; `output`: bytes kept per stream (a run that writes 64 times as much is stopped); `disk`: limit of `used()`, the bytes
    on disk; `crowded(leader, pids)`: True if the program and its descendants have more than `pids` processes or threads."""

    wall: float
    output: int
    disk: int | None = None
    used: Callable[[], int] = lambda: 0
    pids: int | None = None
    crowded: Callable[[int, int], bool] = lambda leader, pids: False


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a process group; `status`: the bytes from its status pipe."""

    stdout: bytes
    stderr: bytes
    cut: int
    end: End
    code: int
    status: bytes
    seconds: float

    def result(self, end: End | None = None) -> ExecResult:
        out, err = self.stdout.decode("utf-8", "replace"), self.stderr.decode("utf-8", "replace")
        return ExecResult(self.code, out, err, self.seconds, end or self.end, self.cut)


async def run_group(
    command: Sequence[str],
    stdin: bytes,
    watched: Watched,
    *,
    env: Mapping[str, str] | None = None,
    merge: bool = True,
    status: Literal["argument", "variable"] | None = "argument",
) -> Ended:
    """Run a program in its own session and kill the processes that it leaves.

    `status`: the descriptor of a pipe is appended to the command, or its path is in the variable STATUS, and the time limit
    starts with the first byte that the program writes to it. The whole group is killed at a limit, on cancellation, and also
    after a normal end. `env`: variables, by default only PYTHONHASHSEED=0. Raises SandboxError if the program does not start.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # polled from the event loop
    began = time.monotonic()
    process: asyncio.subprocess.Process | None = None
    attended = _ProcessState(reader, watched)
    watching = asyncio.ensure_future(WATCHES.call("watch", attended.watch))
    try:
        path = {STATUS: f"/proc/{os.getpid()}/fd/{writer}"} if status == "variable" else {}
        await asyncio.sleep(0)  # start the watching thread before the program
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *([str(writer)] if status == "argument" else []),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT if merge else asyncio.subprocess.PIPE,
                env={**({"PYTHONHASHSEED": "0"} if env is None else env), **path},
                cwd="/",
                pass_fds=(writer,) if status == "argument" else (),
                start_new_session=True,
            )
        except OSError as problem:
            raise SandboxError(f"{command[0]} does not start: {problem}") from problem
        attended.leader = process.pid
        attended.deadline = time.monotonic() + (START_SECONDS if status else watched.wall)

        async def read(number: int, stream: asyncio.StreamReader | None) -> None:
            while stream is not None and (chunk := await stream.read(1 << 16)):
                attended.take(number, chunk)
                if attended.stopped is not None:
                    kill_group(process.pid)

        # The exit is awaited too, because code may close its output and keep running.
        streams = read(0, process.stdout), read(1, process.stderr)
        finished = asyncio.ensure_future(asyncio.gather(_feed_input(process, stdin), *streams, process.wait()))
        # Read the exception even if nobody awaits it any more: asyncio would report it at garbage collection.
        finished.add_done_callback(lambda gathered: gathered.cancelled() or gathered.exception())
        try:
            while not finished.done():
                await asyncio.wait([finished], timeout=CHECK_S)
                attended.read_status()
                if process.returncode is None and attended.stopped is None and time.monotonic() > attended.deadline:
                    attended.stopped = "wall"
                if attended.stopped is not None or process.returncode is not None:
                    # Also after a normal end: remaining processes of the group would keep the output open.
                    kill_group(process.pid)
            finished.result()
            attended.read_status()  # bytes that arrived during the last check
        finally:
            finished.cancel()
        attended.over.set()
        await watching  # a check that began before the end counts
        code = process.returncode if process.returncode is not None else -1
        # SIGXCPU is the CPU limit; SIGKILL, if it was not sent from here, is the hard CPU limit.
        killed: End = "cpu" if code in (-signal.SIGXCPU, -signal.SIGKILL) else "killed"
        end = attended.stopped or ("ok" if code == 0 else killed if code < 0 else "error")
        seconds = time.monotonic() - began
        out, err = attended.kept
        return Ended(bytes(out), bytes(err), attended.cut, end, code, attended.status, seconds)
    finally:
        attended.over.set()
        os.close(reader)
        os.close(writer)
        if process is not None:
            kill_group(process.pid)
            await asyncio.shield(_reap(process))


class _ProcessState:
    """State of a running process. The time limit starts with its first status byte, so a slow process start does not count
    against the policy."""

    def __init__(self, reader: int, watched: Watched) -> None:
        self.kept = (bytearray(), bytearray())
        self.cut = 0
        self.stopped: End | None = None
        self.status = b""
        self.leader, self.deadline = 0, 0.0  # set after the program has started
        self._reader, self._watched = reader, watched
        self.over = threading.Event()

    def take(self, stream: int, chunk: bytes) -> None:
        """Keep as much of an output chunk as fits."""
        kept = self.kept[stream]
        room = self._watched.output - len(kept)
        kept.extend(chunk[:room])
        self.cut += max(0, len(chunk) - room)
        if self.cut > 63 * self._watched.output and self.stopped is None:
            self.stopped = "output"

    def watch(self) -> None:
        """Kill the program if its processes or files exceed a limit, until `over` is set. Checks often and in a thread: a busy
        event loop would miss a thread bomb that the memory limit ends within 0.1 s, and report the wrong limit."""
        looks, limits = 0, self._watched
        while not self.over.wait(CHECK_S / 5):
            looks += 1
            end: End | None = None
            if self.leader and limits.pids is not None and limits.crowded(self.leader, limits.pids):
                end = "processes"
            elif self.leader and looks % 5 == 0 and limits.disk is not None and limits.used() > limits.disk:
                end = "disk"
            if end is not None:
                self.stopped = self.stopped or end
                kill_group(self.leader)
                return

    def read_status(self) -> None:
        with suppress(BlockingIOError):
            status = os.read(self._reader, 4096)
            if not self.status:
                self.deadline = time.monotonic() + self._watched.wall
            self.status += status
            if status.endswith(b"p") and self.status.startswith(b"+"):
                self.stopped = "processes"


async def _feed_input(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # the program died first; its status pipe shows that


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Read a killed process's output to its end and collect the exit status; leaves no pipe open."""
    for stream in (process.stdout, process.stderr):
        with suppress(RuntimeError):  # another reader, which is being cancelled, still has the stream
            while stream is not None and await stream.read(1 << 16):
                pass
    await process.wait()


def kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
