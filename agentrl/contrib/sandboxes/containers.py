"""Docker and Podman containers as sandboxes, through the command-line clients.

A container lives as long as the client process that started it holds its input open: if this process dies for any reason,
the container's first process reads the end of its input and exits."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import io
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

from agentrl.cluster.machine import MACHINE_CHECKS, MachineFinding
from agentrl.contrib.sandboxes import bubblewrap
from agentrl.contrib.sandboxes.contract import (
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
from agentrl.contrib.sandboxes.local import WHAT_HELPS, LocalProvider
from agentrl.contrib.sandboxes.process_group import Ended, Watched, kill_group, run_group
from agentrl.contrib.sandboxes.sandbox_pool import preferred_provider
from agentrl.utils.errors import SandboxError
from agentrl.utils.threads import in_thread

MAIN = 'mkdir -p "$1" && echo ready && exec cat >/dev/null'
"""The container's first process. `cat` becomes process 1, which a policy's `kill -9 -1` does not reach."""
CONTROL_S = 120.0
"""Time limit of client calls other than the policy's commands, in seconds."""
DEFAULT_IMAGE = "debian:bookworm-slim"


class ContainerSandbox(Sandbox):
    """A container that runs commands by `exec`."""

    shell = "sh"

    def __init__(self, spec: SandboxSpec, provider: ContainerProvider) -> None:
        super().__init__(spec)
        self._provider = provider
        self._turn = asyncio.Lock()
        self._main: asyncio.subprocess.Process | None = None
        self.name = ""

    # -- start and stop ----------------------------------------------------------------------------

    async def begin(self, image: str) -> None:
        """Start the container. Raises SandboxError with the client's message."""
        self.name = f"agentrl-{os.getpid()}-{uuid4().hex[:12]}"
        argv = [*self._provider.run_command(self.spec, self.name), image, "-c", MAIN, "sh", self.spec.place("")]
        try:
            self._main = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as problem:
            raise SandboxError(f"{argv[0]} does not start: {problem}") from problem
        assert self._main.stdout is not None and self._main.stderr is not None
        try:
            async with asyncio.timeout(self._provider.start_s):
                line = await self._main.stdout.readline()
                if line.strip() != b"ready":
                    said = (line + await self._main.stderr.read()).decode(errors="replace").strip()
                    raise SandboxError(f"{self._provider.name} does not start {image}: {said[-400:]}")
        except TimeoutError:
            await self.stop()
            raise SandboxError(f"{self._provider.name} did not start {image} within {self._provider.start_s:g} s") from None
        except BaseException:
            await asyncio.shield(self.stop())
            raise

    async def stop(self) -> None:
        name, main = self.name, self._main
        self.name, self._main = "", None
        if main is None:
            return
        if name:
            with suppress(SandboxError):
                await self._provider.control(["rm", "-f", "-v", name])
        kill_group(main.pid)
        assert main.stdin is not None
        main.stdin.close()
        await main.wait()

    def abandon(self) -> None:
        if self.name:
            self._provider.later(["rm", "-f", "-v", self.name])

    async def snapshot(self) -> str:
        async with self._turn:
            done = await self._control(["commit", self.name, f"agentrl-snapshot:{uuid4().hex}"])
        return done.stdout.decode().split()[-1]  # podman prints its steps before the ID

    # -- commands ----------------------------------------------------------------------------------

    async def execute(self, run: Run) -> ExecResult:
        variables = [part for pair in run.env.items() for part in ("-e", "=".join(pair))]
        async with self._turn:
            self._alive()
            # The shell inside merges the streams: messages of the client must not mix with the command's output.
            inner = ["sh", "-c", 'exec "$@" 2>&1', "sh", *run.argv] if run.merge else run.argv
            ended: Ended | None = None
            try:
                started = [*self._provider.client, "exec", "-i", *variables, "-w", run.cwd, self.name, *inner]
                watched = Watched(run.timeout, run.max_output)
                ended = await run_group(started, run.stdin, watched, env=dict(os.environ), merge=False, status=None)
            finally:
                # The end of the client does not end the command: kill a command that was cut off in the container.
                if ended is None or ended.end in ("wall", "output"):
                    await asyncio.shield(self.kill())
        if ended.code != 0:
            self._alive()
        return ended.result("killed" if ended.end == "cpu" else None)

    async def kill(self) -> None:
        with suppress(SandboxError):
            await self._provider.control(["exec", self.name, "sh", "-c", "kill -9 -1"])

    def _alive(self) -> None:
        if self._main is None or self._main.returncode is not None:
            raise SandboxError(f"the container {self.name or '(stopped)'} of {self._provider.name} is gone")

    async def _control(self, argv: Sequence[str], stdin: bytes = b"", most: int = 1 << 20) -> Ended:
        """Run the client and return its answer. Raises SandboxError if the container is gone or the client fails."""
        self._alive()
        return await self._provider.control(argv, stdin, most)

    # -- files -------------------------------------------------------------------------------------

    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        place = self.spec.place(path)
        async with self._turn:
            try:
                done = await self._control(["cp", f"{self.name}:{place}", "-"], most=most + (1 << 16))
            except SandboxError:
                self._alive()
                raise missing(path) from None
        if done.cut:
            raise too_large(path, len(done.stdout) + done.cut, most)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            first = archive.next()
            file = archive.extractfile(first) if first is not None and first.isfile() else None
            if file is None:
                raise missing(path)
            content = file.read()
        if len(content) > most:
            raise too_large(path, len(content), most)
        return content

    async def write(self, files: Mapping[str, bytes]) -> None:
        packed = await in_thread("sandbox", packed_files, {self.spec.place(path): body for path, body in files.items()})
        async with self._turn:
            try:
                await self._control(["cp", "-", f"{self.name}:/"], stdin=packed)
            except SandboxError as problem:
                self._alive()
                raise FileExistsError(f"{', '.join(files)}: {problem}") from None

    async def entries(self, path: str = ".") -> list[FileInfo]:
        place = self.spec.place(path)
        listing = f"cd {shlex.quote(place)} 2>/dev/null && find . ! -type d -exec stat -c '%s %f %n' {{}} +"
        done = await self.exec(listing, max_output=1 << 24)
        found = []
        for line in done.stdout.splitlines():
            size, mode, name = line.split(" ", 2)
            found.append(FileInfo(name.removeprefix("./"), int(size), int(mode, 16) & 0o170000 == 0o100000))
        return sorted(found, key=lambda info: info.path)

    async def remove(self, paths: Iterable[str]) -> None:
        removal = 'rm -rf -- "$@"; mkdir -p "$0"'
        await self.exec(["sh", "-c", removal, self.spec.place(""), *map(self.spec.place, paths)], cwd="/")


