"""Define the interface of sandboxes: places with files of their own that run commands of a policy.

    provider = SANDBOXES.bind("local", {})()
    box = await provider.start(SandboxSpec(files={"a.txt": b"1"}))
    result = await box.exec("wc -c < a.txt", timeout=5)
    await box.stop()

Paths are POSIX paths from the sandbox's root; relative ones begin at `SandboxSpec.workdir`. A command that fails, is too slow
or is killed returns an `ExecResult`, since the policy wrote it; a failing sandbox raises SandboxError, a fault of the
infrastructure that is never scored.
"""

from __future__ import annotations

import errno
import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from agentrl.env.address import SANDBOXES
from agentrl.utils.errors import ConfigError, SandboxError

Network = Literal["none", "all"]
End = Literal["ok", "error", "cpu", "wall", "disk", "output", "processes", "killed"]
Command = str | Sequence[str]

NOTEBOOK = Path(__file__).with_name("notebook.py")
"""Program that runs Python code like a notebook cell: it prints the value of a final expression."""


@dataclass(frozen=True)
class SandboxSpec:
    """Requirements of an environment on its sandbox; a provider rejects unsupported fields by name.

    `image`: the container image, in the provider's notation (None: no image needed); `build`: a folder with a Dockerfile to
    build it from. `files`: path -> content at the start. `network`: "none" or "all". `memory`, `file_size` (per file) and `disk`
    (all files below the root) in bytes, None for no limit; `cpus`: processors at once; `cpu_s`: seconds of CPU time per
    command; `pids`: processes and threads at once. `env`: variables of every command. `processes`: False allows Python code
    only, in one process (`Sandbox.python`).
    """

    image: str | None = None
    build: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    network: Network = "none"
    memory: int | None = 8 << 30
    cpus: float | None = None
    cpu_s: int | None = None
    pids: int = 256
    file_size: int | None = None
    disk: int | None = 4 << 30
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/app"
    processes: bool = True

    def place(self, path: str) -> str:
        """Return the path from the sandbox's root, without "." and ".."; ".." does not leave the root."""
        return posixpath.normpath(posixpath.join("/", self.workdir, path))


@dataclass(frozen=True, slots=True)
class Run:
    """A command for a provider: `argv`, `cwd` from the sandbox's root, and all requested variables `env`; the other fields are
    those of `Sandbox.exec`."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    timeout: float
    max_output: int
    stdin: bytes
    merge: bool


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command. `code`: exit status, -N if signal N ended it. `end`: cause of the end; "cpu", "wall", "disk", "output"
    and "processes" name the limit that it hit. `cut`: dropped bytes of output beyond `max_output`. `seconds`: duration."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    end: End = "ok"
    cut: int = 0


@dataclass(frozen=True, slots=True)
class FileInfo:
    """An entry below a folder: its path relative to the folder and its size in bytes; `regular`: no link, pipe or device."""

    path: str
    size: int
    regular: bool


class Sandbox(ABC):
    """A started sandbox. One command runs at a time. Providers override `execute`."""

    shell: ClassVar[str] = "/bin/sh"

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        max_output: int = 1 << 16,
        stdin: bytes = b"",
        merge: bool = False,
    ) -> ExecResult:
        """Run an argument vector, or a text with `sh -c`. `timeout` in seconds; `max_output` in bytes per stream; `merge`: write
        stderr into stdout, in order. Raises SandboxError if the sandbox failed. On cancellation, kills the command with its
        children before it returns."""
        argv = [self.shell, "-c", command] if isinstance(command, str) else list(command)
        variables = {**self.spec.env, **(env or {})}
        run = Run(argv, self.spec.place(cwd or ""), variables, timeout, max_output, stdin, merge)
        why: object = "embedded null byte"
        try:  # a zero byte, half of a character, or more text than the kernel passes to a program is the command's fault
            if b"\0" not in b"".join(map(os.fsencode, [*argv, run.cwd, *variables, *variables.values()])):
                return await self.execute(run)
        except (UnicodeEncodeError, SandboxError) as fault:
            why = fault.__cause__ or fault
            if isinstance(fault, SandboxError) and getattr(why, "errno", None) != errno.E2BIG:
                raise
        return ExecResult(127, "", f"{why}\n", 0.0, "error")

    async def execute(self, run: Run) -> ExecResult:
        """Run a command for `exec`."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def python(self, code: str, *, timeout: float = 60.0, max_output: int = 1 << 16) -> ExecResult:
        """Run Python code and print the value of a final expression. `stdout` has output and errors, in order."""
        argv = ["python3", "-P", "-B", "-X", "utf8", "-c", NOTEBOOK.read_text()]
        fed = code.encode("utf-8", "surrogatepass")  # a lone surrogate is the code's fault; the interpreter reports it
        return await self.exec(argv, timeout=timeout, max_output=max_output, stdin=fed, merge=True)

    @abstractmethod
    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        """Return a file's content. Raises FileNotFoundError if there is no regular file, ValueError if it has more than `most`
        bytes, SandboxError if the sandbox failed."""

    @abstractmethod
    async def write(self, files: Mapping[str, bytes]) -> None:
        """Replace or create files, with their parent folders. Raises FileExistsError if a path exists and is not a file,
        SandboxError if the sandbox failed."""

    @abstractmethod
    async def entries(self, path: str = ".") -> list[FileInfo]:
        """Return all files below a folder, sorted by path; none if the folder does not exist."""

    @abstractmethod
    async def remove(self, paths: Iterable[str]) -> None:
        """Remove files and folders with their contents; a missing path is no error. The working folder itself is only emptied."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Save the current files; return an ID for `SandboxProvider.start`."""

    async def kill(self) -> None:
        """Kill processes that commands left behind; only providers with the trait `lasting` have any."""
        return

    @abstractmethod
    async def stop(self) -> None:
        """Stop the sandbox and remove its processes, files and container. Does not raise if it is already gone."""

    @abstractmethod
    def abandon(self) -> None:
        """Stop an unreferenced sandbox without an event loop, as far as possible."""

    def path(self, path: str) -> str:
        """Return the spelling of a path in commands."""
        return self.spec.place(path)


class SandboxProvider(ABC):
    """Start sandboxes of one kind; keyword arguments of the class are `args` of the config's `[env.sandbox]`."""

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Return why this machine cannot start one (for example a missing program), or None. Called before a run; may block."""

    @abstractmethod
    def check(self, spec: SandboxSpec) -> None:
        """Raise ConfigError, by name, for a field that this provider does not support."""

    @abstractmethod
    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        """Start a sandbox with the files of the spec or of a snapshot. Raises SandboxError if it does not start."""

    def forget(self, snapshot: str) -> None:
        """Free the storage of a snapshot; called without an event loop."""
        return

    def refuse(self, spec: SandboxSpec, **words: str) -> None:
        """Refuse fields by name. Raises ConfigError for the first field in `words` (field -> reason) that is not the default."""
        default = SandboxSpec()
        for field_name, reason in words.items():
            if (value := getattr(spec, field_name)) != getattr(default, field_name):
                raise ConfigError(f'sandbox provider "{self.name}": {field_name} = {value!r}: {reason}')


def missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(f"{path}: no such file")


def too_large(path: str, size: int, most: int) -> ValueError:
    return ValueError(f"{path}: {size} bytes, more than {most}")


__all__ = [
    "NOTEBOOK", "SANDBOXES", "Command", "End", "ExecResult", "FileInfo", "Network", "Run", "Sandbox", "SandboxError",
    "SandboxProvider", "SandboxSpec", "missing", "too_large",
]  # fmt: skip
