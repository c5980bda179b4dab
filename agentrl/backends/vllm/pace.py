"""Progress of the requests in vLLM's replicas, for deadlines that count only active time (`Engine.progress`).

In a replica, `Pace` checks its requests ten times per second; the driver's `Paces` polls each replica twice per second, and
only while a caller asks for progress. So times are accurate to 0.1 s, and what the driver knows is up to 0.5 s old.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from agentrl.deadline import OwnedTasks
from agentrl.rollout.engine import Underway

Paced = dict[str, tuple[float, int]]
"""By request id: active seconds and sampled tokens."""

LOOK = 0.1
ASK = 0.5


class Pace:
    """The replica's side. A request is active from its first token on, except while the engine is paused."""

    def __init__(self, states: Callable[[], Iterable[Any]]) -> None:
        """`states`: vLLM's states of its current requests."""
        self._states, self._paused = states, False
        self._active: dict[str, float] = {}
        self._looked = time.monotonic()

    def pause(self, paused: bool) -> None:
        """The engine was paused, or resumed."""
        self.look()  # the time up to now belongs to the old state
        self._paused = paused

    def look(self) -> None:
        """Count the time since the last look."""
        now = time.monotonic()
        passed, self._looked = now - self._looked, now
        step = 0.0 if self._paused else passed
        for state in self._states():
            if not state.is_prefilling:
                name = state.external_req_id
                # -step: a request that is active for the first time starts at 0, not with the interval before its first token.
                self._active[name] = self._active.get(name, -step) + step

    def told(self) -> Paced:
        """Active seconds and sampled tokens of every request in the replica."""
        self.look()
        return {
            state.external_req_id: (self._active.get(state.external_req_id, 0.0), state.detokenizer.num_output_tokens())
            for state in self._states()
        }

    def over(self, request_id: str) -> float:
        """Active seconds of a request that has ended in any way; it is forgotten."""
        # vLLM has forgotten the request by now, so a look would miss its last interval.
        since = 0.0 if self._paused else time.monotonic() - self._looked
        return self._active.pop(request_id, 0.0) + since

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK)
            self.look()


class Paces:
    """The driver's side. `ask` returns what each replica reports."""

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

    def of(self, key: str) -> Underway | None:
        """What is known about the episode's request; polling starts with the first call."""
        if key not in self._ids:
            return None
        if not self._tasks:
            self._tasks.start(self._follow(), "progress of vLLM requests")
        return Underway(*self._told.get(self._ids[key], (0.0, 0)))

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
