"""Ctrl-C: the first stops after the step, the second at once."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


class Interrupt:
    """Set by the first SIGINT or SIGTERM; the loop checks it between steps. A second one cancels.

    If there is no step to finish (`in_step` False: starting, warming up) the first one cancels.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.in_step = False
        self._say = say
        self._signalled = -math.inf
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
        before, self._signalled = self._signalled, time.monotonic()
        if self._signalled - before > TWICE or not has_parent():
            self.request()

    def request(self) -> None:
        """What a signal does."""
        if self._task is not None and (self.requested or not self.in_step):
            self.requested = True
            self._task.cancel()
            return
        self.requested = True
        self._say("interrupted: finishing the step and writing a checkpoint (Ctrl-C again stops at once)")
