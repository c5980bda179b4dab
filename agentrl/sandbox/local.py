"""Sandboxes of this machine's kernel alone: Landlock, seccomp and rlimits, a folder each (see jail.py)."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, ResourceError, SandboxError
from agentrl.executors import in_thread
from agentrl.sandbox.base import (
    NOTEBOOK,
    SANDBOXES,
    Command,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
)
from agentrl.sandbox.folder import Folder
from agentrl.sandbox.processes import Ended, Watched, run_group

WHAT_HELPS = (
    'install bubblewrap (the package bubblewrap), Podman or Docker (provider = "podman", "docker"), or '
    "boot Linux 5.13 or newer with Landlock (CONFIG_SECURITY_LANDLOCK, and landlock in lsm=)"
)
JAIL = Path(__file__).with_name("jail.py")
LANDLOCK_AT_MOST = 99
"""The newest version of Landlock that is used, whatever the kernel has: tests try what an older one leaves open."""
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt")
READABLE = (
    "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/hosts", "/etc/resolv.conf",
    "/etc/ssl/certs", "/etc/alternatives", "/etc/terminfo", "/etc/mime.types",
)  # fmt: skip


class FolderSandbox(Sandbox):
    """A sandbox whose root is a folder of this machine; a subclass runs the commands."""

    def __init__(self, spec: SandboxSpec, folder: Folder) -> None:
        super().__init__(spec)
        self.folder = folder
        self._turn = asyncio.Lock()
        (folder.root / spec.place("").lstrip("/")).mkdir(parents=True, exist_ok=True)

    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        return await in_thread("sandbox", self.folder.read, self.spec.place(path), most)

    async def write(self, files: Mapping[str, bytes]) -> None:
        placed = {self.spec.place(path): content for path, content in files.items()}
        await in_thread("sandbox", self.folder.write, placed)

    async def entries(self, path: str = ".") -> list[FileInfo]:
        return await in_thread("sandbox", self.folder.entries, self.spec.place(path))

    async def remove(self, paths: Iterable[str]) -> None:
        await in_thread("sandbox", self.folder.delete, [self.spec.place(path) for path in paths])
        with suppress(FileExistsError, NotADirectoryError):  # a command put a file or a link there: commands then find no folder
            Path(self.host("")).mkdir(parents=True, exist_ok=True)

    async def snapshot(self) -> str:
        async with self._turn:
            copied = await in_thread("sandbox", self.folder.copy)
        _SNAPSHOTS[str(copied.root)] = copied
        return str(copied.root)

    async def restore(self, snapshot: str) -> None:
        async with self._turn:
            await in_thread("sandbox", self.folder.become, snapshot_folder(snapshot))

    async def stop(self) -> None:
        async with self._turn:  # a command under way is cancelled by whoever awaits it
            await in_thread("sandbox", self.folder.remove)

    def abandon(self) -> None:
        self.folder.remove()

    async def watched(self, timeout: float, max_output: int) -> Watched:
        """The limits of a command. A folder that is over its size already may not grow, so that a command can clear it up."""
        disk = self.spec.disk and max(self.spec.disk, await in_thread("sandbox", self.folder.size))
        return Watched(timeout, max_output, disk, self.folder.size)

    def host(self, path: str) -> str:
        """A path of the sandbox as this machine has it. Raises SandboxError if it is stopped."""
        if not self.folder.remove.alive:
            raise SandboxError("the sandbox is stopped")
        return str(self.folder.root / self.spec.place(path).lstrip("/"))


class FolderProvider(SandboxProvider):
    """Providers whose sandboxes are folders."""

    def folder(self, spec: SandboxSpec, snapshot: str | None) -> Folder:
        """A new folder with the spec's files, or a snapshot's. Blocks."""
        if snapshot is not None:
            return snapshot_folder(snapshot).copy()
        made = Folder()
        made.write({spec.place(path): content for path, content in spec.files.items()})
        return made

    def forget(self, snapshot: str) -> None:
        if folder := _SNAPSHOTS.pop(snapshot, None):
            folder.remove()


_SNAPSHOTS: dict[str, Folder] = {}


def snapshot_folder(snapshot: str) -> Folder:
    if snapshot not in _SNAPSHOTS:
        raise SandboxError(f"there is no snapshot {snapshot}")
    return _SNAPSHOTS[snapshot]


class LocalSandbox(FolderSandbox):
    """Commands are confined by the kernel's own means (jail.py); what they leave running dies with them."""

    def __init__(self, spec: SandboxSpec, folder: Folder, isolate_files: bool, packages: bool = False) -> None:
        super().__init__(spec, folder)
        self._isolate_files, self._packages = isolate_files, packages

    def path(self, path: str) -> str:
        return self.host(path)

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
        if not self.spec.processes:
            raise ConfigError("this sandbox was asked for without processes: it runs Python code only")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        work = self.host(cwd or "")
        variables = {**_variables(self.host("")), **self.spec.env, **(env or {})}
        job = {"argv": argv, "cwd": work, "env": variables, "stdin": stdin.decode("latin-1"), "parent": os.getpid()}
        ended = await self._run(job, timeout, max_output, merge)
        return ended.result("killed" if ended.end == "cpu" and self.spec.cpu_s is None else None)

    async def python(self, code: str, *, timeout: float = 60.0, max_output: int = 1 << 16) -> ExecResult:
        if self.spec.processes:
            return await super().python(code, timeout=timeout, max_output=max_output)
        return (await self._run({"code": code, "notebook": str(NOTEBOOK)}, timeout, max_output, merge=True)).result()

    async def _run(self, job: dict[str, Any], timeout: float, max_output: int, merge: bool) -> Ended:
        spec = self.spec
        limits = {"cpu": spec.cpu_s, "memory": spec.memory, "file_size": spec.file_size, "pids": spec.pids}
        named = frozenset([*_readable(), *(PROGRAMS if spec.processes else ())])
        shown, listed = (named, frozenset()) if self._packages else without_packages(named)
        programs = sorted(shown) if spec.processes else []
        readable = [*READABLE] if spec.processes else sorted(shown)
        job |= {
            "folder": str(self.folder.root if spec.processes else self.host("")),
            "limits": limits,
            "isolate_files": self._isolate_files,
            "readable": readable,
            "programs": programs,
            "listed": sorted(listed),
            "network": spec.network == "all",
            "landlock": LANDLOCK_AT_MOST,
        }
        async with self._turn:
            watched = await self.watched(timeout, max_output)
            if not spec.processes:  # one process, which nobody inside counts the threads of
                watched = replace(watched, pids=spec.pids, crowded=_many_threads)
            ended = await run_group(_command(), json.dumps(job).encode(), watched, merge=merge)
        if not ended.status.startswith(b"+"):
            reason = ended.status[1:].decode(errors="replace") or (ended.stdout + ended.stderr).decode(errors="replace")[-500:]
            raise SandboxError(f"the local sandbox did not start ({ended.end}): {reason or 'no reason given'}")
        return ended


