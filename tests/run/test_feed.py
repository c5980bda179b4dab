"""While episodes are sampled, the display is told what the engine does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.rollout.engine import EngineStats
from agentrl.run import session as feed
from agentrl.utils.errors import EngineError


def test_the_display_is_told_what_the_engine_does_and_a_failed_look_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "LOOK_S", 0.001)
    said: list[str] = []
    answers: Any = iter([EngineError("a replica is started again"), EngineStats(2, 1, kv_used=0.45), EngineStats(3, 0)])

    async def stats() -> EngineStats:
        answer = next(answers, EngineStats())
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, EngineStats)
        return answer

    async def work() -> str:
        async with asyncio.timeout(10):
            while len(said) < 2:
                await asyncio.sleep(0.001)
        return "episodes"

    session: Any = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(max_staleness=0)),
        engine=SimpleNamespace(stats=stats),
        display=SimpleNamespace(engine=said.append),
    )
    assert asyncio.run(feed.republish_to_new_replicas(session, work())) == "episodes"
    assert said[:2] == ["2 running, 1 waiting, KV cache 45.0 %", "3 running, 0 waiting, 0 tokens/s"]
    assert said[-1] == "", "nothing that matters any more"
