"""Calls to a vLLM replica: batched requests, their progress, and this process's replica as an engine."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayError

from agentrl.engines.token_text import check_request
from agentrl.rollout.engine import Engine, EngineConnection, EngineStats, Generation, OnTokens, Sampling, StreamingEngine
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import OwnedTasks, cancel_all

# Batches of requests

log = logging.getLogger(__name__)

CLOSED = "the engine was closed"
Request = tuple[list[int], Sampling, str, str]
"""Token ids, sampling, request key, request id: the arguments of `VllmActor.generate`."""


@dataclass(frozen=True, slots=True)
class FreshTokens:
    """New tokens of a running request, with their log probabilities."""

    token_ids: list[int]
    logprobs: list[float]


Answers = list[tuple[int, Generation | EngineError | FreshTokens]]
"""(index of a request in its call, its result or new tokens before it)."""


class RequestBatcher:
    """Sends the driver's requests to one replica, and owns the calls until `close`.

    Ray exits the process, without an error, if a call is still awaited after `ray.shutdown`."""

    def __init__(self, actor: Any) -> None:
        """`actor`: a handle whose `generate_many` applies `answer_batches` to its `generate`."""
        self._actor = actor
        self._waiting: list[tuple[Request, asyncio.Future[Generation], OnTokens | None]] = []
        self._tasks = OwnedTasks()
        self._closed = False

    async def generate(self, request: Request, emit: OnTokens | None = None) -> Generation:
        """Sample a turn. `emit` receives the tokens as they are sampled. Raises the request's EngineError, or RayError."""
        if self._closed:
            raise EngineError(CLOSED)
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer, emit))
        if len(self._waiting) == 1:
            self._tasks.start(self._send(), "requests to a vLLM replica")
        return await answer

    def cancel(self, request_id: str) -> None:
        """Cancel a request in the replica."""

        async def tell() -> None:
            try:
                await self._actor.cancel.remote(request_id)
            except RayActorError:
                pass  # the replica is dead, and the request with it
            except RayError as problem:
                log.warning("a replica could not cancel request %s: %s", request_id, problem)

        if not self._closed:
            self._tasks.start(tell(), "cancel of a request to a vLLM replica")

    async def close(self) -> None:
        """End every call, even if all its requests are answered, and fail waiting requests; idempotent."""
        self._closed = True
        await self._tasks.close()
        for _, answer, _ in self._waiting:  # requests of a call that has not begun
            _resolve(answer, EngineError(CLOSED))
        self._waiting = []

    async def _send(self) -> None:
        """Send the waiting requests; runs one loop iteration later, after all current callers have added theirs."""
        batch, self._waiting = self._waiting, []
        alive = [one for one in batch if not one[1].done()]
        if not alive:
            return
        answers = [answer for _, answer, _ in alive]
        problem: Exception = EngineError(CLOSED)
        try:
            requests, live = [request for request, _, _ in alive], [emit is not None for _, _, emit in alive]
            async for part in self._actor.generate_many.options(num_returns="streaming").remote(requests, live):
                for index, result in await part:
                    emit = alive[index][2]
                    if not isinstance(result, FreshTokens):
                        _resolve(answers[index], result)
                    elif emit is not None and not answers[index].done():
                        emit(result.token_ids, result.logprobs)
            problem = EngineError("the replica stopped before all requests were answered")
        except Exception as failure:  # of any kind: a caller without an answer waits forever
            problem = failure
        finally:
            # Also after success: a request that the replica left out must fail rather than hang.
            for answer in answers:
                _resolve(answer, problem)


def _resolve(answer: asyncio.Future[Generation], result: Generation | Exception) -> None:
    if answer.done():  # answered or cancelled
        return
    if isinstance(result, Generation):
        answer.set_result(result)
    else:
        answer.set_exception(result)


async def answer_batches(
    generate: Callable[..., Awaitable[Generation]], requests: Sequence[Request], live: Sequence[bool]
) -> AsyncIterator[Answers]:
    """Start all requests in the actor and yield results as they end, and new tokens of the `live` ones."""
    ready: Answers = []
    wake = asyncio.Event()

    async def one(index: int, request: Request) -> None:
        def tell(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            ready.append((index, FreshTokens(list(token_ids), list(logprobs))))
            wake.set()

        result: Generation | EngineError
        try:
            result = await generate(*request, *([tell] if live[index] else []))
        except EngineError as problem:  # an error of one request must not cancel the others of the task group
            result = problem
        ready.append((index, result))
        wake.set()

    # No task group: a stream closed early would raise its error group in place of GeneratorExit.
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
                    task.result()  # an unexpected error ends the stream
            part, ready[:] = list(ready), []
            left -= sum(not isinstance(result, FreshTokens) for _, result in part)
            if part:
                yield part
    finally:
        await cancel_all(running)


# This process's replica as an engine

TokenCounts = dict[str, int]
"""Request id -> number of sampled tokens."""

COUNTS_S = 0.1
"""Seconds for which the progress of all requests is cached."""

LOCAL_ACTOR: list[Any] = []
"""This process's VllmActor, once started."""


class ReplicaDeadError(EngineError):
    """The replica's engine is dead; another replica may serve the request."""


@dataclass(frozen=True, slots=True)
class InReplica(EngineConnection):
    """Connection from inside of a replica's process to that replica."""

    vocab: int

    def connect(self) -> Engine:
        if not LOCAL_ACTOR:
            raise EngineError("this process is not a vLLM replica")
        return LocalEngine(LOCAL_ACTOR[0], self.vocab)


class LocalEngine(StreamingEngine):
    """This process's replica as an engine, for a worker inside of it. If the engine dies, its episodes block until the worker
    ends with the replica; they are replayed on another one."""

    def __init__(self, actor: Any, vocab: int) -> None:
        """`actor`: a started VllmActor."""
        self._actor, self._vocab = actor, vocab
        self._numbers = itertools.count()
        self._ids: dict[str, str] = {}
        self._counts: TokenCounts = {}
        self._counted_at = -COUNTS_S

    async def start(self) -> None:
        """Do nothing: the replica has started."""

    def refusal(self, sampling: Sampling) -> str:
        return str(self._actor.words.refusal(sampling))

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, emit: OnTokens | None) -> Generation:
        check_request(token_ids, sampling, self._actor.context, self._vocab)
        if self._actor.unfit:
            raise EngineError(f"no generation until a publish succeeds: {self._actor.unfit}")
        request_id = f"{request_key}@{next(self._numbers)}"
        self._ids[request_key] = request_id
        try:
            answer: Generation = await self._actor.generate(token_ids, sampling, request_key, request_id, emit)
            return answer
        except ReplicaDeadError as problem:
            self._actor.note_death(str(problem))
            # Block: any answer or error would continue or fail the episode, which is to be replayed.
            await asyncio.Event().wait()
            raise
        finally:
            # The episode may already have a newer request, whose id must stay.
            if self._ids.get(request_key) == request_id:
                del self._ids[request_key]

    def progress(self, request_key: str) -> int | None:
        request_id = self._ids.get(request_key)
        if request_id is None:
            return None
        if (now := time.monotonic()) - self._counted_at >= COUNTS_S:  # `progress` visits all requests
            self._counted_at, self._counts = now, self._actor.progress()
        return self._counts.get(request_id, 0)

    async def abort(self, request_key: str) -> None:
        await self._actor.abort(request_key)

    async def stats(self) -> EngineStats:
        found: EngineStats = await self._actor.stats()
        return found

    async def close(self) -> None:
        """Do nothing: the replica keeps running."""
