"""Ctrl-C and other stop signals of a run."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from agentrl.cluster.ray_parent import has_parent, stop_signals

TWICE = 0.1
"""Seconds in which two signals count as one if this process has a parent that passes them on: a signal to a whole process
group comes from the sender and from that."""

BLOCKED = 1.0
"""Seconds in which the event loop has to learn of a signal; else what blocks it is left, if there is no step to finish."""


@contextmanager
def ended_as_interrupted(handler: Callable[[int, FrameType | None], None] = signal.default_int_handler) -> Iterator[None]:
    """Inside, `handler` gets the stop signals; by default each does what Ctrl-C does, KeyboardInterrupt, so that half-made files
    are removed. Only in the main thread: others have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in stop_signals()]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def _another(times: list[float]) -> bool:
    """Return True if the signal that has come now counts, after those at `times`: of two that come at once the second is not one
    of its own, if a parent passes them on."""
    times.append(time.monotonic())
    return len(times) < 2 or times[-1] - times[-2] > TWICE or not has_parent()


@contextmanager
def put_off(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, for the last lines of a run that is over, the first stop signal is answered that nothing is left to stop; the
    second is KeyboardInterrupt, for there may be a tracker that does not end."""
    times, told = list[float](), False

    def tell(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not _another(times):
            return
        if told:
            raise KeyboardInterrupt
        told = True
        say("interrupted: the run has stopped, its summary is being written (Ctrl-C again leaves that)")

    with ended_as_interrupted(tell):
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
        self._times = list[float]()
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
        elif _another(self._times):
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

        def again() -> None:
            """Have a blocked main thread, and no other, leave what it is in: a call of Ray's, say, which looks for signals."""
            if self._unheard:
                self._blocked, main = True, threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, number)

        look = threading.Timer(BLOCKED, again)
        look.daemon = True
        look.start()

    def _end_start(self) -> None:
        if not self.requested:
            self.requested = True
            with suppress(RuntimeError):  # the signal came while a line was written
                self._say("interrupted: ending the started processes (Ctrl-C again stops at once)")

    def request(self) -> None:
        """Do as after a signal."""
        if self._task is not None and (self.requested or not self.in_step):
            self._end_start()
            self._task.cancel()
            return
        self.requested = True
        self._say("interrupted: finishing the step and writing a checkpoint (Ctrl-C again stops at once)")
