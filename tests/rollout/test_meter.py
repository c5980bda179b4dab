"""What an engine did since it was last asked: tokens a second, the cache's share, who runs and who waits."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.rollout.engine import EngineStats, Sampling
from agentrl.rollout.stats import EngineMeter
from agentrl.run.run_log import shown_of, train_row


def prompt_of(length: int) -> list[int]:
    return [7 + 31 * place % 400 for place in range(length)]


async def test_what_the_engine_did_since_the_last_reading(tiny: str) -> None:
    engine = EmbeddedEngine(tiny, device="cpu", max_slots=2)
    await engine.start()
    meter = EngineMeter(engine)
    begun = await meter.read()  # nothing is known yet: no time has passed, and no prompt has come
    assert (begun["throughput/sampled_tokens_per_s"], begun["engine/cache_hit"]) == (None, None)
    await engine.generate(prompt_of(100), Sampling(max_tokens=10, seed=1), "a")
    first = await meter.read()
    assert first["throughput/sampled_tokens_per_s"] > 0 and first["engine/cache_hit"] == 0
    # the second turn of the episode finds its first one in the cache
    await engine.generate([*prompt_of(100), 1, 2, 3, 4], Sampling(max_tokens=10, seed=1), "a")
    second = await meter.read()
    assert second["engine/cache_hit"] == pytest.approx(100 / 104, abs=0.01)
    assert second["engine/steps"] > first["engine/steps"]
    idle = await meter.read()
    assert idle["throughput/sampled_tokens_per_s"] == idle["engine/running"] == 0 and idle["engine/cache_hit"] is None
    # three requests on two slots: one waits
    tasks = [asyncio.ensure_future(engine.generate(prompt_of(9), Sampling(max_tokens=480), f"{i}")) for i in range(3)]

    async with asyncio.timeout(30):
        while True:
            busy = await meter.read()
            if (busy["engine/running"], busy["engine/waiting"]) == (2, 1) and 0 < (busy["engine/kv_used"] or 0) < 1:
                break
            await asyncio.sleep(0.005)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.close()


async def test_a_step_whose_groups_lay_ready_has_the_speed_of_what_was_sampled_meanwhile() -> None:
    """With `max_staleness` above 0 the wait for groups may be nothing, and no episode may have ended since the last row."""
    sampled = 0

    async def stats() -> EngineStats:
        return EngineStats(sampled_tokens=sampled)

    engine: Any = SimpleNamespace(stats=stats)
    session: Any = SimpleNamespace(
        collector=SimpleNamespace(metrics=lambda: {"tokens_sampled": 0.0}, ledger=SimpleNamespace(counts=dict)),
        player=SimpleNamespace(metrics=dict),
        services={},
        display=SimpleNamespace(took=dict.fromkeys(("rollout", "batch", "update", "publish"), 0.2)),
    )
    meter = EngineMeter(engine)
    await meter.read()
    began = time.monotonic()
    await asyncio.sleep(0.2)  # an update, beside which the engine goes on
    sampled += 100
    row = train_row(session, {"success": None, "reward": None, "unscored": 0}, await meter.read())
    said, _ = shown_of(row, ["a"])
    assert 0 < 100 / (time.monotonic() - began) <= said["tokens/s"] <= 100 / 0.2
