"""Local sandboxes: a folder for the files, confined by the kernel of this machine alone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import shutil
import stat
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.contrib.sandboxes.contract import (
    NOTEBOOK,
    SANDBOXES,
    ExecResult,
    FileInfo,
    Run,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    missing,
    too_large,
)
from agentrl.contrib.sandboxes.process_group import Ended, Watched, run_group
from agentrl.utils.errors import ConfigError, ResourceError, SandboxError
from agentrl.utils.threads import in_thread

# A folder as files

DEEPEST = 64
_OURS = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of this machine; the caller's path causes all others."""


class Folder:
    """Temporary folder that is a sandbox's root; removed with this object, or at exit of the process."""

    def __init__(self) -> None:
        # In a folder that only this user may enter: the policy chooses the modes inside, so others could read the files.
        self._outer = Path(tempfile.mkdtemp(prefix="agentrl-sandbox-")).resolve()
        self.root = self._outer / "root"
        self.root.mkdir()
        self.remove = weakref.finalize(self, _remove_if_there, self._outer)

    def read(self, path: str, most: int) -> bytes:
        """Return a regular file's bytes. `path` is absolute, without "..". Raises FileNotFoundError if it is missing, ValueError
        if it has more than `most` bytes."""
        try:
            with _open_beneath(self.root, path, os.O_RDONLY | os.O_NONBLOCK) as file:
                info = os.fstat(file)
                if not stat.S_ISREG(info.st_mode):
                    raise missing(path)
                if info.st_size > most:
                    raise too_large(path, info.st_size, most)
                with os.fdopen(os.dup(file), "rb") as stream:
                    return stream.read(most)
        except OSError as problem:
            if problem.errno in _OURS:
                raise
            raise missing(path) from None

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replace or create files. Raises FileExistsError if a path cannot be written as a regular file."""
        for path, content in files.items():
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
                with _open_beneath(self.root, path, flags, make=True) as file:
                    if not stat.S_ISREG(os.fstat(file).st_mode):
                        raise FileExistsError
                    if content[:2] == b"#!":
                        os.fchmod(file, 0o755)  # a script: the policy may not be able to change modes itself
                    with os.fdopen(os.dup(file), "wb") as stream:
                        stream.write(content)
            except (OSError, ValueError) as problem:
                if isinstance(problem, OSError) and problem.errno in _OURS:
                    raise
                raise FileExistsError(f"{path}: not a path of a file: {problem}") from None

    def entries(self, path: str) -> list[FileInfo]:
        """Return all files below a folder, also links and pipes. Unreadable folders and files are made readable first."""
        top = self.root / path.lstrip("/")
        found: list[FileInfo] = []
        pending = [(top, 0)]
        while pending:
            folder, depth = pending.pop()
            try:
                if folder.is_symlink() or depth > DEEPEST:
                    continue
                folder.chmod(0o700)
                inside = list(os.scandir(folder))
            except OSError:
                continue
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    pending.append((Path(entry.path), depth + 1))
                    continue
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and not info.st_mode & stat.S_IRUSR:
                    Path(entry.path).chmod(info.st_mode | 0o600)
                found.append(FileInfo(os.path.relpath(entry.path, top), info.st_size, stat.S_ISREG(info.st_mode)))
        return sorted(found, key=lambda info: info.path)

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            target = self.root / path.lstrip("/")
            if target == self.root:
                remove_tree(target, keep=True)
                continue
            # Skip a path that leads over a link or out of the root.
            inside = target.parent.resolve() == target.parent and target.parent.is_relative_to(self.root)
            if not inside or not os.path.lexists(target):
                continue
            if target.is_dir() and not target.is_symlink():
                remove_tree(target)
            else:
                target.unlink()

    def size(self) -> int:
        """Return the bytes of all files; each entry counts as at least one block of 4096, a path that is too long as
        sys.maxsize."""
        total = 0
        pending = [str(self.root)]
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
                continue  # it was removed during the scan
        return total

    def copy(self) -> Folder:
        """Copy the folder with its files and links, without pipes and sockets."""
        other = Folder()
        copy_tree(self.root, other.root)
        return other


def copy_tree(source: Path, target: Path) -> None:
    """Copy regular files, folders and links (as links); no link is followed."""
    for folder, names, files in os.walk(source):
        here = Path(folder)
        there = target / here.relative_to(source)
        for name in [*names, *files]:
            path, info = here / name, (here / name).lstat()
            if stat.S_ISLNK(info.st_mode):
                (there / name).symlink_to(path.readlink())
            elif stat.S_ISDIR(info.st_mode):
                path.chmod(0o700)
                (there / name).mkdir()
            elif stat.S_ISREG(info.st_mode):
                path.chmod(info.st_mode | 0o600)
                shutil.copy2(path, there / name, follow_symlinks=False)


@contextmanager
def _open_beneath(root: Path, path: str, flags: int, make: bool = False) -> Iterator[int]:
    """Open a file below the root without following links; yield its descriptor."""
    *folders, name = [part for part in path.split("/") if part] or [""]
    if not name:
        raise IsADirectoryError(path)
    held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=held)
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
            os.close(held)
            held = inner
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=held)
    finally:
        os.close(held)
    try:
        yield file
    finally:
        os.close(file)


def remove_tree(folder: Path, keep: bool = False) -> None:
    """Remove a folder of any depth (`keep`: only its contents). Moves inner folders up first, because their paths may be too
    long."""
    pending = [folder]
    moved = 0
    while pending:
        current = pending.pop()
        current.chmod(0o700)
        for path in list(current.iterdir()):
            if path.is_dir() and not path.is_symlink():
                if current != folder:
                    while (place := folder / f".{moved}").exists():
                        moved += 1
                    path = path.rename(place)
                pending.append(path)
            else:
                path.unlink()
        if current != folder:
            current.rmdir()
    if not keep:
        folder.rmdir()


def _remove_if_there(folder: Path) -> None:
    with suppress(FileNotFoundError):
        remove_tree(folder)


# The local provider

WHAT_HELPS = (
    'install bubblewrap (the package bubblewrap), Podman or Docker (provider = "podman", "docker"), or '
    "boot Linux 5.13 or newer with Landlock (CONFIG_SECURITY_LANDLOCK, and landlock in lsm=)"
)
JAIL = Path(__file__).with_name("jail.py")
LANDLOCK_AT_MOST = 99
"""Newest version of Landlock to use, even if the kernel has a later one; tests lower it to check older kernels."""
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt")
READABLE = (
    "/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/localtime", "/etc/hosts", "/etc/resolv.conf",
    "/etc/ssl/certs", "/etc/alternatives", "/etc/terminfo", "/etc/mime.types",
)  # fmt: skip


class FolderSandbox(Sandbox):
    """A sandbox with a folder of this machine as its root; subclasses run the commands."""

    def __init__(self, spec: SandboxSpec, folder: Folder) -> None:
        super().__init__(spec)
        self.folder = folder
        self._turn = asyncio.Lock()

    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        return await in_thread("sandbox", self.folder.read, self.spec.place(path), most)

    async def write(self, files: Mapping[str, bytes]) -> None:
        placed = {self.spec.place(path): content for path, content in files.items()}
        await in_thread("sandbox", self.folder.write, placed)

    async def entries(self, path: str = ".") -> list[FileInfo]:
        return await in_thread("sandbox", self.folder.entries, self.spec.place(path))

    async def remove(self, paths: Iterable[str]) -> None:
        await in_thread("sandbox", self.folder.delete, [self.spec.place(path) for path in paths])
        with suppress(FileExistsError, NotADirectoryError):  # a command put a file or link there; later ones lack the folder
            Path(self.host("")).mkdir(parents=True, exist_ok=True)

    async def snapshot(self) -> str:
        async with self._turn:
            copied = await in_thread("sandbox", self.folder.copy)
        _SNAPSHOTS[str(copied.root)] = copied
        return str(copied.root)

    async def stop(self) -> None:
        async with self._turn:  # only the awaiting task cancels a running command
            await in_thread("sandbox", self.folder.remove)

    def abandon(self) -> None:
        self.folder.remove()

    async def watched(self, timeout: float, max_output: int) -> Watched:
        """Return a command's limits. A folder already above its size may not grow, but commands can still clean it up."""
        disk = self.spec.disk and max(self.spec.disk, await in_thread("sandbox", self.folder.size))
        return Watched(timeout, max_output, disk, self.folder.size)

    def host(self, path: str) -> str:
        """Return the path on this machine of a path in the sandbox. Raises SandboxError if the sandbox is stopped."""
        if not self.folder.remove.alive:
            raise SandboxError("the sandbox is stopped")
        return str(self.folder.root / self.spec.place(path).lstrip("/"))


