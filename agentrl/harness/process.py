"""One agent's command as a group of processes that ends as a whole; see `agentrl.keeper`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl import keeper
from agentrl.harness.clean import after_a_cut, before_a_cut, text_of

log = logging.getLogger(__name__)

HEAD, TAIL = 16_384, 49_152
"""Bytes kept of the beginning and of the end of an output."""
_LONGEST_END = 30.0
"""Seconds; a busy machine may take them."""


class Output:
    """The beginning and the end of what a process writes."""

    def __init__(self, head: int = HEAD, tail: int = TAIL) -> None:
        self._most, self._tail_most = head, tail
        self._head, self._tail, self._seen = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        """The next bytes."""
        self._seen += len(data)
        room = max(self._most - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(len(self._tail) - self._tail_most, 0)]

    def text(self, key: str = "") -> str:
        """What was kept, with a line that says how much is missing; bytes that are not UTF-8 as U+FFFD. `key`: masked, also where
        the gap begins or ends inside it."""
        missing = self._seen - len(self._head) - len(self._tail)
        if not missing:
            return text_of(bytes(self._head + self._tail).decode(errors="replace"), key)
        head, tail = (text_of(bytes(part).decode(errors="replace"), key) for part in (self._head, self._tail))
        return f"{before_a_cut(head, key)}\n[{missing} bytes left out]\n{after_a_cut(tail, key)}"


class AgentProcess:
    """A started command. `stdout` and `stderr` grow while it runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.stdout, self.stderr = Output(), Output()
        assert process.stdout is not None and process.stderr is not None
        self._readers = [
            asyncio.create_task(_drain(process.stdout, self.stdout)),
            asyncio.create_task(_drain(process.stderr, self.stderr)),
        ]

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], folder: Path | None = None) -> AgentProcess:
        """Start `command` in `folder` with exactly the environment `env`. A command that does not exist ends with code 127
        and says so in `stderr`."""
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=dict(env), cwd=folder, start_new_session=True,  # away from the terminal's Ctrl-C: the run ends it
            )
        )  # fmt: skip
        try:
            return cls(await asyncio.shield(starting))
        except asyncio.CancelledError:
            # asyncio would kill the keeper, which may have started the command already and could not end it any more.
            await cls(await starting).end()
            raise

    async def wait(self) -> int:
        """Its exit code (128 + the number of a signal), once none of its processes is left and all output is read."""
        code = await self._process.wait()
        await asyncio.gather(*self._readers)
        return code

    async def end(self) -> None:
        """End it and all its processes; idempotent. Returns when none is left."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # tells the keeper, which is never killed while it still has something to end
        done = asyncio.ensure_future(self.wait())
        await asyncio.wait([done], timeout=_LONGEST_END)
        if not done.done():
            # Never killed: it goes on ending what is left, of which a process that is stuck in the kernel can be the reason.
            log.warning("an agent's processes did not end within %g s; keeper %d goes on", _LONGEST_END, self._process.pid)


async def _drain(stream: asyncio.StreamReader, output: Output) -> None:
    while data := await stream.read(65_536):
        output.add(data)
