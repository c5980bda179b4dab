"""The progress of vLLM's requests in the driver."""

import asyncio

import pytest

from agentrl.engines.vllm.replica_calls import Paces

pytestmark = pytest.mark.asyncio


async def test_the_driver_asks_only_while_there_are_requests(monkeypatch):
    monkeypatch.setattr("agentrl.engines.vllm.replica_calls.ASK", 0.01)
    asked = []

    async def ask():
        asked.append(1)
        return [{"r1": 4}, {"r2": 0}]

    paces = Paces(ask)
    assert paces.of("e") is None and not asked
    paces.begin("e", "r1")
    assert paces.of("e") == 0
    async with asyncio.timeout(60):
        while paces.of("e") != 4:
            await asyncio.sleep(0.01)
    paces.begin("e", "r3")  # its replica died: the turn is sampled again elsewhere
    paces.end("e", "r1")
    assert paces.of("e") == 0
    paces.end("e", "r3")
    await asyncio.sleep(0.05)
    before = len(asked)
    await asyncio.sleep(0.1)
    assert paces.of("e") is None and len(asked) == before
    await paces.close()