class FolderProvider(SandboxProvider):
    """Base of the providers whose sandboxes are folders."""

    async def folder(self, spec: SandboxSpec, snapshot: str | None) -> Folder:
        """Make a folder with the spec's or a snapshot's files, and the working folder. Raises SandboxError if that fails."""

        def make() -> Folder:
            if snapshot is None:
                made = Folder()
                made.write({spec.place(path): content for path, content in spec.files.items()})
            elif snapshot in _SNAPSHOTS:
                made = _SNAPSHOTS[snapshot].copy()
            else:
                raise SandboxError(f"there is no snapshot {snapshot}")
            (made.root / spec.place("").lstrip("/")).mkdir(parents=True, exist_ok=True)
            return made

        try:
            return await in_thread("sandbox", make)
        except OSError as problem:
            raise SandboxError(f"no folder for a sandbox: {problem}") from problem

    def forget(self, snapshot: str) -> None:
        if folder := _SNAPSHOTS.pop(snapshot, None):
            folder.remove()


_SNAPSHOTS: dict[str, Folder] = {}


class LocalSandbox(FolderSandbox):
    """Run commands confined by the kernel (jail.py); processes that a command leaves behind are killed when it ends."""

    def __init__(self, spec: SandboxSpec, folder: Folder, isolate_files: bool, packages: bool = False) -> None:
        super().__init__(spec, folder)
        self._isolate_files, self._packages = isolate_files, packages

    def path(self, path: str) -> str:
        return self.host(path)

    async def execute(self, run: Run) -> ExecResult:
        if not self.spec.processes:
            raise ConfigError("processes = False: this sandbox runs Python code only. Set it to True for commands")
        work, home = self.host(run.cwd), self.host("")
        variables = {**own_variables(home), "TMPDIR": home, **run.env}
        job = {"argv": run.argv, "cwd": work, "env": variables, "stdin": run.stdin.decode("latin-1"), "parent": os.getpid()}
        ended = await self._run(job, run.timeout, run.max_output, run.merge)
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
            if not spec.processes:  # a single process: nothing in the sandbox counts its threads
                watched = replace(watched, pids=spec.pids, crowded=_many_threads)
            # -P keeps the script's own folder off the path, -S -s keep out site-packages; the environment is empty.
            argv = [sys.executable, "-P", "-S", "-s", "-B", "-X", "utf8", str(JAIL)]
            ended = await run_group(argv, json.dumps(job).encode(), watched, merge=merge)
        if not ended.status.startswith(b"+"):
            reason = ended.status[1:].decode(errors="replace") or (ended.stdout + ended.stderr).decode(errors="replace")[-500:]
            raise SandboxError(f"the local sandbox did not start ({ended.end}): {reason or 'no reason given'}")
        return ended


