"""Progress of the requests in vLLM's replicas (`Engine.progress`): the driver polls each twice per second, while it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from agentrl.deadline import OwnedTasks

Paced = dict[str, int]
"""Sampled tokens, by request id."""

ASK = 0.5
"""Seconds between two polls."""


class Paces:
    """Tokens of the running requests, by episode. `ask` returns what each replica reports."""

    def __init__(self, ask: Callable[[], Awaitable[list[Paced]]]) -> None:
        self._ask = ask
        self._ids: dict[str, str] = {}
        self._told: Paced = {}
        self._tasks = OwnedTasks()

    def begin(self, key: str, request_id: str) -> None:
        """Episode `key` starts a request."""
        self._ids[key] = request_id

    def end(self, key: str, request_id: str) -> None:
        """The request is over."""
        # The episode may have begun its next request, which must not lose its progress to the end of the old one.
        if self._ids.get(key) == request_id:
            del self._ids[key]
        self._told.pop(request_id, None)

    def of(self, key: str) -> int | None:
        """What is known about the episode's request; polling starts with the first call."""
        if key not in self._ids:
            return None
        if not self._tasks:
            self._tasks.start(self._follow(), "progress of vLLM requests")
        return self._told.get(self._ids[key], 0)

    async def close(self) -> None:
        """Stop polling; idempotent."""
        await self._tasks.close()

    async def _follow(self) -> None:
        # Ends with the last request, so that an idle engine is not polled; `of` begins again.
        while self._ids:
            told: Paced = {}
            for part in await self._ask():
                told |= part
            # Replaced, not merged: what a dead replica reported must not stay as if its requests went on.
            self._told = told
            await asyncio.sleep(ASK)
