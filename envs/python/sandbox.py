"""Runs a policy's Python code in a separate, sandboxed process (see jail.py for the restrictions)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import signal
import stat
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from agentrl.errors import EnvError, ResourceError

JAIL = Path(__file__).with_name("jail.py")
START_SECONDS = 60.0
End = Literal["ok", "error", "cpu", "wall", "disk", "output", "killed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. `cpu` and `wall` in seconds, the rest in bytes (`files`: a count).

    `wall` starts at the code's first line. `file_size` bounds one file and `disk` the whole folder; `output`
    bounds the output that is kept, and a run that writes 64 times as much is stopped.
    """

    cpu: int = 2
    wall: float = 10.0
    memory: int = 512 << 20
    file_size: int = 1 << 20
    disk: int = 4 << 20
    files: int = 32
    output: int = 16 << 10


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a run: its output (stdout and stderr interleaved), how it ended, the folder's files.

    `dropped` names files that were not kept: links, devices, or files beyond the limits.
    """

    output: str
    end: End
    code: int
    files: dict[str, bytes]
    dropped: list[str] = field(default_factory=list)
    cut: int = 0
    seconds: float = 0.0


@cache
def require_sandbox(isolate_files: bool) -> None:
    """Raises ResourceError, naming what is missing, if this machine's kernel does not support the sandbox."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise ResourceError(f"the Python sandbox needs Linux on x86_64 or aarch64, not {sys.platform} {platform.machine()}")
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        raise ResourceError("the Python sandbox needs a kernel with seccomp filters")
    if isolate_files and libc.syscall(444, None, 0, 1) < 1:  # landlock_create_ruleset, version query
        raise ResourceError(
            "the Python sandbox needs a kernel with Landlock (5.13 or newer) to keep code inside its folder; "
            "isolate_files = false runs without that, and code can then read and write what you can"
        )


async def run_code(code: str, files: Mapping[str, bytes], limits: Limits, *, isolate_files: bool = True) -> SandboxResult:
    """Run `code` in a fresh process in a fresh folder with `files`.

    In every case, also on cancellation, the process group is killed and the folder removed before this
    returns. Raises EnvError if the sandbox itself did not start.
    """
    folder = Path(tempfile.mkdtemp(prefix="agentrl-python-")).resolve()
    try:
        work = folder / "work"
        work.mkdir()
        for name, content in files.items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        job = {
            "code": code,
            "folder": str(work),
            "limits": {"cpu": limits.cpu, "memory": limits.memory, "file_size": limits.file_size},
            "isolate_files": isolate_files,
            "readable": _readable(),
        }
        ended = await run_group(_command(), json.dumps(job).encode(), work, limits)
        if ended.status != b"+":
            reason = ended.status[1:].decode(errors="replace") or ended.output.decode(errors="replace")[-500:]
            raise EnvError(f"the Python sandbox did not start ({ended.end}): {reason or 'no reason given'}")
        kept, dropped = collect(work, limits)
        output = ended.output.decode("utf-8", "replace")
        return SandboxResult(output, ended.end, ended.code, kept, dropped, ended.cut, ended.seconds)
    finally:
        remove_tree(folder)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process group ended; `status`: the bytes that it wrote to its status pipe."""

    output: bytes
    cut: int
    end: End
    code: int
    status: bytes
    seconds: float


async def run_group(command: Sequence[str], stdin: bytes, work: Path, limits: Limits) -> Ended:
    """Run a program in its own session and clean up everything after it.

    The file descriptor of its status pipe is appended to the command. The whole group is killed at the time
    limit, when the folder exceeds the disk limit, on cancellation, and also after a normal end.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # polled from the event loop
    began = time.monotonic()
    process: asyncio.subprocess.Process | None = None
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(writer),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            pass_fds=(writer,),
            start_new_session=True,
        )
        attended = _Attended(reader, limits)
        await _attend(process, stdin, work, attended)
        code = process.returncode if process.returncode is not None else -1
        end = attended.stopped or _end_of(code)
        seconds = time.monotonic() - began
        return Ended(bytes(attended.output), attended.cut, end, code, attended.status, seconds)
    finally:
        os.close(reader)
        os.close(writer)
        if process is not None:
            _kill_group(process.pid)
            await asyncio.shield(_reap(process))


