"""Ctrl-C: the first stops after the step, the second at once."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.cluster.ray_parent import has_parent

TWICE = 0.1
"""Seconds in which two signals count as one if this process has a parent that passes them on: what is sent to a whole process
group comes from the sender and from that."""


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Inside, SIGTERM does what Ctrl-C does, KeyboardInterrupt, so that what is half made is removed. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Signals:
    """Tells signals apart: of two that come at once the second is none of its own, if a parent passes them on."""

    def __init__(self) -> None:
        self._last = -math.inf

    def another(self) -> bool:
        """Whether the one that has come now counts."""
        before, self._last = self._last, time.monotonic()
        return self._last - before > TWICE or not has_parent()


@contextmanager
def put_off(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, for the last lines of a run that is over, the first SIGINT or SIGTERM is told that there is nothing more to stop;
    the second is KeyboardInterrupt, for there may be a tracker that does not end. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals, told = _Signals(), False

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not signals.another():
            return
        if told:
            raise KeyboardInterrupt
        told = True
        say("interrupted: the run has stopped, its summary is being written (Ctrl-C again leaves that)")

    before = [(number, signal.signal(number, tell)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


class Interrupt:
    """Set by the first SIGINT or SIGTERM; the loop checks it between steps. A second one cancels.

    If there is no step to finish (`in_step` False: starting, warming up) the first one cancels.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.in_step = False
        self._say = say
        self._signals = _Signals()
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM for the running event loop. Outside of the main thread there are no signals: whoever waits
        for this one there calls `press`."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signal)

    def press(self) -> None:
        """`request`, from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request)
        else:  # it has not begun, or is over
            self.requested = True

    def _signal(self) -> None:
        if self._signals.another():
            self.request()

    def request(self) -> None:
        """What a signal does."""
        if self._task is not None and (self.requested or not self.in_step):
            self.requested = True
            self._task.cancel()
            return
        self.requested = True
        self._say("interrupted: finishing the step and writing a checkpoint (Ctrl-C again stops at once)")
