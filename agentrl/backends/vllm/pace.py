"""How far the requests of vLLM's replicas are, for deadlines that count only active time (`Engine.progress`).

In a replica, `Pace` looks at its requests ten times a second; the driver's `Paces` asks each replica twice a second, and
only while somebody wants to know. So seconds are right to a tenth, and what the driver knows is half a second old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from agentrl.rollout.engine import Underway

Told = dict[str, tuple[float, int]]
"""By request id: active seconds and sampled tokens."""

LOOK = 0.1
ASK = 0.5


class Pace:
    """A replica's side. A request is active from its first token on, but while the engine is paused."""

    def __init__(self, states: Callable[[], Iterable[Any]]) -> None:
        """`states`: vLLM's states of the requests that it has."""
        self._states, self._paused = states, False
        self._active: dict[str, float] = {}
        self._looked = time.monotonic()

    def pause(self, paused: bool) -> None:
        """The engine stops or goes on."""
        self.look()
        self._paused = paused

    def look(self) -> None:
        """Count the time since the last look."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        step = 0.0 if self._paused else passed
        for state in self._states():
            if not state.is_prefilling:
                name = state.external_req_id
                self._active[name] = self._active.get(name, -step) + step

    def told(self) -> Told:
        """Of every request that the replica has."""
        self.look()
        return {
            state.external_req_id: (self._active.get(state.external_req_id, 0.0), state.detokenizer.num_output_tokens())
            for state in self._states()
        }

    def over(self, request_id: str) -> float:
        """Active seconds of a request that has ended, whatever way; it is forgotten."""
        since = 0.0 if self._paused else time.monotonic() - self._looked
        return self._active.pop(request_id, 0.0) + since

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.look()


class Paces:
    """The driver's side. `ask` brings what all replicas tell."""

    def __init__(self, ask: Callable[[], Awaitable[list[Told]]]) -> None:
        self._ask = ask
        self._ids: dict[str, str] = {}
        self._told: Told = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, key: str, request_id: str) -> None:
        """Episode `key` makes a request."""
        self._ids[key] = request_id

    def end(self, key: str, request_id: str) -> None:
        """The request is over."""
        if self._ids.get(key) == request_id:
            del self._ids[key]
        self._told.pop(request_id, None)

    def of(self, key: str) -> Underway | None:
        """What is known of the episode's request; from now on it is asked for."""
        if key not in self._ids:
            return None
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow(), name="progress of vLLM requests")
        return Underway(*self._told.get(self._ids[key], (0.0, 0)))

    def close(self) -> None:
        """Ask no more; idempotent."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _follow(self) -> None:
        while self._ids:
            told: Told = {}
            for part in await self._ask():
                told |= part
            self._told = told
            await asyncio.sleep(ASK)
