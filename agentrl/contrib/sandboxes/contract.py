"""Contract of sandboxes: a place with files of its own in which commands run that a policy wrote.

    provider = SANDBOXES.bind("local", {})()
    box = await provider.start(SandboxSpec(files={"a.txt": b"1"}))
    result = await box.exec("wc -c < a.txt", timeout=5)
    await box.stop()

Paths are POSIX paths in the sandbox's own root; relative ones begin at `SandboxSpec.workdir`. A command that fails, is too
slow or is killed is an answer (`ExecResult`), since the policy wrote it; a sandbox that fails raises SandboxError, which is
the infrastructure's fault and is never scored.
"""

from __future__ import annotations

import json
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

from agentrl.env.address import SANDBOXES
from agentrl.utils.errors import ConfigError, SandboxError

Network = Literal["none", "all"]
End = Literal["ok", "error", "cpu", "wall", "disk", "output", "processes", "killed"]
Command = str | Sequence[str]

NOTEBOOK = Path(__file__).with_name("notebook.py")
"""The program that runs Python code as a notebook does: the value of a last expression is printed."""


@dataclass(frozen=True)
class SandboxSpec:
    """Requirements of an environment on its sandbox; a provider refuses by name what it cannot give.

    `image`: the container image, or the provider's word for one (None: none is needed); `build`: a folder with a Dockerfile
    to make it from. `files`: contents by path, there when it starts. `network`: "none" or "all". `memory`, `file_size` (one
    file) and `disk` (all files below the root) in bytes, None for no limit; `cpus`: processors at once; `cpu_s`: seconds of
    processor time of one command; `pids`: processes and threads at once. `env`: variables of every command. `processes`: False
    allows Python code only, in one process (`Sandbox.python`).
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

    def empty(self) -> SandboxSpec:
        """The same without files: what can be started ahead for any task."""
        return replace(self, files={})

    @property
    def key(self) -> str:
        """Equal for specs that differ in files only."""
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "files"}
        return json.dumps(rest, sort_keys=True, default=str)

    def place(self, path: str) -> str:
        """The path from the sandbox's root, without "." and ".."; ".." does not lead out of the root."""
        return posixpath.normpath(posixpath.join("/", self.workdir, path))


@dataclass(frozen=True, slots=True)
class Run:
    """A command as a provider runs it: its words, its folder from the sandbox's root, and all variables that were asked for; the
    rest as in `Sandbox.exec`."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    timeout: float
    max_output: int
    stdin: bytes
    merge: bool


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Result of a command. `code`: its exit status, -N if signal N ended it. `end`: how it ended; "cpu", "wall", "disk",
    "output" and "processes" name the limit that it met. `cut`: bytes of output beyond `max_output`, which are not kept."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    end: End = "ok"
    cut: int = 0


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry below a folder: its path relative to the folder, and its size in bytes; `regular`: no link, pipe or device."""

    path: str
    size: int
    regular: bool


class Sandbox(ABC):
    """A started sandbox. One command runs at a time. A provider's overrides `execute`."""

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
        """Run an argument vector, or a text with `sh -c`. `timeout` in seconds; `max_output` in bytes of each stream; `merge`:
        stderr goes into stdout, in order. Raises SandboxError if the sandbox failed. On cancellation the command is killed
        with its children before this returns."""
        argv = [self.shell, "-c", command] if isinstance(command, str) else list(command)
        variables = {**self.spec.env, **(env or {})}
        return await self.execute(Run(argv, self.spec.place(cwd or ""), variables, timeout, max_output, stdin, merge))

    async def execute(self, run: Run) -> ExecResult:
        """Run a command; the work of `exec`."""
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def python(self, code: str, *, timeout: float = 60.0, max_output: int = 1 << 16) -> ExecResult:
        """Run Python code; the value of a last expression is printed too. Output and errors are in `stdout`, in order."""
        argv = ["python3", "-P", "-B", "-X", "utf8", "-c", NOTEBOOK.read_text()]
        fed = code.encode("utf-8", "surrogatepass")  # half a character is the code's fault, told by the interpreter
        return await self.exec(argv, timeout=timeout, max_output=max_output, stdin=fed, merge=True)

    @abstractmethod
    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        """A file's content. Raises FileNotFoundError if there is no regular file, ValueError if it has more than `most` bytes,
        SandboxError if the sandbox failed."""

    @abstractmethod
    async def write(self, files: Mapping[str, bytes]) -> None:
        """Write files, each whole, with the folders that they need. Raises FileExistsError if something else than a file is at
        a path, SandboxError if the sandbox failed."""

    @abstractmethod
    async def entries(self, path: str = ".") -> list[FileInfo]:
        """All files below a folder, by path; none if there is no such folder."""

    @abstractmethod
    async def remove(self, paths: Iterable[str]) -> None:
        """Remove files and folders with their contents; a missing path is no error. The working folder itself
        stays, empty."""

    @abstractmethod
    async def snapshot(self) -> str:
        """An id of the files as they are now, for `SandboxProvider.start`."""

    async def kill(self) -> None:
        """Kill every process that a command left behind; nothing to do but for providers with the trait `lasting`."""
        return

    @abstractmethod
    async def stop(self) -> None:
        """End it: no process, no file and no container is left. Never raises because it is gone already."""

    @abstractmethod
    def abandon(self) -> None:
        """`stop` without an event loop, as well as that can be done: for sandboxes that nobody holds any more."""

    def path(self, path: str) -> str:
        """Spelling of a path in commands."""
        return self.spec.place(path)


class SandboxProvider(ABC):
    """Starts sandboxes of one kind; keyword arguments of the class are `args` of the config's `[env.sandbox]`."""

    name: ClassVar[str]

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this machine has none (a program or a key that is missing), or None. Asked before a run starts; may block."""

    @abstractmethod
    def check(self, spec: SandboxSpec) -> None:
        """Raises ConfigError, by name, for what this provider cannot give."""

    @abstractmethod
    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        """A sandbox with the spec's files, or with those of a snapshot. Raises SandboxError if it does not start."""

    def forget(self, snapshot: str) -> None:
        """Free what a snapshot takes, if it takes anything; called without an event loop."""
        return

    def refuse(self, spec: SandboxSpec, **words: str) -> None:
        """Raise ConfigError for the first of the spec's fields in `words` that is set, with the reason."""
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
