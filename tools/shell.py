"""Shell commands in a separate sandbox per episode, and the tools of `files` on its folder (agentrl/contrib/sandboxes)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from agentrl.contrib.sandboxes.contract import ExecResult, SandboxSpec
from agentrl.contrib.sandboxes.sandbox_pool import HeldSandbox, require, sandbox_config
from agentrl.data.trajectory import Json
from agentrl.env import tool
from agentrl.utils.errors import ResourceError, ToolError

from .files import Files

_OUTPUT = 1 << 14  # bytes
_ENDS = {
    "wall": "stopped: not done after {seconds:g} s",
    "cpu": "stopped: too much processor time",
    "disk": "stopped: more files than fit",
    "output": "stopped: too much output",
    "processes": "stopped: too many processes",
    "killed": "stopped by signal {signal}",
}


class Shell(Files):
    """Files in a sandbox, which starts at the first call that needs it."""

    name = "shell"

    def __init__(
        self,
        *,
        folder: str | None = None,
        file_bytes: Annotated[int, Field(ge=1)] = 1 << 20,
        total_bytes: Annotated[int, Field(ge=1)] = 8 << 20,
        most: Annotated[int, Field(ge=1)] = 1000,
        seconds: Annotated[float, Field(gt=0, le=300)] = 20.0,
        memory_mb: Annotated[int, Field(ge=64)] = 512,
        sandbox: dict[str, Any] | None = None,
    ) -> None:
        """As `files`; limits of a command: `seconds` of wall-clock time, `memory_mb`. `sandbox`: as `[env.sandbox]`;
        in containers, commands may exceed `total_bytes`. Raises ConfigError for an unsuitable sandbox, ResourceError if this
        machine does not have it."""
        super().__init__(folder=folder, file_bytes=file_bytes, total_bytes=total_bytes, most=most)
        self.seconds, config = seconds, sandbox_config(sandbox)
        try:
            require(config)
        except ResourceError as reason:
            raise ResourceError(f"tool set {self.name!r}: no command can be run here: {reason}") from None
        spec = SandboxSpec(files=self.files, memory=memory_mb << 20, file_size=file_bytes)
        self.held = HeldSandbox(config, spec, disk=total_bytes)

    async def close(self) -> None:
        await self.held.stop()

    @property
    def queued(self) -> str:
        return self.held.queued

    def state(self) -> Json:
        """Return no state, since only awaited calls can read the files in the sandbox."""
        return None

    # -- storage -------------------------------------------------------------------------------------

    async def load(self, path: str) -> bytes:
        try:
            return await self.held.use(lambda box: box.read(path, self.file_bytes), changes=False)
        except FileNotFoundError:
            raise ToolError(f"no file {path!r}") from None
        except ValueError as problem:
            raise ToolError(str(problem)) from None

    async def store(self, path: str, content: bytes) -> None:
        there = await self.paths()
        if problem := self.over([len(content), *(size for name, size in there.items() if name != path)]):
            raise ToolError(f"{path!r} is not written: {problem}")
        try:
            await self.held.use(lambda box: box.write({path: content}))
        except FileExistsError:
            raise ToolError(f"{path!r}: something that is no file is in the way") from None

    async def paths(self) -> dict[str, int]:
        entries = await self.held.use(lambda box: box.entries("."), changes=False)
        return {entry.path: entry.size for entry in entries if entry.regular}

    async def drop(self, path: str) -> None:
        if path not in await self.paths():
            raise ToolError(f"no file {path!r}")
        await self.held.use(lambda box: box.remove([path]))

    # The sandbox enforces the time limit of commands; the tool's timeout only covers a hanging machine.
    @tool(timeout=600, parallel=False, concurrency=8)
    async def run_command(self, command: Annotated[str, Field(min_length=1, max_length=4000)]) -> str:
        """Run a shell command in the folder; returns what it prints, errors too, and its exit status if that is not 0.

        Args:
            command: for sh, such as grep -c error log.txt
        """
        if "\0" in command:
            raise ToolError("a command has no zero bytes")
        done = await self.held.use(lambda box: box.exec(command, timeout=self.seconds, max_output=_OUTPUT, merge=True))
        said = done.stdout + (f"\n[cut: {done.cut} bytes]" if done.cut else "")
        return "\n".join(part for part in (said.rstrip("\n"), _end(done, self.seconds)) if part) or "(no output)"


def _end(done: ExecResult, seconds: float) -> str:
    if done.end in _ENDS:
        return _ENDS[done.end].format(seconds=seconds, signal=-done.code)
    return f"[exit status {done.code}]" if done.code else ""
