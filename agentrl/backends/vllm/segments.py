"""A request as several, on a vLLM that does not say which weights sampled which token.

Before weights change, every request is ended and keeps what it has sampled; afterwards it goes on as another request whose prompt
ends with those tokens. So nothing that vLLM answers spans two versions, and each token has the version of its segment. What is
computed again, the prefix, a vLLM with spans computes again too, since no cache outlives an update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.rollout.engine import Finish, Generation, Sampling

RETRY_S = 0.01
"""Between two attempts to end what is on its way into the engine."""


@dataclass(slots=True)
class SegmentedRequest:
    """What a request has sampled in its segments so far; `stopped` is set once its caller wants no more."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: npt.NDArray[Any] | None = None
    segments: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def rest(self, sampling: Sampling) -> Sampling:
        """The sampling of its next segment. The seed is another one in each: drawn with the same numbers as the first, its tokens
        would depend on the earlier ones in a way that the policy does not have."""
        seed = sampling.seed
        # The first segment keeps the caller's seed: without an update in between, the tokens are those of an uncut request.
        if seed is not None and self.segments:
            # SeedSequence takes no negative numbers, and what comes out has to fit a signed 64-bit integer.
            seed = int(np.random.SeedSequence((seed % 2**63, self.segments)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return replace(sampling, max_tokens=sampling.max_tokens - len(self.token_ids), seed=seed)

    def add(self, part: Generation) -> None:
        """A segment is over."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.experts = part.experts  # only a vLLM that needs no segments tells them
        self.segments += 1

    def over(self, finish: Finish) -> Generation:
        """All segments together."""
        return Generation(self.token_ids, self.logprobs, self.versions, finish, experts=self.experts)


class Segments:
    """The gate in front of vLLM: closed while weights change. `abort` ends requests, which then return what they sampled."""

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        self._abort = abort
        self._open = asyncio.Event()
        self._open.set()
        self._inside: set[str] = set()
        self._cut: set[str] = set()

    async def enter(self, request_id: str, request: SegmentedRequest) -> bool:
        """Wait until the gate is open; False if the request was stopped meanwhile. `leave` must follow."""
        # A loop: before this task gets its turn, the gate that opened may have closed again for the next weights.
        while not self._open.is_set() and not request.stopped.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._open, request.stopped)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if request.stopped.is_set():
            return False
        self._inside.add(request_id)  # at once: a request that `close` does not see here must not get in
        return True

    def leave(self, request_id: str) -> bool:
        """vLLM has answered. Whether that was because the gate closed, so that the request goes on when it opens."""
        self._inside.discard(request_id)
        cut = request_id in self._cut
        self._cut.discard(request_id)
        return cut

    async def close(self) -> None:
        """Let nothing in, and end all that is inside; returns when all of it has left."""
        # First, so that nobody enters while the loop waits, which then ends.
        self._open.clear()
        while self._inside:
            # Before the abort: an answer may come while it is awaited, and would pass for the request's own end.
            self._cut |= self._inside
            await self._abort(sorted(self._inside))
            # Again, because vLLM ignores an abort of what has entered here and not yet reached it.
            await asyncio.sleep(RETRY_S)

    def open(self) -> None:
        self._open.set()