class ContainerProvider(SandboxProvider):
    """`command`: the client with its global flags; `run`: extra flags of its `run`; `start_s`: seconds to start, which may
    include the download of an image; `build_s`: seconds to build an image."""

    program: str

    def __init__(
        self, *, command: list[str] | None = None, run: list[str] | None = None, start_s: float = 600.0, build_s: float = 1800.0
    ) -> None:
        self.client = command or [self.program]
        self._flags = run or []
        self.start_s, self._build_s = start_s, build_s
        self._builds: dict[str, asyncio.Lock] = {}

    def unavailable(self) -> str | None:
        return _answer(tuple(self.client))

    def check(self, spec: SandboxSpec) -> None:
        self.refuse(spec, processes="a container does not forbid processes; use the local provider")
        self.refuse(spec, disk="containers cannot limit the total size of files; leave it out")

    def run_command(self, spec: SandboxSpec, name: str) -> list[str]:
        flags = ["run", "--rm", "-i", "--name", name, "--label", f"agentrl={os.getpid()}", "--entrypoint", "sh"]
        flags += ["--network", "none"] if spec.network == "none" else []
        flags += ["--stop-timeout", "0"]  # as process 1, `cat` ignores SIGTERM
        flags += ["--pids-limit", str(spec.pids), "--security-opt", "no-new-privileges"]
        flags += ["--memory", str(spec.memory)] if spec.memory is not None else []
        flags += ["--cpus", str(spec.cpus)] if spec.cpus is not None else []
        flags += ["--ulimit", f"cpu={spec.cpu_s}:{spec.cpu_s + 1}"] if spec.cpu_s is not None else []
        flags += ["--ulimit", f"fsize={spec.file_size}:{spec.file_size}"] if spec.file_size is not None else []
        return [*self.client, *flags, *self._flags]

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        image = snapshot or (await self._built(spec.build) if spec.build is not None else spec.image or DEFAULT_IMAGE)
        made = ContainerSandbox(spec, self)
        await made.begin(image)
        try:
            if spec.files and snapshot is None:
                await made.write(spec.files)
        except BaseException as fault:
            await asyncio.shield(made.stop())
            if isinstance(fault, FileExistsError):
                raise SandboxError(f"{self.name}: its files cannot be written: {fault}") from fault
            raise
        return made

    def forget(self, snapshot: str) -> None:
        self.later(["rmi", "-f", snapshot])

    async def control(self, argv: Sequence[str], stdin: bytes = b"", most: int = 1 << 20, seconds: float = CONTROL_S) -> Ended:
        """Run the client and return its answer. Raises SandboxError if it fails."""
        ended = await run_group(
            [*self.client, *argv], stdin, Watched(seconds, most), env=dict(os.environ), merge=False, status=None
        )
        if ended.code != 0 and ended.end != "output":
            said = ended.stderr.decode(errors="replace").strip()[-400:]
            raise SandboxError(f"{self.name} {argv[0]}: {said or ended.end}")
        return ended

    def later(self, argv: Sequence[str]) -> None:
        """Start the client without waiting for it, for shutdown without an event loop."""
        with suppress(OSError):
            subprocess.Popen(
                [*self.client, *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    async def _built(self, folder: Path) -> str:
        """Return the image of a folder with a Dockerfile, built once per content."""
        tag = f"agentrl-build:{await in_thread('sandbox', _digest, folder)}"
        async with self._builds.setdefault(tag, asyncio.Lock()):
            try:
                await self.control(["image", "inspect", tag])
            except SandboxError:
                await self.control(["build", "-q", "-t", tag, str(folder)], seconds=self._build_s)
        return tag


@SANDBOXES.register("docker", traits={"images", "lasting"})
class DockerProvider(ContainerProvider):
    """Run commands in Docker containers; needs `docker` and a running daemon."""

    name = program = "docker"


@SANDBOXES.register("podman", traits={"images", "lasting"})
class PodmanProvider(ContainerProvider):
    """Run commands in Podman containers; needs `podman`, but no daemon."""

    name = program = "podman"


def packed_files(files: Mapping[str, bytes]) -> bytes:
    """Pack files (absolute path -> content) into a tar archive; files that start with `#!` are executable."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_mode & 0o111}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


@cache
def _answer(client: tuple[str, ...]) -> str | None:
    if shutil.which(client[0]) is None:
        return f"the program {client[0]} is not installed"
    try:
        done = subprocess.run([*client, "info"], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return f"{client[0]} info does not answer within 30 s"
    said = (done.stderr or done.stdout).strip().splitlines()
    # Docker's client reports a failing daemon on standard error, but may still exit with 0.
    trouble = [line for line in said if "cannot connect" in line.lower() or "error" in line.lower()[:8]]
    return None if done.returncode == 0 and not trouble else f"{client[0]}: {(trouble or said or ['no answer'])[0][:200]}"


LACKS = {
    2: "files cannot be moved between folders",
    3: "truncate by path is refused",
    4: "TCP is forbidden by the system-call filter alone",
    6: "a command's processes cannot signal each other",
}
"""Landlock version -> the restriction of the local sandbox on older versions (docs/sandboxes.md)."""


@MACHINE_CHECKS.register("sandbox")
def check_sandbox() -> Iterator[MachineFinding]:
    """Report the sandboxes that work on this machine. Environments refuse one that keeps less than docs/sandboxes.md
    promises."""
    version = 0
    if sys.platform.startswith("linux"):
        version = max(int(ctypes.CDLL(None).syscall(444, None, 0, 1)), 0)  # landlock_create_ruleset, version query
    no_local, no_bubblewrap = LocalProvider().unavailable(), bubblewrap.unavailable()
    lacks = "; ".join(what for since, what in LACKS.items() if version < since)
    local = "local is refused" if no_local else f"local works{f' ({lacks})' if lacks else ''}"
    inside = f"no bubblewrap: {no_bubblewrap}" if no_bubblewrap else f"bubblewrap works (namespaces: {NAMESPACES})"
    said = f"Linux {platform.release()}, {f'Landlock {version}' if version else 'no Landlock'}; {local}; {inside}"
    if no_local and no_bubblewrap:
        yield MachineFinding("sandbox", "warn", said, f"environments that run code are refused: {WHAT_HELPS}")
    else:
        yield MachineFinding("sandbox", "ok", f"{said}; {preferred_provider()} is chosen")


NAMESPACES = "user, mount, pid, ipc, net, uts, cgroup"
