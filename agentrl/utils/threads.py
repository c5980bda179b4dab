"""Thread pools by purpose, and an event loop in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from agentrl.utils.errors import AgentrlError, HungError, fault_text, is_from_outside

# Threads by purpose: `in_thread` for this package's own work, which ends, and `DaemonThreads` for users' functions, which may
# hang. `asyncio.to_thread` has one pool for all: six hung tool calls would block the commit of a checkpoint.

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Purpose = Literal["batch", "engine", "files", "load", "sandbox", "text", "update", "weights"]
_FEW: dict[Purpose, int] = {"batch": 1, "files": 2, "load": 2}

LONG_TEXT = 10_000
"""Characters from which a text is processed in a thread: rendering that many takes about 4 ms, the thread switch 0.1 ms."""

SWITCH_S = 0.001
"""Interpreter switch interval in seconds, after which a computing thread yields the lock (Python's default: 0.005)."""

_IDLE_S = 10.0  # then an idle thread ends, unless it is the last

MOST_ABANDONED = 256
"""Running abandoned threads of one name from which further calls of that name are refused."""

_INHERITED: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def after_fork(held: T, renew: Callable[[T], object]) -> T:
    """Return `held`, and call `renew(held)` first in every process forked from this one.

    A forked process (AsyncVectorEnv) has none of its parent's threads: pools and loops have no worker, and a lock that another
    thread held is never released.
    """
    _INHERITED[held] = renew
    return held


os.register_at_fork(after_in_child=lambda: [renew(held) for held, renew in list(_INHERITED.items())])


def fork_safe(lock: T) -> T:
    """Make a lock (`threading.Lock()` or `RLock()`) free in a forked process, unless the forking thread holds it."""
    return after_fork(lock, _free)


def _free(lock: Any) -> None:
    if not (hasattr(lock, "_is_owned") and lock._is_owned()):
        lock._at_fork_reinit()  # as the standard library does with its own locks


def threads(most: int, name: str) -> ThreadPoolExecutor:
    """Create a pool of at most `most` threads, which restarts empty in a forked process."""
    begin = partial(ThreadPoolExecutor.__init__, max_workers=most, thread_name_prefix=name)
    return after_fork(ThreadPoolExecutor(most, name), begin)


async def in_thread(purpose: Purpose, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `function(*args, **kwargs)` in a thread of the pool for `purpose`, with the caller's context variables.

    Raises what the function raises. Cancelling the awaiting task does not stop the thread.
    """
    call = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
    return await asyncio.get_running_loop().run_in_executor(_pool(purpose), call)


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


QUICK: contextvars.ContextVar[bool] = contextvars.ContextVar("agentrl_quick", default=False)
"""True while work is tried on an event loop, so that slow work raises TooLongError instead."""


class TooLongError(AgentrlError):
    """Work tried on an event loop would take too long; it has changed nothing."""


def at_once(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function on the event loop. Raises TooLongError if it notices that it is slow."""
    token = QUICK.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        QUICK.reset(token)


async def by_size(size: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the function on the event loop if `size` (characters) is small, else in a thread. A call on the loop that turns out
    slow (TooLongError) is repeated in a thread."""
    if size < LONG_TEXT:
        try:  # not `suppress`: this runs twice per tool call
            return at_once(function, *args, **kwargs)
        except TooLongError:
            pass
    return await in_thread("text", function, *args, **kwargs)


def size_of(value: Any, most: int = LONG_TEXT) -> int:
    """Estimate the characters of a value as JSON, counted up to `most`. Objects count as their attributes."""
    kind = type(value)
    if kind is str:
        return len(value)
    if value is None or kind in (int, float, bool):
        return 4
    size, rest = 0, [value]
    try:
        while rest and size < most:
            item = rest.pop()
            size += len(item) if isinstance(item, str | bytes) else 4
            if isinstance(item, dict):
                size += sum(len(key) for key in item if isinstance(key, str))
                rest.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                rest.extend(item)
            elif hasattr(item, "__dict__") and not isinstance(item, type):
                rest.extend(vars(item).values())
    except BaseException as fault:  # raised by its own methods; the code that serializes it meets this again
        if is_from_outside(fault):
            raise
        return most
    return size


def share_the_lock() -> None:
    """Set the switch interval to `SWITCH_S`, unless the user has set less; for a process with an event loop and tool threads.

    With Python's default and 16 computing threads, a loop waited for the lock for up to 80 ms. It costs these threads 3 % of
    their time, and nothing without contention.
    """
    if sys.getswitchinterval() > SWITCH_S:
        sys.setswitchinterval(SWITCH_S)


@cache
def _pool(purpose: Purpose) -> ThreadPoolExecutor:
    return threads(_FEW.get(purpose, 4), f"agentrl-{purpose}")


class DaemonThreads:
    """One thread per call in progress, so that a hanging call does not block others.

    A thread cannot be killed: a call whose caller is gone keeps running, its result is dropped, and it counts as abandoned
    until it ends. The threads are daemons, so the process can exit while some hang.

    `Thread.start` waits until the new thread runs, which is slow next to computing threads: 16 such tools blocked the loop for
    0.2 s. So a call only puts work into a queue, and a thread that takes work starts the next thread.
    """

    def __init__(self, purpose: str, most: int) -> None:
        """`most`: concurrent calls, not counting abandoned ones, so that the event loop gets its share of time."""
        self._purpose, self.most = purpose, most
        self._begin()
        after_fork(self, DaemonThreads._begin)

    def _begin(self) -> None:
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._abandoned: Counter[str] = Counter()
        self._work: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._free = 0  # threads that wait for work, or soon will
        self._lock = threading.Lock()

    def slot(self) -> asyncio.Semaphore:
        """Return the semaphore to hold during `call`; a deadline of the call starts after it is acquired."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self.most)
        return self._semaphores[loop]

    async def call(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function in a thread, with the caller's context variables. Raises what the function raises, and HungError if
        `MOST_ABANDONED` calls of that name hang."""
        if self._abandoned[name] >= MOST_ABANDONED:
            raise HungError(
                f"{self._purpose} {name}: {self._abandoned[name]} calls hang in threads that cannot be killed, "
                "so no more are started"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        given_up = over = False

        def run(call: Callable[[], R]) -> None:
            nonlocal over
            settle: Callable[[], None]
            try:
                settle = partial(_settle, answer, result=call())
            except BaseException as fault:
                if not isinstance(fault, Exception | SystemExit | asyncio.CancelledError) or isinstance(fault, StopIteration):
                    # A future refuses it, or it would end the program: a Rust panic, or KeyboardInterrupt from a policy's code.
                    fault = RuntimeError(fault_text(fault)).with_traceback(fault.__traceback__)
                settle = partial(_settle, answer, fault=fault)
            # One lock for this and the caller's cancellation below: exactly one sees the other, so that the count of abandoned
            # calls is raised and lowered in pairs.
            with self._lock:
                over = True
                self._abandoned[name] -= given_up
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is left
                loop.call_soon_threadsafe(settle)

        work = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
        with self._lock:
            first, self._free = self._free == 0, max(self._free, 1)
        if first:
            self._start()
        self._work.put((name, partial(run, work)))
        try:
            return await answer
        except asyncio.CancelledError:
            with self._lock:
                if not over:
                    given_up = True
                    self._abandoned[name] += 1
            raise

    def _start(self) -> None:
        try:
            threading.Thread(target=self._serve, daemon=True, name=f"agentrl-{self._purpose}").start()
        except RuntimeError:  # no more threads are available: the next call tries again
            with self._lock:
                self._free -= 1
            raise

    def _serve(self) -> None:
        thread, idle = threading.current_thread(), threading.current_thread().name
        while True:
            try:
                name, work = self._work.get(timeout=_IDLE_S)
            except Empty:
                with self._lock:
                    if self._free > 1:  # more idle threads than needed
                        self._free -= 1
                        return
                continue
            with self._lock:
                last, self._free = self._free == 1, max(self._free - 1, 1)
            if last:  # before the work, which may hang
                with contextlib.suppress(RuntimeError):
                    self._start()
            thread.name = f"{idle} {name}"
            work()
            thread.name = idle
            with self._lock:
                self._free += 1


TOOLS = DaemonThreads("tool", 64)
SCORING = DaemonThreads("reward spec", 8)


def _settle(answer: asyncio.Future[Any], result: Any = None, fault: BaseException | None = None) -> None:
    if answer.done():  # cancelled: the caller is gone
        return
    if fault is None:
        answer.set_result(result)
    else:
        answer.set_exception(fault)


# A background event loop


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="agentrl-loop", daemon=True)
        self.thread.start()

    @property
    def here(self) -> bool:
        """True if called in this thread, which must not wait for its own loop."""
        return threading.current_thread() is self.thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                return self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio leaves the loop with them. Continue, so that their caller gets them.
                continue


_lock = fork_safe(threading.Lock())
_held: dict[str, LoopThread] = {}
os.register_at_fork(after_in_child=_held.clear)


def background(purpose: str = "") -> LoopThread:
    """Return this process's background loop for `purpose`, started on first use."""
    with _lock:
        if purpose not in _held:
            _held[purpose] = LoopThread()
        return _held[purpose]
