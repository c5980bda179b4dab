"""Hooks into a run: callbacks after an update or a group, Ctrl-C, and the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from agentrl.cluster.ray_parent import has_parent, stop_signals
from agentrl.config import Choice
from agentrl.data.trajectory import Group
from agentrl.rollout.collector import called
from agentrl.utils.registry import Registry

# Callbacks


class Callback:
    """Watches a run, in the driver. Either method may be a coroutine function; what it raises ends the run and names it."""

    def on_step(self, row: Mapping[str, Any], session: Any) -> Any:
        """After update `row["step"]`: `row` is that of metrics.jsonl, `session` the live parts of the run (Session of
        run/session.py)."""
        return None

    def on_group(self, group: Group) -> Any:
        """A finished group with enough scored members, before anything decides whether it is trained."""
        return None


class Functions(Callback):
    """The same from functions."""

    def __init__(
        self,
        on_step: Callable[[Mapping[str, Any], Any], Any] | None = None,
        on_group: Callable[[Group], Any] | None = None,
    ) -> None:
        self._step, self._group = on_step, on_group

    def on_step(self, row: Mapping[str, Any], session: Any) -> Any:
        return None if self._step is None else self._step(row, session)

    def on_group(self, group: Group) -> Any:
        return None if self._group is None else self._group(group)

    def named(self, call: str) -> str:
        """The function's own name, by which what it raises is told."""
        function = self._step if call == "on_step" else self._group
        return str(getattr(function, "__qualname__", call))


CALLBACKS: Registry[Callable[..., Callback]] = Registry("callbacks", "CALLBACKS", "agentrl.run.callbacks")


class Callbacks:
    """All callbacks of a run, in order."""

    def __init__(self, choices: Sequence[Choice] = (), more: Sequence[Callback] = ()) -> None:
        """Raises ConfigError for an unknown name or argument."""
        self._all = [(choice.name, CALLBACKS.bind(choice.name, choice.args)()) for choice in choices]
        self._all += [(type(one).__name__, one) for one in more]

    async def step(self, row: Mapping[str, Any], session: Any) -> None:
        """Raises CallbackError."""
        for name, one in self._all:
            await called(f"callback on_step {_named(name, one, 'on_step')!r}", one.on_step, row, session)

    async def group(self, group: Group) -> None:
        """Raises CallbackError."""
        for name, one in self._all:
            await called(f"callback on_group {_named(name, one, 'on_group')!r}", one.on_group, group)


def check_callbacks(choices: Sequence[Choice]) -> None:
    """Raise ConfigError for an unknown callback or argument.

    Reads: callbacks.
    """
    for choice in choices:
        CALLBACKS.bind(choice.name, choice.args)


def _named(name: str, one: Callback, call: str) -> str:
    return one.named(call) if isinstance(one, Functions) else name


# Ctrl-C

TWICE = 0.1
"""Seconds in which two signals count as one if this process has a parent that passes them on: what is sent to a whole process
group comes from the sender and from that."""

BLOCKED = 1.0
"""Seconds in which the event loop has to learn of a signal; else what blocks it is left, if there is no step to finish."""


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Inside, every stop signal does what Ctrl-C does, KeyboardInterrupt, so that what is half made is removed."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets the stop signals. Only in the main thread: others have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in stop_signals()]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


class _Signals:
    """Tells signals apart: of two that come at once the second is none of its own, if a parent passes them on."""

    def __init__(self) -> None:
        self._last = -math.inf

    def another(self) -> bool:
        """Return True if the one that has come now counts."""
        before, self._last = self._last, time.monotonic()
        return self._last - before > TWICE or not has_parent()


@contextmanager
def put_off(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, for the last lines of a run that is over, the first stop signal is told that there is nothing more to stop; the
    second is KeyboardInterrupt, for there may be a tracker that does not end."""
    signals, told = _Signals(), False

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not signals.another():
            return
        if told:
            raise KeyboardInterrupt
        told = True
        say("interrupted: the run has stopped, its summary is being written (Ctrl-C again leaves that)")

    with _handled(tell):
        yield


class Interrupt:
    """Set by the first stop signal; the loop checks it between steps. A second one cancels.

    If there is no step to finish (`in_step` False: starting, warming up) the first one cancels, also while the event loop is
    blocked, as it is by the start of Ray.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.in_step = False
        self._say = say
        self._signals = _Signals()
        self._unheard, self._blocked, self._seen = False, False, 0
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Take over the stop signals for the running event loop. Outside of the main thread there are no signals: whoever waits
        for this one there calls `press`."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in stop_signals():
            self._loop.add_signal_handler(number, self._signal)
            signal.signal(number, self._at_once)  # the loop learns of the signal all the same, by its wakeup descriptor

    def press(self) -> None:
        """`request`, from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request)
        else:  # it has not begun, or is over
            self.requested = True

    def _signal(self) -> None:
        self._unheard = False
        if self._seen:
            self._seen -= 1
        elif self._signals.another():
            self.request()

    def _at_once(self, number: int, frame: FrameType | None) -> None:
        """Runs in whatever the main thread does when a signal comes; the loop then calls `_signal`, unless it is blocked."""
        if self._blocked:
            self._blocked, self._seen = False, 2  # of the two signals the loop may still learn, while all is being closed
            raise KeyboardInterrupt
        if self.in_step or self._unheard or self._task is None or self._task.done():
            return
        self._unheard = True
        self._end_start()
        look = threading.Timer(BLOCKED, self._again, (number,))
        look.daemon = True
        look.start()

    def _again(self, number: int) -> None:
        """Have a blocked main thread, and no other, leave what it is in: a call of Ray's, say, which looks for signals."""
        if self._unheard:
            self._blocked, main = True, threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, number)

    def _end_start(self) -> None:
        if not self.requested:
            self.requested = True
            with suppress(RuntimeError):  # the signal came while a line was written
                self._say("interrupted: ending what has started (Ctrl-C again stops at once)")

    def request(self) -> None:
        """Do as after a signal."""
        if self._task is not None and (self.requested or not self.in_step):
            self._end_start()
            self._task.cancel()
            return
        self.requested = True
        self._say("interrupted: finishing the step and writing a checkpoint (Ctrl-C again stops at once)")


# How often Python's cyclic garbage collector runs.

YOUNG_OBJECTS = 20_000


def raise_gc_threshold() -> None:
    """Collect once per 20,000 new objects instead of once per 700; a higher threshold set by the user stays.

    Rollouts keep what they allocate (messages, turns, ledgers), so a collection finds almost nothing, and with Python's
    default the collections took over a third of the time of a turn (benchmarks/rollout.py).
    """
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:  # 0: the user turned collection off
        gc.set_threshold(YOUNG_OBJECTS, *older)
