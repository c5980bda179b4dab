"""Requests to a vLLM replica, many per call.

Each call of a Ray actor costs about a millisecond, half of it processor time on either side, and the requests of
a rollout come in waves: 64 of them as separate calls took 100 ms in which the engine had little to do. So requests
made in one iteration of the event loop are sent together, and answers that are ready together come back together.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayError

from agentrl.deadline import OwnedTasks
from agentrl.errors import EngineError
from agentrl.rollout.engine import Generation, Sampling, Told

log = logging.getLogger(__name__)

CLOSED = "the engine was closed"
Request = tuple[list[int], Sampling, str, str]
"""Token ids, sampling, request key, request id: the arguments of `VllmActor.generate`."""


@dataclass(frozen=True, slots=True)
class FreshTokens:
    """Tokens of a request that goes on, with their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


Answers = list[tuple[int, Generation | EngineError | FreshTokens]]
"""Results of some requests of a call, by their index in it; before them parts, of those that are told meanwhile."""


class RequestBatcher:
    """Send requests from the driver to one replica, and own the calls until `close`.

    Ray exits the process, without an error, if a call is still awaited after `ray.shutdown`."""

    def __init__(self, actor: Any) -> None:
        """`actor`: a handle whose `generate_many` is `answered` applied to its `generate`."""
        self._actor = actor
        self._waiting: list[tuple[Request, asyncio.Future[Generation], Told | None]] = []
        self._tasks = OwnedTasks()
        self._closed = False

    async def generate(self, request: Request, told: Told | None = None) -> Generation:
        """`told`: gets the tokens as they are sampled. Raises the request's EngineError, or the RayError of the call."""
        if self._closed:
            raise EngineError(CLOSED)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer, told))
        if len(self._waiting) == 1:
            self._tasks.start(self._send(), "requests to a vLLM replica")
        return await answer

    def cancel(self, request_id: str) -> None:
        """Tell the replica that the caller of a request is gone."""
        if not self._closed:
            self._tasks.start(self._cancel(request_id), "cancel of a request to a vLLM replica")

    async def _cancel(self, request_id: str) -> None:
        try:
            await self._actor.cancel.remote(request_id)
        except RayActorError:
            pass  # dead: the request is gone too
        except RayError as problem:
            log.warning("a replica could not cancel request %s: %s", request_id, problem)

    async def close(self) -> None:
        """End every call, also one whose requests have all been answered, and fail waiting requests; idempotent."""
        self._closed = True
        await self._tasks.close()
        for _, answer, _ in self._waiting:  # of a call that had not begun
            _resolve(answer, EngineError(CLOSED))
        self._waiting = []

    async def _send(self) -> None:
        """Runs in the next iteration of the loop, after all callers of the current one have added their requests."""
        batch, self._waiting = self._waiting, []
        alive = [one for one in batch if not one[1].done()]
        if not alive:
            return
        answers = [answer for _, answer, _ in alive]
        problem: Exception = EngineError(CLOSED)
        try:
            requests, live = [request for request, _, _ in alive], [told is not None for _, _, told in alive]
            async for part in self._actor.generate_many.options(num_returns="streaming").remote(requests, live):
                for index, result in await part:
                    told = alive[index][2]
                    if not isinstance(result, FreshTokens):
                        _resolve(answers[index], result)
                    elif told is not None and not answers[index].done():
                        told(result.token_ids, result.logprobs)
            problem = EngineError("the replica stopped before all requests were answered")
        except Exception as failure:  # of any kind: a caller who is not told waits forever
            problem = failure
        finally:
            # Also after success: a request that the replica left out must fail rather than hang.
            for answer in answers:
                _resolve(answer, problem)


def _resolve(answer: asyncio.Future[Generation], result: Generation | Exception) -> None:
    if answer.done():  # answered, or its caller has gone
        return
    if isinstance(result, Generation):
        answer.set_result(result)
    else:
        answer.set_exception(result)


async def answered(
    generate: Callable[..., Awaitable[Generation]], requests: Sequence[Request], live: Sequence[bool]
) -> AsyncIterator[Answers]:
    """The actor's side: start all requests, and yield their results as they end; of those that are `live` parts before."""
    ready: Answers = []
    wake = asyncio.Event()

    async def one(index: int, request: Request) -> None:
        def told(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            ready.append((index, FreshTokens(list(token_ids), list(logprobs))))
            wake.set()

        result: Generation | EngineError
        try:
            result = await generate(*request, *([told] if live[index] else []))
        except EngineError as problem:  # an error of one request must not cancel the others of the task group
            result = problem
        ready.append((index, result))
        wake.set()

    # No task group: closed before its end, a stream would raise one's error group in place of GeneratorExit.
    running = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
    for task in running:
        task.add_done_callback(lambda _: wake.set())
    try:
        left = len(requests)
        while left:
            await wake.wait()
            await asyncio.sleep(0)  # requests that end in the same engine step are sent together
            wake.clear()
            for task in running:
                if task.done():
                    task.result()  # an error that nobody foresaw ends the stream
            part, ready[:] = list(ready), []
            left -= sum(not isinstance(result, FreshTokens) for _, result in part)
            if part:
                yield part
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
