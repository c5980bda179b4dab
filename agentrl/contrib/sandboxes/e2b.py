"""Sandboxes of E2B: small virtual machines elsewhere, through their SDK (the extra `e2b`, and the key in E2B_API_KEY)."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from agentrl.env.sandbox import (
    SANDBOXES,
    Command,
    ExecResult,
    FileInfo,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    missing,
    too_large,
)
from agentrl.utils.errors import DependencyError, SandboxError


class E2bSandbox(Sandbox):
    """Commands run as `user`; E2B has no merged stream, so a shell inside merges them."""

    def __init__(self, spec: SandboxSpec, remote: Any, user: str) -> None:
        super().__init__(spec)
        self._remote, self._user = remote, user
        self._turn = asyncio.Lock()

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
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        began = time.monotonic()
        async with self._turn, faults():
            line = f"{shlex.join(argv)} < {await self._input(stdin)}" + (" 2>&1" if merge else "")
            output = _Output(max_output)
            handle = await self._remote.commands.run(
                line,
                background=True,
                cwd=self.spec.place(cwd or ""),
                envs={**self.spec.env, **(env or {})},
                user=self._user,
                on_stdout=output.out,
                on_stderr=output.err,
                timeout=0,
                retain_output=False,
            )
            code, late = await self._wait(handle, timeout)
        seconds = time.monotonic() - began
        end: Any = "wall" if late else "ok" if code == 0 else "error"
        out, err = output.texts
        return ExecResult(-9 if late else code, out, err, seconds, end, output.cut)

    async def _wait(self, handle: Any, timeout: float) -> tuple[int, bool]:
        """Exit status, and whether it was killed for its time. A cancelled caller's command is killed too."""
        from e2b import CommandExitException

        try:
            async with asyncio.timeout(timeout):
                return (await handle.wait()).exit_code, False
        except CommandExitException as ended:
            return ended.exit_code, False
        except TimeoutError:
            await self._kill(handle)
            return -9, True
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(handle))
            raise

    async def _kill(self, handle: Any) -> None:
        await handle.kill()
        await handle.disconnect()

    async def _input(self, content: bytes) -> str:
        if not content:
            return "/dev/null"
        path = f"/tmp/.stdin-{uuid4().hex}"
        await self._remote.files.write(path, content, user=self._user)
        return path

    async def read(self, path: str, most: int = 1 << 26) -> bytes:
        from e2b import FileNotFoundException, FileType, InvalidArgumentException

        place = self.spec.place(path)
        async with faults():
            try:
                info = await self._remote.files.get_info(place, user=self._user)
                if info.type is not FileType.FILE:
                    raise missing(path)
                if info.size > most:
                    raise too_large(path, info.size, most)
                return bytes(await self._remote.files.read(place, format="bytes", user=self._user))
            except (FileNotFoundException, InvalidArgumentException):
                raise missing(path) from None

    async def write(self, files: Mapping[str, bytes]) -> None:
        from e2b import InvalidArgumentException

        entries = [{"path": self.spec.place(path), "data": content} for path, content in files.items()]
        async with faults():
            try:
                await self._remote.files.write_files(entries, user=self._user)
            except InvalidArgumentException as problem:
                raise FileExistsError(f"{', '.join(files)}: {problem}") from None

    async def entries(self, path: str = ".") -> list[FileInfo]:
        place = shlex.quote(self.spec.place(path))
        done = await self.exec(f"cd {place} 2>/dev/null && find . ! -type d -printf '%s %y %P\\n'", max_output=1 << 24)
        lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
        return sorted((FileInfo(name, int(size), kind == "f") for size, kind, name in lines), key=lambda info: info.path)

    async def remove(self, paths: Iterable[str]) -> None:
        removal = 'rm -rf -- "$@"; mkdir -p "$0"'
        await self.exec(["sh", "-c", removal, self.spec.place(""), *map(self.spec.place, paths)], cwd="/")

    async def kill(self) -> None:
        with suppress(SandboxError):
            await self.exec("kill -9 -1")

    async def snapshot(self) -> str:
        async with self._turn, faults():
            return str((await self._remote.create_snapshot()).snapshot_id)

    async def restore(self, snapshot: str) -> None:
        async with self._turn, faults():
            old, self._remote = self._remote, await _create_sandbox(self.spec, snapshot)
            await old.kill()

    async def stop(self) -> None:
        async with faults():
            await self._remote.kill()

    def abandon(self) -> None:
        import e2b

        with suppress(Exception):  # it ends by itself after `spec.seconds`
            e2b.Sandbox.kill(self._remote.sandbox_id)


