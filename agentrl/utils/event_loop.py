"""Deadlines that count only the running time of an event loop, and a watchdog that names what blocks a loop."""

from __future__ import annotations

import asyncio
import linecache
import logging
import queue
import selectors
import sys
import sysconfig
import threading
import time
from asyncio import events
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import thread
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from agentrl.utils.errors import exception_for, is_from_outside

# Deadlines that count only the time in which the event loop was running.
#
# With `asyncio.timeout`, a call that blocks the loop for longer than a deadline makes everything awaited late at once, even
# finished results. Here one ticker per loop counts the time in which it was not blocked. It never exceeds the wall clock, so
# a deadline can sleep for part of its remaining time.

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two ticks of a loop's clock. A late tick counts for at most twice that."""
LONGEST = 5.0
"""Maximum seconds between two readings of the clock by a deadline; an eighth of the time left, if that is less."""
GRACE = 10.0
"""Seconds for cancelled work to end before it is abandoned."""


class LateError(TimeoutError):
    """The awaited result did not arrive in time."""


@dataclass(slots=True)
class LoopClock:
    """Running time of one event loop in seconds, counted while it has `users` (calls of `enter` without an exit)."""

    loop: asyncio.AbstractEventLoop
    users: int = 0
    counted: float = 0.0
    last: float = 0.0
    next: asyncio.TimerHandle | None = None

    def enter(self) -> None:
        self.users += 1
        if self.next is None:
            self.last = time.monotonic()
            self.next = self.loop.call_later(TICK, self._tick)

    def now(self) -> float:
        """Return the seconds counted so far; adds the time since the last tick or call."""
        now = time.monotonic()
        # Capped: in a longer gap the loop was blocked except for a tick or two, and could not process an answer.
        self.counted += min(now - self.last, 2 * TICK)
        self.last = now
        return self.counted

    def _tick(self) -> None:
        self.now()
        # Stops without users, so that an idle loop is not woken twenty times a second.
        self.next = self.loop.call_later(TICK, self._tick) if self.users else None


_CLOCKS: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """Return the clock of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _CLOCKS:
        _CLOCKS[loop] = LoopClock(loop)
    return _CLOCKS[loop]


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for their end, whatever they raise."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


@dataclass(eq=False, slots=True)
class OwnedTasks(AbstractAsyncContextManager["OwnedTasks"]):
    """Tasks that no caller awaits; `close`, as the exit of the context, cancels them and waits."""

    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start `work` as a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self, *_: object) -> None:
        """Cancel the running tasks and wait for their end; idempotent."""
        while self._tasks:
            await cancel_all(self._tasks)

    __aexit__ = close


async def within(seconds: float, work: Awaitable[T], name: str, counts: Callable[[], bool] = lambda: True) -> T:
    """Return the result of `work`, run as a contained task. Raises LateError, and cancels the work, after `seconds`, without
    the time in which `counts` returns False (for example while it waits in a queue)."""
    task = asyncio.ensure_future(run_contained(work, name))
    try:
        if not await in_time(task, _Budget(seconds, counts)):
            await end(task, name)
    except asyncio.CancelledError:
        await end(task, name)
        raise
    if task.done() and not task.cancelled():  # a result that arrived during the cancellation counts
        return task.result()
    raise LateError(f"{name}: not finished within {seconds:g} s")


@dataclass(slots=True)
class _Budget:
    """A `spend` function for `in_time` with a budget of `seconds`."""

    seconds: float
    counts: Callable[[], bool]

    def __call__(self, passed: float) -> float:
        self.seconds -= passed if self.counts() else 0.0
        return self.seconds


async def run_contained(work: Awaitable[T], name: str, kind: type[Exception] = RuntimeError) -> T:
    """Await `work` inside a task of its own and convert exceptions that would escape it.

    Raises `kind` if the work raises CancelledError without a cancellation of the task (which would look like an abandoned task),
    calls sys.exit, or raises a BaseException such as a Rust panic (which would end the loop).
    """
    try:
        return await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise kind(f"{name} was cancelled from inside") from None
    except BaseException as fault:
        if isinstance(fault, Exception) or is_from_outside(fault):
            raise
        raise exception_for(fault, name, kind) from fault


async def in_time(task: asyncio.Future[Any], spend: Callable[[float], float], longest: float = LONGEST) -> bool:
    """Wait until the task is done (True) or no time is left (False). Raises what `spend` raises.

    `spend(seconds)` gets the time counted since its last call (first 0) and returns the time left; it is called at least every
    `longest` seconds.

    The caller resumes a fixed number of loop iterations after the task's end, independent of the clock readings: the embedded
    engine steps once per iteration, so the requests that share a step, and thus their last digits, must not depend on time.
    """
    clock, loop = loop_clock(), asyncio.get_running_loop()
    clock.enter()
    try:
        if spend(0.0) <= 0 or task.done():
            return task.done()
        counted, woken = clock.now(), loop.create_future()
        timer: asyncio.TimerHandle | None = None

        def look(ended: object = None) -> None:
            """Count the time since the last reading, by a timer or at the task's end; wake the caller once, at the end."""
            nonlocal counted, timer
            if woken.done() or (task.done() and ended is None):
                return
            try:
                before, counted = counted, clock.now()
                left = spend(counted - before)
                if ended is not None or left <= 0:
                    woken.set_result(None)
                else:
                    # An eighth of the time left: `counts` may change in between, and one late look would charge the whole span.
                    timer = loop.call_later(min(longest, max(left / 8, TICK), left + 0.005), look)
            except Exception as fault:
                # Raised where it is waited for: out of a callback it would only be logged.
                woken.set_exception(fault)

        task.add_done_callback(look)
        look()
        try:
            await woken
            return task.done()
        finally:
            if timer is not None:
                timer.cancel()
            task.remove_done_callback(look)
    finally:
        clock.users -= 1


