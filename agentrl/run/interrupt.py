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

SAME_SIGNAL_S = 0.1
"""Seconds within which two signals count as one if a parent forwards signals: a signal to the process group arrives twice."""

BLOCKED_S = 1.0
"""Seconds for the event loop to handle a signal; then the blocking call is interrupted, if there is no step to finish."""


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None] = signal.default_int_handler) -> Iterator[None]:
    """Install `handler` for the stop signals inside the context; only in the main thread, which alone gets signals. The
    default handler raises KeyboardInterrupt, so that unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in stop_signals()]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def _count_signal(times: list[float]) -> bool:
    """Record a signal in `times` and return True if it counts; a copy forwarded by the parent does not."""
    times.append(time.monotonic())
    return len(times) < 2 or times[-1] - times[-2] > SAME_SIGNAL_S or not has_parent()


@contextmanager
def ignore_first_signal(say: Callable[[str], None]) -> Iterator[None]:
    """Ignore the first stop signal while a finished run writes its summary; `say` reports it. The second signal raises
    KeyboardInterrupt, because a tracker may hang."""
    times, reported = list[float](), False

    def report(number: int, frame: FrameType | None) -> None:
        nonlocal reported
        if not _count_signal(times):
            return
        if reported:
            raise KeyboardInterrupt
        reported = True
        say("interrupted: the run has stopped and is writing its summary (Ctrl-C again stops that too)")

    with handle_stop_signals(report):
        yield


class Interrupt:
    """Stop request of a run: the first stop signal sets `requested`, which the loop checks between steps; a second one cancels.

    If there is no step to finish (`in_step` False: starting, warming up) the first signal cancels, even while a call such as the
    start of Ray blocks the event loop.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self.in_step = False
        self._say = say
        self._times = list[float]()
        self._unhandled, self._blocked, self._ignored = False, False, 0
        self._task: asyncio.Task[object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def install(self) -> None:
        """Handle the stop signals in the running event loop; they cancel the current task. Outside of the main thread there are
        no signals: call `press` instead."""
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            return
        for number in stop_signals():
            self._loop.add_signal_handler(number, self._on_loop_signal)
            signal.signal(number, self._on_signal)  # the wakeup descriptor still makes the loop call `_on_loop_signal`

    def press(self) -> None:
        """Call `request` from another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.request)
        else:  # the loop has not started, or has ended
            self.requested = True

    def _on_loop_signal(self) -> None:
        self._unhandled = False
        if self._ignored:
            self._ignored -= 1
        elif _count_signal(self._times):
            self.request()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread at once; the loop calls `_on_loop_signal` later, unless it is blocked."""
        if self._blocked:
            self._blocked, self._ignored = False, 2  # the loop may still receive both signals while everything closes
            raise KeyboardInterrupt
        if self.in_step or self._unhandled or self._task is None or self._task.done():
            return
        self._unhandled = True
        self._end_start()

        def interrupt_call() -> None:
            """Interrupt a call that blocks the main thread, for example one of Ray, which checks for signals."""
            if self._unhandled:
                self._blocked, main = True, threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, number)

        timer = threading.Timer(BLOCKED_S, interrupt_call)
        timer.daemon = True
        timer.start()

    def _end_start(self) -> None:
        if not self.requested:
            self.requested = True
            with suppress(RuntimeError):  # the signal interrupted a write to the same stream
                self._say("interrupted: ending the started processes (Ctrl-C again stops at once)")

    def request(self) -> None:
        """Act as on a stop signal."""
        if self._task is not None and (self.requested or not self.in_step):
            self._end_start()
            self._task.cancel()
            return
        self.requested = True
        self._say("interrupted: finishing the step and writing a checkpoint (Ctrl-C again gives up the step)")