@SANDBOXES.register("local", traits={"alone"})
class LocalProvider(FolderProvider):
    """Needs no program, image or right: Linux with seccomp, and Landlock (5.13) unless `isolate_files` is false. `packages`:
    Python's installed packages can be read, agentrl and the answers of its environments among them if they are there."""

    name = "local"

    def __init__(self, *, isolate_files: bool = True, packages: bool = False) -> None:
        self.isolate_files, self.packages = isolate_files, packages

    def unavailable(self) -> str | None:
        try:
            require_kernel(self.isolate_files)
        except ResourceError as reason:
            return str(reason)
        return None

    def check(self, spec: SandboxSpec) -> None:
        need = 'needs a container; use provider = "docker" or "podman"'
        self.refuse(spec, image=need, build=need, cpus="the kernel's own limits have no share of processors; leave it out")

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        require_kernel(self.isolate_files)
        try:
            folder = await in_thread("sandbox", self.folder, spec, snapshot)
            return LocalSandbox(spec, folder, self.isolate_files, self.packages)
        except OSError as problem:
            raise SandboxError(f"no folder for a sandbox: {problem}") from problem


@cache
def require_kernel(isolate_files: bool) -> None:
    """Raises ResourceError, naming what is missing, if this machine's kernel does not support the sandbox."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
        raise ResourceError(f"the local sandbox needs Linux on x86_64 or aarch64, not {sys.platform} {platform.machine()}")
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(21, 0, 0, 0, 0) < 0:  # PR_GET_SECCOMP
        raise ResourceError(f"the local sandbox needs a kernel with seccomp filters: {WHAT_HELPS}")
    if isolate_files and libc.syscall(444, None, 0, 1) < 1:  # landlock_create_ruleset, version query
        raise ResourceError(
            "the local sandbox needs a kernel with Landlock (5.13 or newer) to keep code inside its folder: "
            f"{WHAT_HELPS}. isolate_files = false runs without that, and code can then read and write what you can"
        )


def _many_threads(leader: int, most: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{leader}/task").stat().st_nlink - 2 > most
    return False


def _command() -> Sequence[str]:
    # -P keeps the script's own folder off the path, -S -s keep out site-packages; the environment is empty.
    return [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", str(JAIL)]


def _variables(home: str) -> dict[str, str]:
    """The variables of a command: nothing of this process's own."""
    path = [str(Path(sys.base_prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return {"PATH": ":".join(path), "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@cache
def package_folders() -> frozenset[str]:
    """Where Python packages are installed on this machine, as far as a command could read them."""
    found = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    for prefix in ("/usr", "/usr/local", "/opt", "/opt/*", "/opt/*/envs/*", sys.base_prefix):
        for place in ("lib/python3*/*-packages", "lib64/python3*/*-packages"):
            found |= {str(path) for path in Path("/").glob(f"{prefix}/{place}".lstrip("/"))}
    return frozenset(str(Path(folder).resolve()) for folder in found if Path(folder).is_dir())


@cache
def without_packages(folders: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """What to allow instead of `folders`, so that their installed packages are left out: what may be read, and the folders on the
    way, whose names may be listed (imports do; Landlock gives a right to all that is below)."""
    shown, listed = set(), set()
    hidden = package_folders()
    left = list(folders)
    while left:
        folder = left.pop()
        real = str(Path(folder).resolve())
        if real in hidden:
            continue
        if any(other.startswith(f"{real}/") for other in hidden):
            listed.add(real)
            left += [entry.path for entry in os.scandir(real)]
        elif not any(real.startswith(f"{other}/") for other in hidden):
            shown.add(folder)
    return frozenset(shown), frozenset(listed)


@cache
def _readable() -> list[str]:
    """Folders of Python's standard library and of the shared libraries that its modules load."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    folders |= {str(Path(sys.base_prefix) / "lib"), "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    return sorted({str(Path(folder).resolve()) for folder in folders if Path(folder).exists()})
