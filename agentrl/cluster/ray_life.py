"""Work that ends when the local Ray does that it is done with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.cluster.runtime import abandon_ray, has_own_ray, ray_gone, stop_ray
from agentrl.errors import ResourceError, UserError, WorkerDiedError
from agentrl.executors import in_thread

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK = 0.5
"""Seconds between two looks at Ray's processes."""
SETTLE = 5.0
"""Seconds in which a process of Ray's that has begun to end is gone. A raylet that lost an agent ends its actors first, and the
work fails of those."""
END_S = 60.0
"""Seconds in which the work, and Ray, must have ended once one of them is gone."""


async def while_ray_lives(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, in a task of its own. If meanwhile the local Ray that this process started loses its GCS or its
    raylet, all of that Ray is ended, then the work is cancelled and WorkerDiedError raised, which names the process."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK))[0]:
            if lost := ray_gone():
                raise await _given_up(task, lost)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait([task])
        raise
    # Its own error may be what the loss has led to.
    error = task.exception()
    if error is not None and (lost := await _settled(error)):
        raise await _given_up(task, lost)
    return task.result()


async def _settled(error: BaseException) -> str:
    """`ray_gone`, after the time to see it if the error may come of it."""
    mistake = isinstance(error, UserError) and not isinstance(error, ResourceError)
    until = time.monotonic() + (0 if mistake else SETTLE)
    while has_own_ray() and not ray_gone() and time.monotonic() < until:
        await asyncio.sleep(LOOK / 10)
    return ray_gone()


async def _given_up(task: asyncio.Task[Any], lost: str) -> WorkerDiedError:
    log.error("Ray has lost %s", lost)
    try:
        async with asyncio.timeout(END_S):
            await in_thread("batch", abandon_ray)
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
    except TimeoutError:
        log.error("what was under way has not ended within %g s", END_S)
    if task.done() and not task.cancelled():
        task.exception()  # of the loss: else asyncio says that nobody asked
    stop_ray()
    return WorkerDiedError(f"Ray is no more: {lost} on this machine is gone")
