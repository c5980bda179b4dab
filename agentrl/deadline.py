"""Deadlines that count only the time in which the event loop was running.

`asyncio.timeout` counts wall-clock time: if something blocks the loop for longer than a deadline, everything that was
awaited is late at once, even if its result is there. Here one ticker per event loop counts the time in which the loop was
not blocked, and every deadline on that loop reads it. It never runs faster than the wall clock, so a deadline can sleep for
part of what it has left, up to `LONGEST`; thousands of episodes that wait for slow tools cost the loop almost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two ticks of a loop's clock. A tick that comes late counts for at most twice that."""
LONGEST = 5.0
"""Seconds after which a deadline reads the clock again at the latest; an eighth of the time left, if that is less."""
GRACE = 10.0
"""Seconds that cancelled work has to end; then it is abandoned."""


class LateError(TimeoutError):
    """The awaited result did not come in time."""


class LoopClock:
    """Seconds in which one event loop was running, counted while it has users (`enter` to `leave`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._users, self._counted, self._last = loop, 0, 0.0, 0.0
        self._next: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        self._users += 1
        if self._next is None:
            self._last = time.monotonic()
            self._next = self._loop.call_later(TICK, self._tick)

    def leave(self) -> None:
        self._users -= 1

    def now(self) -> float:
        """Seconds counted so far. Time is added at each tick and at each call of this."""
        now = time.monotonic()
        # Capped: in a longer gap the loop was blocked except for a tick or two, and nothing could be answered.
        self._counted += min(now - self._last, 2 * TICK)
        self._last = now
        return self._counted

    def _tick(self) -> None:
        self.now()
        # Ends without users: an idle loop is not woken twenty times a second for a clock that nobody reads.
        self._next = self._loop.call_later(TICK, self._tick) if self._users else None


_CLOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _CLOCKS:
        _CLOCKS[loop] = LoopClock(loop)
    return _CLOCKS[loop]


class OwnedTasks:
    """Own tasks that no caller awaits to their end; `close` cancels them and waits. Also an async context manager."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` in a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what still runs, and wait until it has ended; idempotent."""
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> OwnedTasks:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def within(seconds: float, work: Awaitable[T], name: str, counts: Callable[[], bool] = lambda: True) -> T:
    """The result of `work`. Raises LateError after `seconds`; the work is then cancelled. Time in which `counts` is
    false (for example while it waits in a queue) does not count. The work runs in a separate task, `contained`."""
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
    if task.done() and not task.cancelled():  # also work that finished while it was being cancelled: its result counts
        return task.result()
    raise LateError(f"{name}: not finished within {seconds:g} s")


async def contained(work: Awaitable[T], name: str, kind: type[Exception] = RuntimeError) -> T:
    """The result of `work`; to be run in a task of its own.

    If the work raises CancelledError although nobody cancelled that task, or calls sys.exit, `kind` is raised instead: the
    first would look like a task that was given up, the second would end the event loop and everything that runs on it.
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
    """Wait until the task is done (True) or no time is left (False). `spend(seconds)` gets the time counted since its last
    call and returns the time left; the first call gets 0. It is called at least every `longest` seconds. Raises what `spend`
    raises.

    The caller continues a fixed number of loop iterations after the task's end, no matter when the clock was read: the
    embedded engine steps once per iteration, so which requests share a step, and thus their last digits, must not depend on
    the clock.
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
    """Timers that read the clock until a task is done; the waiting caller is woken once, at the end."""

    def __init__(self, task: asyncio.Future[Any], spend: Callable[[float], float], clock: LoopClock, longest: float) -> None:
        self._task, self._spend, self._clock, self._longest = task, spend, clock, longest
        self._counted = clock.now()
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()

    async def wait(self, left: float) -> bool:
        self._task.add_done_callback(self._wake)
        self._check_later(left)
        try:
            await self._woken
            if self._task.done():
                self._report()
            return self._task.done()
        finally:
            self._timer.cancel()
            self._task.remove_done_callback(self._wake)

    def _report(self) -> float:
        """Report the time since the last call to `spend`; returns the time left."""
        before, self._counted = self._counted, self._clock.now()
        return self._spend(self._counted - before)

    def _check_later(self, left: float) -> None:
        # An eighth of the time left: `counts` may change in between, and one late check would charge the whole span at once.
        self._timer = self._loop.call_later(min(self._longest, max(left / 8, TICK), left + 0.005), self._check)

    def _check(self) -> None:
        if self._woken.done() or self._task.done():
            return
        try:
            left = self._report()
        except Exception as fault:
            # Raised where it is waited for: out of a timer's callback it would only be logged.
            self._woken.set_exception(fault)
            return
        if left <= 0:
            self._wake()
        else:
            self._check_later(left)

    def _wake(self, _: object = None) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


async def end(task: asyncio.Future[Any], name: str, grace: float = GRACE) -> None:
    """Cancel a task and wait for its end; one that does not end within `grace` seconds is abandoned with a warning."""
    task.cancel()
    left = grace

    def spend(passed: float) -> float:
        nonlocal left
        left -= passed
        return left

    # Not without a limit: work that swallows its cancellation would hold up everything that waits for its end. Of the loop's
    # time: where thousands are cancelled at once, each of them waits for the loop.
    if not await in_time(task, spend):
        log.warning("%s did not end within %g s of being cancelled and is abandoned", name, grace)


def run_loop(work: Coroutine[Any, Any, T], grace: float = GRACE) -> T:
    """As `asyncio.run`, but what is left at the end has `grace` seconds to end once it is cancelled, and is then abandoned with
    the loop: `asyncio.run` would wait for work that swallows its cancellation for ever."""
    runner = asyncio.Runner()
    try:
        return runner.run(work)
    finally:
        loop = runner.get_loop()
        if _ended(loop, grace):
            runner.close()
        else:  # without what waits: the runner's own close would, for all of them
            asyncio.set_event_loop(None)
            loop.close()


def _ended(loop: asyncio.AbstractEventLoop, grace: float) -> bool:
    """Cancel what is left in a loop that stands still; whether all of it has ended."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _, tasks = loop.run_until_complete(asyncio.wait(tasks, timeout=grace))
    if tasks:
        log.warning("%d tasks did not end within %g s of being cancelled and are abandoned", len(tasks), grace)
    return not tasks