class _Attended:
    """The state of a running process. Its time limit starts when its code starts, which it reports by its
    status, so that a slow process start does not count against the policy."""

    def __init__(self, reader: int, limits: Limits) -> None:
        self.output = bytearray()
        self.cut = 0
        self.stopped: End | None = None
        self.status = b""
        self._reader, self._limits = reader, limits
        self._deadline = time.monotonic() + START_SECONDS

    def take(self, chunk: bytes) -> None:
        """Keep as much of a chunk of output as fits."""
        room = self._limits.output - len(self.output)
        self.output.extend(chunk[:room])
        self.cut += max(0, len(chunk) - room)
        if self.cut > 63 * self._limits.output and self.stopped is None:
            self.stopped = "output"

    def look(self, work: Path, *, running: bool) -> None:
        """Read the status, and check the limits."""
        if not self.status and (status := _drain(self._reader)):
            self.status = status
            self._deadline = time.monotonic() + self._limits.wall
        if running and self.stopped is None:
            if time.monotonic() > self._deadline:
                self.stopped = "wall"
            elif folder_size(work) > self._limits.disk:
                self.stopped = "disk"


async def _attend(process: asyncio.subprocess.Process, stdin: bytes, work: Path, attended: _Attended) -> None:
    """Write to, read from and await the process; kill its group at a limit."""

    async def read() -> None:
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            attended.take(chunk)
            if attended.stopped is not None:
                _kill_group(process.pid)

    # The exit is awaited too, because code may close its output and keep running.
    finished = asyncio.ensure_future(asyncio.gather(_feed(process, stdin), read(), process.wait()))
    try:
        while not finished.done():
            await asyncio.wait([finished], timeout=0.05)
            attended.look(work, running=process.returncode is None)
            if attended.stopped is not None or process.returncode is not None:
                # Also after a normal end: remaining processes of the group would keep the output open.
                _kill_group(process.pid)
        finished.result()
    finally:
        finished.cancel()


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        return  # it died first, which its status pipe shows


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Read a killed process's output to the end and collect its exit status, so that nothing stays open."""
    assert process.stdout is not None
    with suppress(RuntimeError):  # another reader, which is being cancelled, still has the stream
        while await process.stdout.read(1 << 16):
            pass
    await process.wait()


def _end_of(code: int) -> End:
    """SIGXCPU is the CPU limit; SIGKILL, if it was not sent from here, is the hard CPU limit."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "cpu"
    return "ok" if code == 0 else "killed" if code < 0 else "error"


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _drain(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except BlockingIOError:
        return b""


def _command() -> list[str]:
    # -P keeps the script's own folder off the path, -S -s keep out site-packages; the environment is empty.
    return [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", str(JAIL)]


@cache
def _readable() -> list[str]:
    """Folders of Python's standard library and of the shared libraries that its modules load."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    folders |= {str(Path(sys.base_prefix) / "lib"), "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    return sorted({str(Path(folder).resolve()) for folder in folders if Path(folder).exists()})


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder; each entry counts at least as one block of 4096.

    A folder that is nested too deep for a path counts as infinitely large.
    """
    total = 0
    pending = [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                        total += 4096
                    else:
                        total += max(entry.stat(follow_symlinks=False).st_size, 4096)
        except OSError as problem:
            if problem.errno == errno.ENAMETOOLONG:
                return sys.maxsize
            continue  # it disappeared while it was being read
    return total


def collect(work: Path, limits: Limits) -> tuple[dict[str, bytes], list[str]]:
    """The regular files that a run left, by relative path, within the limits; and the names of dropped files.

    Links are never followed, since their targets may be outside the folder. Folders are read four levels deep.
    """
    kept: dict[str, bytes] = {}
    dropped: list[str] = []
    total = 0
    pending = [(work, 0)]
    while pending:
        folder, depth = pending.pop()
        folder.chmod(0o700)
        for path in sorted(folder.iterdir()):
            info = path.lstat()
            if stat.S_ISDIR(info.st_mode) and depth < 4:
                pending += [(path, depth + 1)] if path.name != "__pycache__" else []
                continue
            name = str(path.relative_to(work))
            fits = info.st_size <= limits.file_size and total + info.st_size <= limits.disk
            if not stat.S_ISREG(info.st_mode) or not fits or len(kept) >= limits.files or not _is_text(name):
                dropped.append(name.encode(errors="replace").decode())
                continue
            path.chmod(0o600)
            kept[name] = path.read_bytes()
            total += info.st_size
    return kept, dropped[:20]


def _is_text(name: str) -> bool:
    """Whether a file's name is Unicode (Linux allows any bytes)."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def remove_tree(folder: Path) -> None:
    """Remove a folder of any depth: inner folders are moved up first, because their paths may be too long."""
    pending = [folder]
    moved = 0
    while pending:
        current = pending.pop()
        current.chmod(0o700)
        for path in list(current.iterdir()):
            if path.is_dir() and not path.is_symlink():
                if current != folder:
                    path = path.rename(folder / f".{moved}")
                    moved += 1
                pending.append(path)
            else:
                path.unlink()
        if current != folder:
            current.rmdir()
    folder.rmdir()
