"""Deadlines that count only the time in which the event loop listened.

`asyncio.timeout` counts the wall clock: where something blocks the loop for longer than a deadline, everything that was
waited for is late at once, answered or not. Here time goes by in slices. A slice counts for its own length at most,
however long the loop was away, and what is awaited is looked at once more before it counts as late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)

SLICE = 0.25
"""The longest slice, in seconds; a deadline has eight at least."""
GRACE = 10.0
"""Seconds that cancelled work has to come to an end; then it is let go."""


class LateError(TimeoutError):
    """What was awaited was not there in its time."""


async def within(seconds: float, work: Awaitable[T], name: str, counts: Callable[[], bool] = lambda: True) -> T:
    """What `work` comes to. Raises LateError after `seconds`; the work is then cancelled. Time in which `counts` is
    false (it waits in a queue, say) does not count. The work runs as a task of its own."""
    left = seconds

    def spend(passed: float) -> float:
        nonlocal left
        left -= passed if counts() else 0.0
        return left

    task = asyncio.ensure_future(work)
    try:
        if not await in_time(task, spend):
            await end(task, name)
    except asyncio.CancelledError:
        await end(task, name)
        raise
    if task.done() and not task.cancelled():
        return task.result()
    raise LateError(f"{name}: no end within {seconds:g} s")


async def in_time(task: asyncio.Future[Any], spend: Callable[[float], float]) -> bool:
    """Wait until the task is done (True) or no time is left (False). `spend(seconds)` is told what went by and says what
    is left; the first call tells of none."""
    left = whole = spend(0.0)
    while not task.done():
        if left <= 0:
            return False
        slice_ = max(min(SLICE, whole / 8, left), 0.005)
        began = time.monotonic()
        await asyncio.wait([task], timeout=slice_)
        took = time.monotonic() - began
        if took > slice_ + 0.05 and not task.done():
            # The loop was away. What came in meanwhile is handled now.
            await asyncio.wait([task], timeout=slice_)
        left = spend(min(took, slice_))
    return True


async def end(task: asyncio.Future[Any], name: str, grace: float = GRACE) -> None:
    """Cancel a task and wait for its end; one that does not end in `grace` seconds is let go with a warning."""
    task.cancel()
    await asyncio.wait([task], timeout=grace)
    if not task.done():
        log.warning("%s did not end within %g s of being cancelled and is let go", name, grace)