async def end(task: asyncio.Future[Any], name: str, grace: float = GRACE) -> None:
    """Cancel a task and wait up to `grace` seconds for its end; then abandon it with a warning."""
    task.cancel()
    # With a limit: work that swallows its cancellation would block everything that waits for it. Counted in the loop's running
    # time, because thousands of cancelled tasks wait for the loop.
    if not await in_time(task, _Budget(grace, lambda: True)):
        log.warning("%s did not end within %g s of being cancelled and is abandoned", name, grace)


def run_loop(work: Coroutine[Any, Any, T], grace: float = GRACE) -> T:
    """`asyncio.run`, but cancelled remaining tasks get `grace` seconds and are then abandoned with the loop; `asyncio.run` would
    wait forever for work that swallows its cancellation."""
    runner = asyncio.Runner()
    try:
        return runner.run(work)
    finally:
        loop = runner.get_loop()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            _, tasks = loop.run_until_complete(asyncio.wait(tasks, timeout=grace))
        if tasks:  # not `runner.close`, which would wait for all of them
            log.warning("%d tasks did not end within %g s of being cancelled and are abandoned", len(tasks), grace)
            asyncio.set_event_loop(None)
            loop.close()
        else:
            runner.close()


# A watchdog that names the call that blocks an event loop, while it does.
#
# All episodes of a loop wait while one call holds it.
# `LoopWatchdog` pings the loop a few times a second. If there is no answer within the limit, it samples the loop's stack until
# there is one, and names the call: the innermost frame of the user's own code, and the episode.

EPISODE: ContextVar[str] = ContextVar("agentrl_episode", default="")
"""Key of the episode that runs the current code; "" outside of episodes. Set by `LocalPlayer`."""
REPORT_AFTER_S = 10.0
"""Seconds after which a block is reported before it ends."""
MOST_PLACES = 32
"""Maximum number of reported places; for further ones only the seconds are counted."""

