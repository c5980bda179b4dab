"""Large files, written without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec

from agentrl.executors import in_thread

P = ParamSpec("P")


class Writes:
    """Writes in order, one at a time, in a thread. At most one is in progress, so the memory they hold is bounded.

    A write that fails raises at the next `begin`, `check` or `wait`, and only once.
    """

    def __init__(self) -> None:
        self._last: asyncio.Task[object] | None = None

    async def begin(self, write: Callable[P, object], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Start `write(*args, **kwargs)` after the previous one is done."""
        await self.wait()
        self._last = asyncio.create_task(in_thread("files", write, *args, **kwargs), name="write")

    async def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in progress."""
        if self._last is not None and self._last.done():
            await self.wait()

    async def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._last is not None:
            last = self._last
            try:
                # Shielded: cancelling the caller must not lose a file that is half written.
                await asyncio.shield(last)
            finally:
                if last.done():
                    self._last = None