@SANDBOXES.register("e2b", traits={"images", "lasting", "remote"})
class E2bProvider(SandboxProvider):
    """`image` is the name of a template; processors, memory and disk belong to the template."""

    name = "e2b"

    def __init__(self, *, user: str = "root") -> None:
        self._user = user

    def unavailable(self) -> str | None:
        if find_spec("e2b") is None:
            return "the package e2b is not installed (pip install 'agentrl[e2b]')"
        return None if os.environ.get("E2B_API_KEY") else "E2B_API_KEY is not set"

    def check(self, spec: SandboxSpec) -> None:
        belongs = "belongs to the template; build one that has it and name it as image"
        self.refuse(spec, build=belongs, memory=belongs, cpus=belongs, disk=belongs, file_size=belongs)
        self.refuse(spec, cpu_s="E2B does not limit a command's processor time; its timeout does")
        self.refuse(spec, processes="a virtual machine does not forbid processes; use the local provider")

    async def start(self, spec: SandboxSpec, snapshot: str | None = None) -> Sandbox:
        self.check(spec)
        if find_spec("e2b") is None:
            raise DependencyError("the sandbox provider e2b needs its SDK: pip install 'agentrl[e2b]'")
        async with faults():
            remote = await _create_sandbox(spec, snapshot or spec.image)
        made = E2bSandbox(spec, remote, self._user)
        try:
            # Also without files: the working folder must be there.
            await made.exec(["mkdir", "-p", spec.place("")], cwd="/")
            if spec.files and snapshot is None:
                await made.write(spec.files)
        except BaseException:
            await asyncio.shield(made.stop())
            raise
        return made

    def forget(self, snapshot: str) -> None:
        import e2b

        with suppress(Exception):
            e2b.Sandbox.delete_snapshot(snapshot)


class _Output:
    """Both streams, as far as they are kept."""

    def __init__(self, most: int) -> None:
        self._most, self._kept, self.cut = most, (bytearray(), bytearray()), 0

    def out(self, text: str) -> None:
        self._take(0, text)

    def err(self, text: str) -> None:
        self._take(1, text)

    def _take(self, stream: int, text: str) -> None:
        chunk = text.encode("utf-8", "replace")
        room = self._most - len(self._kept[stream])
        self._kept[stream].extend(chunk[:room])
        self.cut += max(0, len(chunk) - room)

    @property
    def texts(self) -> tuple[str, str]:
        out, err = (bytes(kept).decode("utf-8", "replace") for kept in self._kept)
        return out, err


async def _create_sandbox(spec: SandboxSpec, template: str | None) -> Any:
    from e2b import AsyncSandbox

    return await AsyncSandbox.create(
        template=template,
        timeout=int(spec.seconds),
        envs=dict(spec.env),
        allow_internet_access=spec.network == "all",
        metadata={"agentrl": str(os.getpid())},
    )


@asynccontextmanager
async def faults() -> AsyncIterator[None]:
    """Whatever the SDK raises beyond a command's own end is the service's fault."""
    try:
        yield
    except (SandboxError, FileNotFoundError, FileExistsError, ValueError):
        raise
    except Exception as problem:
        raise SandboxError(f"e2b: {type(problem).__name__}: {problem}") from problem