Owner = Literal["user", "package", "library"]

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")]
_WAITING = frozenset({selectors.__file__, threading.__file__, queue.__file__, thread.__file__, connection.__file__})
# Functions in which a thread waits for work.
_IDLE = {"DaemonThreads._serve", "Outlet._serve"}
_RUN = events.Handle._run.__code__


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code and its owner: the user (an environment, a tool, a plug-in), this package, or a library."""

    file: str
    line: int
    function: str
    owner: Owner

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{_short(self.file)}:{self.line} in {self.function}" + (f" (`{code}`)" if code else "")


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """A period in which a loop was blocked. `share`: of the stack samples that found `place`; 0.0, with `place` None, if the call
    ended before a sample. `inner`: the line that `place` had called."""

    seconds: float
    place: CodeLine | None
    inner: CodeLine | None
    episode: str
    share: float

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.seconds:.2f} s in a call that ended before its stack could be read"
        inner = f", then in {self.inner}" if self.inner is not None else ""
        often = f", seen in {self.share:.0%} of the looks" if self.share < 0.9 else ""
        return f"{self.seconds:.2f} s in {self.place}{inner}{f' (episode {self.episode})' if self.episode else ''}{often}"


@dataclass(slots=True)
class _StackSamples:
    """Stack samples of one block so far."""

    found: Counter[tuple[CodeLine | None, str]] = field(default_factory=Counter)
    inner: dict[CodeLine | None, CodeLine | None] = field(default_factory=dict)

    def look(self, ident: int) -> None:
        """Sample the loop's thread; if it only waits, another thread that holds the interpreter lock."""
        frames = sys._current_frames()
        own = frames.pop(ident, None)
        frames.pop(threading.get_ident(), None)
        if own is not None and not _waits(own):
            self._note(own)
            return
        for frame in frames.values():
            if not _waits(frame) and (place := _place(_of_one_call(frame)[0])[0]) is not None and place.owner != "library":
                self._note(frame)
                return

    def _note(self, frame: FrameType) -> None:
        stack, episode = _of_one_call(frame)
        place, inner = _place(stack)
        self.found[place, episode] += 1
        self.inner[place] = inner

    def block(self, seconds: float) -> LoopBlock:
        if not self.found:
            return LoopBlock(seconds, None, None, "", 0.0)
        (place, episode), times = self.found.most_common(1)[0]
        return LoopBlock(seconds, place, self.inner.get(place), episode, times / self.found.total())


SLOW_LOOP = 0.2
"""Default limit in seconds from which runs report a block of an event loop."""


