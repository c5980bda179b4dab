"""Calls of a vLLM replica: many requests per call, their progress, and the replica of this process as an engine."""

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
from agentrl.rollout.engine import Engine, EngineConnection, EngineStats, Generation, Sampling, StreamingEngine, Told
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import OwnedTasks

# Batches of requests

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
"""Results of some requests of a call, by their index in it; before them parts, of those that are reported meanwhile."""


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

        async def tell() -> None:
            try:
                await self._actor.cancel.remote(request_id)
            except RayActorError:
                pass  # dead: the request is gone too
            except RayError as problem:
                log.warning("a replica could not cancel request %s: %s", request_id, problem)

        if not self._closed:
            self._tasks.start(tell(), "cancel of a request to a vLLM replica")

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


async def answer_batches(
    generate: Callable[..., Awaitable[Generation]], requests: Sequence[Request], live: Sequence[bool]
) -> AsyncIterator[Answers]:
    """The actor's side: start all requests, and yield their results as they end; of those that are `live` parts before."""
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


# The replica of this process

Paced = dict[str, int]
"""Sampled tokens, by request id."""

LOOK = 0.1
"""Seconds for which figures of all requests are used again."""

HERE: list[Any] = []
"""The VllmActor of this process, once it has started."""


class ReplicaDeadError(EngineError):
    """The engine inside the replica is dead; another replica may serve the request."""


@dataclass(frozen=True, slots=True)
class InReplica(EngineConnection):
    """From inside a replica's process to that replica."""

    vocab: int

    def connect(self) -> Engine:
        """Raises EngineError in a process that is no started replica."""
        if not HERE:
            raise EngineError("this process is no vLLM replica")
        return LocalEngine(HERE[0], self.vocab)


class LocalEngine(StreamingEngine):
    """See the file's docstring. An episode whose engine has died here does not go on: its worker ends with the replica, and the
    episode is played again elsewhere."""

    def __init__(self, actor: Any, vocab: int) -> None:
        """`actor`: a started VllmActor."""
        self._actor, self._vocab = actor, vocab
        self._numbers = itertools.count()
        self._ids: dict[str, str] = {}
        self._told: Paced = {}
        self._looked = -LOOK

    async def start(self) -> None:
        """It has started."""

    def refusal(self, sampling: Sampling) -> str:
        return str(self._actor.words.refusal(sampling))

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        check_request(token_ids, sampling, self._actor.context, self._vocab)
        if self._actor.unfit:
            raise EngineError(f"no generation until a publish succeeds: {self._actor.unfit}")
        request_id = f"{request_key}@{next(self._numbers)}"
        self._ids[request_key] = request_id
        try:
            answer: Generation = await self._actor.generate(token_ids, sampling, request_key, request_id, told)
            return answer
        except ReplicaDeadError as problem:
            self._actor.note_death(str(problem))
            # An answer of any kind would go on with the episode, which is neither done nor at fault.
            await asyncio.Event().wait()
            raise
        finally:
            # The episode may have begun its next request, which must not lose its progress to the end of the old one.
            if self._ids.get(request_key) == request_id:
                del self._ids[request_key]

    def progress(self, request_key: str) -> int | None:
        """As `VllmEngine.progress`, at most LOOK seconds old."""
        request_id = self._ids.get(request_key)
        if request_id is None:
            return None
        if (now := time.monotonic()) - self._looked >= LOOK:  # each look goes over all requests
            self._looked, self._told = now, self._actor.progress()
        return self._told.get(request_id, 0)

    async def abort(self, request_key: str) -> None:
        await self._actor.abort(request_key)

    async def stats(self) -> EngineStats:
        """Of this replica."""
        found: EngineStats = await self._actor.stats()
        return found

    async def close(self) -> None:
        """The replica goes on."""
