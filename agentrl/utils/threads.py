"""Threads by purpose, and an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from agentrl.utils.errors import AgentrlError, HungError, fault_text, is_from_outside

# Threads by purpose: `in_thread` for this package's own work, which ends, and `DaemonThreads` for functions of users, which may
# never end. `asyncio.to_thread` puts all into one pool: six hung tool calls would keep a checkpoint from being committed.

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Lock = TypeVar("Lock")

Purpose = Literal["batch", "engine", "files", "load", "sandbox", "text", "update", "weights"]
_FEW: dict[Purpose, int] = {"batch": 1, "files": 2, "load": 2}

LONG_TEXT = 10_000
"""Characters from which on a thread works on a text: rendering that many takes about 4 ms, the way there and back 0.1."""

SWITCH_S = 0.001
"""Seconds after which a thread that computes hands the interpreter's lock on, if another wants it (Python's default is 0.005)."""

_IDLE_S = 10.0  # then a thread without work ends, but for one

MOST_ABANDONED = 256
"""Number of abandoned threads of one name that still run from which on no more calls of that name are started."""


_INHERITED: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def after_fork(held: T, renew: Callable[[T], object]) -> T:
    """`held`, for which `renew(held)` is called in every process that is forked from this one, before anything else there.

    A forked process (AsyncVectorEnv) has none of its parent's threads: pools and loops have nobody who works, and a lock that
    another thread held at that moment is never released.
    """
    _INHERITED[held] = renew
    return held


os.register_at_fork(after_in_child=lambda: [renew(held) for held, renew in list(_INHERITED.items())])


def fork_safe(lock: Lock) -> Lock:
    """A lock (`threading.Lock()` or `RLock()`) that is free in a forked process, unless the thread that forks holds it."""
    return after_fork(lock, _free)


def _free(lock: Any) -> None:
    if not (hasattr(lock, "_is_owned") and lock._is_owned()):
        lock._at_fork_reinit()  # as the standard library does to its own


def threads(most: int, name: str) -> ThreadPoolExecutor:
    """A pool of at most `most` threads, which is empty in a forked process and starts threads of its own there."""
    begin = partial(ThreadPoolExecutor.__init__, max_workers=most, thread_name_prefix=name)
    return after_fork(ThreadPoolExecutor(most, name), begin)


async def in_thread(purpose: Purpose, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)` in a thread of the pool for `purpose`, with the caller's context variables.

    Raises what the function raises. Cancelling the awaiting task does not end the thread.
    """
    call = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
    return await asyncio.get_running_loop().run_in_executor(_pool(purpose), call)


QUICK: contextvars.ContextVar[bool] = contextvars.ContextVar("agentrl_quick", default=False)
"""Whether work is tried on an event loop, so that what takes long raises TooLongError instead."""


class TooLongError(AgentrlError):
    """Work that was tried at once takes too long for an event loop, and has changed nothing."""


def at_once(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)`, on an event loop. Raises TooLongError if it notices that it takes long."""
    token = QUICK.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        QUICK.reset(token)


async def by_size(size: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)`: at once if it is about few characters (and does not take long for another reason), in a thread
    if they are `LONG_TEXT` or more."""
    if size < LONG_TEXT:
        try:  # not `suppress`: this runs twice for every call of a tool
            return at_once(function, *args, **kwargs)
        except TooLongError:
            pass
    return await in_thread("text", function, *args, **kwargs)


def size_of(value: Any, most: int = LONG_TEXT) -> int:
    """Characters of a value as JSON, roughly, counted up to `most`. Objects count as their attributes."""
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
    except BaseException as fault:  # of its own methods, which who reads all of it meets again
        if is_from_outside(fault):
            raise
        return most
    return size


def share_the_lock() -> None:
    """For a process with an event loop and tools in threads: `SWITCH_S`, unless the user has set less.

    Next to 16 threads that compute, a loop waited for the lock for up to 80 ms with Python's default. It costs these 3 % of
    their time, and nothing if only one wants the lock.
    """
    if sys.getswitchinterval() > SWITCH_S:
        sys.setswitchinterval(SWITCH_S)


@cache
def _pool(purpose: Purpose) -> ThreadPoolExecutor:
    return threads(_FEW.get(purpose, 4), f"agentrl-{purpose}")


class DaemonThreads:
    """A thread of its own for every call in progress, so that a call that hangs does not block others.

    A thread cannot be killed: a call whose caller is gone keeps running, its result is dropped, and it counts as abandoned
    until it ends. The threads are daemons: the process can exit even if some of them hang.

    `Thread.start` waits until the new thread has run, which next to threads that compute takes long: 16 such tools kept the loop
    from turning for 0.2 s. So it only puts work into a queue, and a thread that takes some starts the next one.
    """

    def __init__(self, purpose: str, most: int) -> None:
        """`most`: calls that run at once (not counting abandoned ones), so that the event loop still gets its share of time."""
        self._purpose, self.most = purpose, most
        self._begin()
        after_fork(self, DaemonThreads._begin)

    def _begin(self) -> None:
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._abandoned: Counter[str] = Counter()
        self._work: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._free = 0  # threads that wait for work, or are about to
        self._lock = threading.Lock()

    def slot(self) -> asyncio.Semaphore:
        """The semaphore to hold during `call`; a deadline of the call starts once it is acquired."""
        loop = asyncio.get_running_loop()
        if loop not in self._semaphores:
            self._semaphores[loop] = asyncio.Semaphore(self.most)
        return self._semaphores[loop]

    async def call(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """`function(*args, **kwargs)` with the caller's context variables. Raises what the function raises, and
        HungError if `MOST_ABANDONED` calls of that name hang."""
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
                    # A future refuses it, or it would end the program: a Rust library's panic, Ctrl-C in code of a policy.
                    fault = RuntimeError(fault_text(fault)).with_traceback(fault.__traceback__)
                settle = partial(_settle, answer, fault=fault)
            # Under one lock with the caller's cancellation below: exactly one of the two sees the other, so that the count of
            # abandoned calls is raised and lowered in pairs.
            with self._lock:
                over = True
                self._abandoned[name] -= given_up
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no caller left to notify
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
        except RuntimeError:  # no more threads are to be had: the next work tries again
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
                    if self._free > 1:  # this thread is one more than is needed
                        self._free -= 1
                        return
                continue
            with self._lock:
                last, self._free = self._free == 1, max(self._free - 1, 1)
            if last:  # before the work, which may never end
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
    if answer.done():  # cancelled: its caller is gone
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
        """True if the caller is in this thread, in which nothing of this loop can be waited for."""
        return threading.current_thread() is self.thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                return self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # asyncio leaves the loop with them. Their caller gets them only if the loop goes on.
                continue


_lock = fork_safe(threading.Lock())
_held: dict[str, LoopThread] = {}
os.register_at_fork(after_in_child=_held.clear)


def background(purpose: str = "") -> LoopThread:
    """The loop of this process for a purpose, started with its first work."""
    with _lock:
        if purpose not in _held:
            _held[purpose] = LoopThread()
        return _held[purpose]
