"""Requests that come while weights arrive at vLLM's replicas, or while none lives: no fault of the episode's, and never sampled
from a part of the weights.

The driver's side alone, over replicas that are made up; the real ones are in test_vllm.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.schema import VllmConfig
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.engines.weights.base import Bucket, TensorEntry
from agentrl.engines.weights.parameters import Expected
from agentrl.rollout.engine import Generation, Sampling
from agentrl.utils.errors import EngineError


class Replicas:
    """One replica. It samples one token under the version that the last update ended with."""

    def __init__(self) -> None:
        self.version: int | None = 0
        self.sampled: list[str] = []
        self.told: list[str] = []
        self.lives = asyncio.Event()
        self.lives.set()

    def alive(self) -> list[Any]:
        return [SimpleNamespace(number=0, pid=1)]

    async def all(self, method: str, *args: Any) -> None:
        self.told.append(method)
        if method == "begin_update":
            self.version = None
        if method == "end_update":
            self.version = args[0]

    def note_weights(self) -> None:
        """All replicas have the weights."""

    async def route(self, request: Any) -> Any:
        await self.lives.wait()
        return SimpleNamespace(actor=None)

    def end_request(self, request_id: str, answer: Generation | None) -> None:
        """Nothing is counted."""

    async def generate(self, replica: Any, request: Any, told: Any = None) -> Generation:
        assert self.version is not None, "sampled from weights of which some are not there"
        self.sampled.append(request[2])
        return Generation([7], [-1.0], [self.version], "stop")

    def pace(self, request_id: str) -> int:
        return 0


@pytest.fixture
def engine() -> Any:
    made: Any = VllmEngine("made-up", VllmConfig())
    made._replicas = Replicas()
    made._attached = made.members()
    made._expected = Expected({"w": (2,)}, {}, 400, 100)
    return made


async def arriving(engine: Any, name: str, half: asyncio.Event, go_on: asyncio.Event) -> None:
    """A publish that stops at its half until it is told to go on."""

    async def buckets() -> AsyncIterator[Any]:
        half.set()
        await go_on.wait()
        yield Bucket(0, 8, (TensorEntry(name, "float32", (2,), 0, name),))

    await engine.receive(1, buckets())


def ask(engine: Any, key: str) -> asyncio.Future[Generation]:
    return asyncio.ensure_future(engine.generate([1, 2], Sampling(max_tokens=4), key))


async def test_a_request_waits_for_the_weights_and_is_sampled_from_them(engine: Any) -> None:
    half, go_on = asyncio.Event(), asyncio.Event()
    publish = asyncio.ensure_future(arriving(engine, "w", half, go_on))
    await half.wait()
    requests = [ask(engine, "a"), ask(engine, "b")]
    await asyncio.sleep(0.02)
    assert not any(request.done() for request in requests) and engine._replicas.sampled == []
    assert engine.progress("a") == 0
    requests[1].cancel()
    go_on.set()
    await publish
    assert (await requests[0]).versions == [1] and engine._replicas.sampled == ["a"]
    assert engine.progress("a") is None and engine.progress("b") is None
    assert (await ask(engine, "c")).versions == [1]


async def test_a_request_hears_of_weights_that_did_not_arrive_whole(engine: Any) -> None:
    half, go_on = asyncio.Event(), asyncio.Event()
    publish = asyncio.ensure_future(arriving(engine, "v", half, go_on))
    await half.wait()
    request = ask(engine, "a")
    await asyncio.sleep(0.02)
    go_on.set()
    with pytest.raises(EngineError, match="'v' is not a parameter"):
        await publish
    for late in (request, ask(engine, "b")):
        with pytest.raises(EngineError, match=r"no generation until a publish succeeds: .*'v' is not a parameter"):
            await late
    assert engine._replicas.sampled == []
