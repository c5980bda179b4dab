"""Requests under way: an aborted one ends as such, a cancelled caller takes its request with it, and nothing stays behind."""

import asyncio

import pytest

from agentrl.engines.api_models import FunctionEngine, Transcript
from agentrl.rollout.engine import Generation, Sampling


class Held:
    """A policy that answers "done" once it is let go."""

    def __init__(self) -> None:
        self.free, self.asked, self.cancelled = asyncio.Event(), asyncio.Event(), 0

    async def begin(self) -> tuple[FunctionEngine, asyncio.Task[Generation]]:
        transcript = Transcript()
        engine = FunctionEngine("held", self.answer, transcript)
        ids = [transcript.add({"message": {"role": "user", "content": "hello"}})]
        task = asyncio.create_task(engine.generate(ids, Sampling(max_tokens=8), "a"))
        await asyncio.wait_for(self.asked.wait(), 10)
        assert (await engine.stats()).running == 1
        return engine, task

    async def answer(self, messages: list, tools: list) -> str:
        self.asked.set()
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "done"


async def test_an_aborted_request_ends_as_aborted() -> None:
    engine, task = await (held := Held()).begin()
    await engine.abort("a")
    found = await asyncio.wait_for(task, 10)
    assert (found.token_ids, found.finish, held.cancelled) == ([], "abort", 1)
    assert (await engine.stats()).running == 0


async def test_a_cancelled_caller_takes_its_request_with_it() -> None:
    engine, task = await (held := Held()).begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert held.cancelled == 1 and (await engine.stats()).running == 0


async def test_what_has_ended_leaves_nothing() -> None:
    engine, task = await (held := Held()).begin()
    held.free.set()
    assert (await asyncio.wait_for(task, 10)).finish == "stop"
    assert (await engine.stats()).running == 0 and not engine.under_way
