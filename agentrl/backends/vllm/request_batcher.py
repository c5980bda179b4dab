"""Requests to a vLLM replica, many to a call.

Each call of a Ray actor costs about a millisecond, half of it processor time on either side, and the requests of
a rollout come in waves: 64 of them as calls of their own took 100 ms in which the engine had little to do. So those
made in one turn of the event loop travel together, and answers that are ready together come back together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from agentrl.errors import EngineError
from agentrl.rollout.engine import Generation, Sampling

Request = tuple[list[int], Sampling, str, str]
"""Token ids, sampling, request key, request id: the arguments of `VllmActor.generate`."""
Answers = list[tuple[int, Generation | EngineError]]
"""What some requests of a call came to, by their place in it."""


class RequestBatcher:
    """The driver's side, one for each replica."""

    def __init__(self, actor: Any) -> None:
        """`actor`: a handle whose `generate_many` is `answered` over its `generate`."""
        self._actor = actor
        self._waiting: list[tuple[Request, asyncio.Future[Generation]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Generation:
        """Raises the EngineError that the request came to, or the RayError that the call came to."""
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._waiting) == 1:
            task = asyncio.create_task(self._send(), name="requests to a vLLM replica")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        return await answer

    async def _send(self) -> None:
        """Runs in the next turn of the loop, when all who would ask in this one have asked."""
        letters, self._waiting = self._waiting, []
        alive = [(request, answer) for request, answer in letters if not answer.done()]
        if not alive:
            return
        answers = [answer for _, answer in alive]
        try:
            requests = [request for request, _ in alive]
            async for part in self._actor.generate_many.options(num_returns="streaming").remote(requests):
                for place, found in await part:
                    _settle(answers[place], found)
            problem: Exception = EngineError("the replica's answers broke off")
        except Exception as failure:  # whatever it is: a caller who does not hear of it waits for ever
            problem = failure
        for answer in answers:
            _settle(answer, problem)


def _settle(answer: asyncio.Future[Generation], found: Generation | Exception) -> None:
    if answer.done():  # answered, or its caller has gone
        return
    if isinstance(found, Generation):
        answer.set_result(found)
    else:
        answer.set_exception(found)


async def answered(generate: Callable[..., Awaitable[Generation]], requests: Sequence[Request]) -> AsyncIterator[Answers]:
    """The actor's side: start all requests, and yield what they came to as they end."""
    ready: Answers = []
    wake = asyncio.Event()

    async def one(place: int, request: Request) -> None:
        found: Generation | EngineError
        try:
            found = await generate(*request)
        except EngineError as problem:
            found = problem
        ready.append((place, found))
        wake.set()

    async with asyncio.TaskGroup() as tasks:
        for place, request in enumerate(requests):
            tasks.create_task(one(place, request))
        left = len(requests)
        while left:
            await wake.wait()
            await asyncio.sleep(0)  # those that end in the same engine step come along
            wake.clear()
            part, ready[:] = list(ready), []
            left -= len(part)
            yield part