@SANDBOXES.register("local", traits={"alone"})
class LocalProvider(FolderProvider):
    """Run commands confined by the kernel, without programs, images or rights; needs Linux with seccomp, and Landlock (5.13)
    unless `isolate_files` is false. `packages`: make installed Python packages readable, also agentrl with the answers of its
    environments."""

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
        self.refuse(spec, image=need, build=need, cpus="the local provider cannot limit processors; leave it out")

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        require_kernel(self.isolate_files)
        return LocalSandbox(spec, await self.folder(spec, snapshot), self.isolate_files, self.packages)


@cache
def require_kernel(isolate_files: bool) -> None:
    """Raise ResourceError, naming the missing feature, if this machine's kernel does not support the sandbox."""
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


def own_variables(home: str) -> dict[str, str]:
    """Return a command's variables, without those of this process."""
    path = [str(Path(sys.base_prefix) / "bin"), "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"]
    return {"PATH": ":".join(path), "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@cache
def package_folders() -> frozenset[str]:
    """Return this machine's folders of installed Python packages that a command could read."""
    found = {sysconfig.get_paths()[name] for name in ("purelib", "platlib")}
    for prefix in ("/usr", "/usr/local", "/opt", "/opt/*", "/opt/*/envs/*", sys.base_prefix):
        for place in ("lib/python3*/*-packages", "lib64/python3*/*-packages"):
            found |= {str(path) for path in Path("/").glob(f"{prefix}/{place}".lstrip("/"))}
    return frozenset(str(Path(folder).resolve()) for folder in found if Path(folder).is_dir())


@cache
def without_packages(folders: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Split `folders` to leave out installed packages. Return the readable paths, and the folders above them whose names may be
    listed, as imports do (a Landlock right covers everything below a folder)."""
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
    """Return the folders of Python's standard library and of the shared libraries that its modules load."""
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], "/lib", "/lib64", "/usr/lib", "/usr/lib64"}
    folders |= {str(Path(sys.base_prefix) / "lib"), "/usr/share/zoneinfo", "/etc/ld.so.cache"}
    return sorted({str(Path(folder).resolve()) for folder in folders if Path(folder).exists()})
