"""The engine during a rollout: the display is told what it does, and what replaced a dead process of it in the middle gets
weights, if nobody kept a copy of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.deadline import OwnedTasks
from agentrl.errors import AgentrlError
from agentrl.run.frame import percent
from agentrl.run.session import Session
from agentrl.weights.target import WeightTarget

T = TypeVar("T")
LOOK_S = 2.0


async def fed(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which samples episodes.

    With `rollout.max_staleness` 0 the actors wait meanwhile, and their weights are those of the ledger's version: they are
    published again, under the same version, as soon as a process of the engine lacks them. Otherwise the actors may be learning,
    and their next publish brings it new ones.
    """
    async with OwnedTasks() as tasks:
        tasks.start(_look(session), "a look at the engine")
        try:
            return await _fed(session, work)
        finally:
            session.display.engine("")


async def _look(session: Session) -> None:
    """Tell the display what the engine does, every few seconds."""
    last, when = 0, 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            stats = await session.engine.stats()
        except AgentrlError:  # it is being mended, or whoever samples is told soon
            continue
        now = time.monotonic()
        speed = f", {(stats.sampled_tokens - last) / (now - when):,.0f} tokens/s" if when else ""
        used = "" if stats.kv_used is None else f", KV cache {percent(stats.kv_used)}"
        session.display.engine(f"{stats.running} running, {stats.waiting} waiting{speed}{used}")
        last, when = stats.sampled_tokens, now


async def _fed(session: Session, work: Coroutine[Any, Any, T]) -> T:
    engine = session.engine
    if session.config.rollout.max_staleness > 0 or not isinstance(engine, WeightTarget):
        return await work
    async with OwnedTasks() as tasks:
        doing = tasks.start(work, "episodes")
        while not doing.done():
            starved = tasks.start(engine.starved(), "a wait for a replica without weights")
            await asyncio.wait({doing, starved}, return_when=asyncio.FIRST_COMPLETED)
            if starved.done() and not doing.done():
                await session.publisher.send(session.collector.ledger.version)
            starved.cancel()
        return doing.result()
