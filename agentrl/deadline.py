"""Deadlines that count only the time in which the event loop listened.

`asyncio.timeout` counts the wall clock: where something blocks the loop for longer than a deadline, everything that was
waited for is late at once, answered or not. Here one ticker per event loop counts the time in which the loop came round,
and every deadline on that loop reads it. No more of it can go by than of the wall clock, so a deadline sleeps for as long
as it has left, up to `LONGEST`; thousands of episodes that wait for slow tools cost the loop next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two ticks of a loop's clock. A tick that comes late counts for twice that at most."""
LONGEST = 5.0
"""Seconds after which a deadline looks again at what it counts, at the latest; an eighth of what is left, if that is less."""
GRACE = 10.0
"""Seconds that cancelled work has to come to an end; then it is let go."""


class LateError(TimeoutError):
    """What was awaited was not there in its time."""


class LoopClock:
    """Seconds in which one event loop listened, counted while anybody asks (`enter` to `leave`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._users, self._heard, self._last = loop, 0, 0.0, 0.0
        self._next: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        self._users += 1
        if self._next is None:
            self._last = time.monotonic()
            self._next = self._loop.call_later(TICK, self._tick)

    def leave(self) -> None:
        self._users -= 1

    def now(self) -> float:
        """Seconds heard so far; what goes by is counted at ticks, and here."""
        now = time.monotonic()
        self._heard += min(now - self._last, 2 * TICK)
        self._last = now
        return self._heard

    def _tick(self) -> None:
        self.now()
        self._next = self._loop.call_later(TICK, self._tick) if self._users else None


_CLOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _CLOCKS:
        _CLOCKS[loop] = LoopClock(loop)
    return _CLOCKS[loop]


async def within(seconds: float, work: Awaitable[T], name: str, counts: Callable[[], bool] = lambda: True) -> T:
    """What `work` comes to. Raises LateError after `seconds`; the work is then cancelled. Time in which `counts` is
    false (it waits in a queue, say) does not count. The work runs as a task of its own, `contained`."""
    left = seconds

    def spend(passed: float) -> float:
        nonlocal left
        left -= passed if counts() else 0.0
        return left

    task = asyncio.ensure_future(contained(work, name))
    try:
        if not await in_time(task, spend):
            await end(task, name)
    except asyncio.CancelledError:
        await end(task, name)
        raise
    if task.done() and not task.cancelled():
        return task.result()
    raise LateError(f"{name}: no end within {seconds:g} s")


async def contained(work: Awaitable[T], name: str, kind: type[Exception] = RuntimeError) -> T:
    """What `work`, to be run as a task of its own, comes to.

    Where it is cancelled although nobody cancelled that task, or calls sys.exit, `kind` is raised: the first would look like
    a task that was given up, the second would end the event loop and all that runs on it.
    """
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise kind(f"{name} was cancelled from inside") from None
    except SystemExit as fault:
        raise kind(f"{name} called sys.exit({fault.code!r})") from fault


async def in_time(task: asyncio.Future[Any], spend: Callable[[float], float], longest: float = LONGEST) -> bool:
    """Wait until the task is done (True) or no time is left (False). `spend(seconds)` is told what the loop heard go by
    and says what is left; the first call tells of none. It is called every `longest` seconds at least. Raises what it raises.

    The caller goes on a fixed number of turns of the loop after the task's end, whenever the clock was looked at: the
    embedded engine steps once a turn, so which requests share a step, and their last digits, must not depend on a clock.
    """
    clock = loop_clock()
    clock.enter()
    try:
        left = spend(0.0)
        if task.done() or left <= 0:
            return task.done()
        return await _Countdown(task, spend, clock, longest).wait(left)
    finally:
        clock.leave()


class _Countdown:
    """Timers that look at the clock until a task is done; who waits for it is woken once, at the end."""

    def __init__(self, task: asyncio.Future[Any], spend: Callable[[float], float], clock: LoopClock, longest: float) -> None:
        self._task, self._spend, self._clock, self._longest = task, spend, clock, longest
        self._heard = clock.now()
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    async def wait(self, left: float) -> bool:
        self._task.add_done_callback(self._wake)
        self._look_later(left)
        try:
            await self._woken
            if self._task.done():
                self._tell()
            return self._task.done()
        finally:
            self._timer.cancel()
            self._task.remove_done_callback(self._wake)

    def _tell(self) -> float:
        """Tell what went by since the last time; what is left."""
        before, self._heard = self._heard, self._clock.now()
        return self._spend(self._heard - before)

    def _look_later(self, left: float) -> None:
        self._timer = self._loop.call_later(min(self._longest, max(left / 8, TICK), left + 0.005), self._look)

    def _look(self) -> None:
        if self._woken.done() or self._task.done():
            return
        try:
            left = self._tell()
        except Exception as fault:
            self._woken.set_exception(fault)
            return
        if left <= 0:
            self._wake()
        else:
            self._look_later(left)

    def _wake(self, _: object = None) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


async def end(task: asyncio.Future[Any], name: str, grace: float = GRACE) -> None:
    """Cancel a task and wait for its end; one that does not end in `grace` seconds is let go with a warning."""
    task.cancel()
    await asyncio.wait([task], timeout=grace)
    if not task.done():
        log.warning("%s did not end within %g s of being cancelled and is let go", name, grace)
