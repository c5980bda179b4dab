"""Measure how long an event loop is blocked, without the time in which its thread had no processor."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable


async def longest_silence(case: Callable[[], Awaitable[object]], every: float = 0.0005) -> float:
    """Return the longest blocking of the loop during `case` in milliseconds; a task wakes up every `every` seconds."""
    file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def queued() -> float:
        return int(os.pread(file, 99, 0).split()[1]) * 1e-9

    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            before, waited = time.perf_counter(), queued()
            await asyncio.sleep(every)
            worst = max(worst, time.perf_counter() - before - every - (queued() - waited))

    task = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    worst = 0.0
    await case()
    await asyncio.sleep(0.01)
    task.cancel()
    os.close(file)
    return worst * 1e3