class LoopWatchdog:
    """Watches the event loop that enters it as a context, from a separate thread.

    `limit`: seconds without an answer from which a block is counted and reported (it is certainly detected from twice that); 0
    turns the watchdog off. `say`: called on the loop with one line per place of the user's code, when it first blocks; other
    places are logged. CPU time that other programs took from the loop is not counted.
    """

    def __init__(self, limit: float, say: Callable[[str], None] = log.warning, name: str = "the event loop") -> None:
        self.limit = limit
        self._say, self._name = say, name
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._stopped, self._turned = threading.Event(), threading.Event()
        self._answered = self._blocked = self._longest = 0.0
        self._reported: set[tuple[str, str]] = set()

    def __enter__(self) -> LoopWatchdog:
        if self.limit > 0:
            self._loop = asyncio.get_running_loop()
            ident, native = threading.get_ident(), threading.get_native_id()
            self._thread = threading.Thread(target=self._watch, args=(ident, native), daemon=True, name="agentrl-watchdog")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._turned.set()  # the watchdog may be waiting for the loop, which runs in this thread
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def read(self) -> dict[str, float]:
        """Return since the last call: `loop/blocked_s`, seconds of all blocks, and `loop/longest_s`, of the longest."""
        found = {"loop/blocked_s": self._blocked, "loop/longest_s": self._longest}
        self._blocked = self._longest = 0.0
        return found

    # -- in the watchdog's thread ------------------------------------------------------------------

    def _watch(self, ident: int, native: int) -> None:
        threads = native, threading.get_native_id()
        while True:
            ready = _seconds_ready(threads)
            due = time.monotonic() + self.limit
            if self._stopped.wait(self.limit):
                return
            looks = _StackSamples()
            if time.monotonic() - due > self.limit:
                # A call that holds the interpreter lock (a regular expression, a sort) blocks this thread too. It has just ended,
                # and the stack is still that of its caller.
                looks.look(ident)
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turn)
            except RuntimeError:  # the loop is closed
                return
            if looks.found or not self._turned.wait(self.limit):
                # Sample the stack until the loop answers.
                pause, still = self.limit / 4, REPORT_AFTER_S
                while not self._turned.is_set():
                    looks.look(ident)
                    self._turned.wait(pause)
                    pause = min(pause * 1.5, 1.0)
                    if (passed := time.monotonic() - due) > still:
                        log.warning("%s has stood still for %s, and still does", self._name, looks.block(passed))
                        still *= 10
                # CPU time lost by the thread that waited longest.
                lost = max(now - then for now, then in zip(_seconds_ready(threads), ready, strict=True))
                self._count(self._answered - due - lost, looks)

    def _turn(self) -> None:
        """Answer a ping; runs on the loop."""
        self._answered = time.monotonic()
        self._turned.set()

    def _count(self, seconds: float, looks: _StackSamples) -> None:
        if self._stopped.is_set() or seconds < self.limit:
            return
        block = looks.block(seconds)
        self._blocked += seconds
        self._longest = max(self._longest, seconds)
        key = (block.place.file, block.place.function) if block.place is not None else ("", "")
        if key not in self._reported and len(self._reported) < MOST_PLACES:
            self._reported.add(key)
            text = f"{self._name} stood still for {block}: every episode waited (docs/rollouts.md)"
            if block.place is not None and block.place.owner == "user":
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._say, text)
            else:  # code of agentrl or a library, which the user cannot change
                log.info("%s", text)


def _seconds_ready(natives: tuple[int, ...]) -> list[float]:
    """Seconds in which the threads were runnable while other programs had the CPU (Linux schedstat; else 0)."""
    try:
        return [int(Path(f"/proc/self/task/{n}/schedstat").read_text().split()[1]) * 1e-9 for n in natives]
    except (OSError, ValueError, IndexError):
        return [0.0] * len(natives)


def _waits(frame: FrameType) -> bool:
    """Return True if a thread waits for work, another thread, or a socket."""
    return frame.f_code.co_filename in _WAITING or frame.f_code.co_qualname in _IDLE


def _of_one_call(frame: FrameType) -> tuple[list[FrameType], str]:
    """Return the frames of the loop's current callback, innermost first, and its episode."""
    stack: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        if at.f_code is _RUN:
            # A task inherits the context of its creator, so tasks of an episode have its key too.
            return stack, str(at.f_locals["self"]._context.get(EPISODE, ""))
        stack.append(at)
        at = at.f_back
    return stack, ""


def _place(stack: list[FrameType]) -> tuple[CodeLine | None, CodeLine | None]:
    """Return the innermost line of the user's code, else of this package, else of any; and the innermost of all if it differs."""
    places = [CodeLine(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_qualname, _owner(f.f_code.co_filename)) for f in stack]
    if not places:
        return None, None
    chosen = next((p for owner in ("user", "package") for p in places if p.owner == owner), places[0])
    return chosen, places[0] if places[0] != chosen else None


@cache
def _owner(file: str) -> Owner:
    """Return the owner of a file's code. Shipped content (`_shelf`) counts as the user's, who may have changed it."""
    if file.startswith("<"):  # generated by a library (a dataclass, a named tuple)
        return "library"
    path = Path(file).resolve()
    if path.is_relative_to(_PACKAGE):
        return "user" if path.is_relative_to(_PACKAGE / "_shelf") else "package"
    return "library" if any(path.is_relative_to(folder) for folder in _LIBRARIES) else "user"


def _short(file: str) -> str:
    """Shorten a path: relative to the working folder or the installation folder."""
    for folder in (Path.cwd(), _PACKAGE.parent, *_LIBRARIES):
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file
