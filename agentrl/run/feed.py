"""Weights for what replaced a dead process of the engine in the middle of a rollout, if nobody kept a copy of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.run.session import Session
from agentrl.weights.target import WeightTarget

T = TypeVar("T")


async def fed(session: Session, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which samples episodes.

    With `rollout.max_staleness` 0 the actors wait meanwhile, and their weights are those of the ledger's version: they are
    published again, under the same version, as soon as a process of the engine lacks them. Otherwise the actors may be learning,
    and their next publish brings it new ones.
    """
    engine = session.engine
    if session.config.rollout.max_staleness > 0 or not isinstance(engine, WeightTarget):
        return await work
    doing = asyncio.ensure_future(work)
    try:
        while not doing.done():
            starved = asyncio.ensure_future(engine.starved())
            await asyncio.wait({doing, starved}, return_when=asyncio.FIRST_COMPLETED)
            if starved.done() and not doing.done():
                await session.publisher.send(session.collector.ledger.version)
            starved.cancel()
        return doing.result()
    finally:
        if not doing.done():
            doing.cancel()
            await asyncio.wait({doing})
