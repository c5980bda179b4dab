"""Requests under way: an aborted one ends as such, a cancelled caller takes its request with it, and nothing stays behind."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.engines.api_models import FunctionEngine, Transcript
from agentrl.rollout.engine import Generation, Sampling

pytestmark = pytest.mark.asyncio


class Held:
    """A policy that answers "done" once it is let go."""

    def __init__(self) -> None:
        self.free, self.asked, self.cancelled = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self, messages: list, tools: list) -> str:
        self.asked.set()
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "done"


async def begun() -> tuple[FunctionEngine, Held, asyncio.Task[Generation]]:
    held, transcript = Held(), Transcript()

    async def policy(messages: list, tools: list) -> str:
        return await held(messages, tools)

    engine = FunctionEngine("held", policy, transcript)
    ids = [transcript.add({"message": {"role": "user", "content": "hello"}})]
    task = asyncio.create_task(engine.generate(ids, Sampling(max_tokens=8), "a"))
    await asyncio.wait_for(held.asked.wait(), 10)
    assert (await engine.stats()).running == 1
    return engine, held, task


async def test_an_aborted_request_ends_as_aborted() -> None:
    engine, held, task = await begun()
    await engine.abort("a")
    found = await asyncio.wait_for(task, 10)
    assert (found.token_ids, found.finish, held.cancelled) == ([], "abort", 1)
    assert (await engine.stats()).running == 0


async def test_a_cancelled_caller_takes_its_request_with_it() -> None:
    engine, held, task = await begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert held.cancelled == 1 and (await engine.stats()).running == 0


async def test_what_has_ended_leaves_nothing() -> None:
    engine, held, task = await begun()
    held.free.set()
    assert (await asyncio.wait_for(task, 10)).finish == "stop"
    assert (await engine.stats()).running == 0 and not engine.under_way
