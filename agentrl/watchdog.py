"""A watchdog for event loops: it says what kept one from turning, while it does.

All episodes of a loop wait while one call holds it: a tool written as a coroutine that sleeps or computes, a reward spec, a
long text. `LoopWatchdog` is a thread that asks the loop for a sign of life a few times a second. If none comes within the
limit, it reads the loop thread's stack, as often as it stays silent, and names the call: the innermost frame of the user's own
code if there is one, and the episode. `agentrl/deadline.py` sees to it that such time is on no episode's account.
"""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import logging
import os
import queue
import selectors
import sys
import sysconfig
import threading
import time
from asyncio import events
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import thread
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Literal

log = logging.getLogger(__name__)

EPISODE: ContextVar[str] = ContextVar("agentrl_episode", default="")
"""The key of the episode that the running code belongs to; "" outside of episodes. Set by `rollout.replay.tape.in_episode`."""

STILL = 10.0
"""Seconds after which a loop that is still silent is reported without waiting for its end."""
MOST_PLACES = 32
"""Places that are told of; of more than that only the seconds are counted."""

Owner = Literal["user", "package", "library"]

_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = [Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")]
_WAITING = frozenset({selectors.__file__, threading.__file__, queue.__file__, thread.__file__, connection.__file__})
_IDLE = {"_Crew._next", "_pass_on"}  # where a thread waits: of `executors` for a call, of `redaction` for a line of a program
_RUN = events.Handle._run.__code__


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of code, and whose it is: the user's (an environment, a tool, a plug-in), this package's, or a library's."""

    file: str
    line: int
    function: str
    owner: Owner

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{_short(self.file)}:{self.line} in {self.function}" + (f" (`{code}`)" if code else "")


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """A time in which a loop did not turn. `share`: of the looks at its stack that found `place`; 0.0 if the call was over
    before its stack could be read, with `place` None. `inner`: what `place` had called."""

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
class _Looks:
    """What was seen of one block so far."""

    found: Counter[tuple[CodeLine | None, str]] = field(default_factory=Counter)
    inner: dict[CodeLine | None, CodeLine | None] = field(default_factory=dict)

    def look(self, ident: int) -> None:
        """One look at the loop's thread. If the loop itself only waits, a thread that keeps the interpreter's lock is named."""
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


class LoopWatchdog:
    """Watches one event loop from a thread of its own. `start` it in the loop, `stop` it before the loop closes.

    `limit`: seconds of silence from which on a block is counted and told of (it is seen for certain from twice that on);
    0 turns the watchdog off. `say`: gets one line per place, on the loop, the first time that it blocks. `worst`: the longest
    block so far. Time in which the loop's thread waited for a processor that other programs used is not counted.
    """

    def __init__(self, limit: float, say: Callable[[str], None] = log.warning, name: str = "the event loop") -> None:
        self.limit = limit
        self.worst: LoopBlock | None = None
        self._say, self._name = say, name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._over, self._turned = threading.Event(), threading.Event()
        self._answered = self._blocked = self._longest = 0.0
        self._told: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Watch the running loop; nothing if the limit is 0."""
        if self.limit <= 0:
            return
        self._loop = asyncio.get_running_loop()
        ident, native = threading.get_ident(), threading.get_native_id()
        self._thread = threading.Thread(target=self._watch, args=(ident, native), daemon=True, name="agentrl-watchdog")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; idempotent. What was counted stays."""
        self._over.set()
        self._turned.set()  # it may be waiting for the loop, which is this very thread
        if self._thread is not None:
            self._thread.join(1.0)
            self._thread = None

    def read(self) -> dict[str, float]:
        """Since the last reading: `loop/blocked_s`, the seconds of all blocks, and `loop/longest_s`, those of the longest."""
        found = {"loop/blocked_s": self._blocked, "loop/longest_s": self._longest}
        self._blocked = self._longest = 0.0
        return found

    # -- in the watchdog's thread ------------------------------------------------------------------

    def _watch(self, ident: int, native: int) -> None:
        with _Processor(native, threading.get_native_id()) as processor:
            while True:
                processor.begin()
                due = time.monotonic() + self.limit
                if self._over.wait(self.limit):
                    return
                looks = _Looks()
                if time.monotonic() - due > self.limit:
                    # A call that keeps the interpreter's lock (a regular expression, a sort) keeps this thread waiting too. It
                    # has just ended, and the stack is still that of its caller.
                    looks.look(ident)
                self._turned.clear()
                if not self._ask(self._turn):
                    return
                if looks.found or not self._turned.wait(self.limit):
                    self._follow(ident, due, looks, processor)

    def _ask(self, call: Callable[..., None], *args: object) -> bool:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _turn(self) -> None:
        """Runs on the loop: its sign of life."""
        self._answered = time.monotonic()
        self._turned.set()

    def _follow(self, ident: int, since: float, looks: _Looks, processor: _Processor) -> None:
        """Look at the stack until the loop turns, then count and tell."""
        pause, still = self.limit / 4, STILL
        while not self._turned.is_set():
            looks.look(ident)
            self._turned.wait(pause)
            pause = min(pause * 1.5, 1.0)
            if (passed := time.monotonic() - since) > still:
                log.warning("%s has stood still for %s, and still does", self._name, looks.block(passed))
                still *= 10
        seconds = self._answered - since - processor.waited()
        if self._over.is_set() or seconds < self.limit:
            return
        block = looks.block(seconds)
        self._blocked += seconds
        self._longest = max(self._longest, seconds)
        if self.worst is None or seconds > self.worst.seconds:
            self.worst = block
        key = (block.place.file, block.place.function) if block.place is not None else ("", "")
        if key not in self._told and len(self._told) < MOST_PLACES:
            self._told.add(key)
            self._ask(self._say, f"{self._name} stood still for {block}: every episode waited (docs/rollouts.md)")


@contextlib.contextmanager
def watched(limit: float, say: Callable[[str], None] = log.warning, name: str = "the event loop") -> Iterator[LoopWatchdog]:
    """A watchdog of the running loop."""
    watchdog = LoopWatchdog(limit, say, name)
    watchdog.start()
    try:
        yield watchdog
    finally:
        watchdog.stop()


class _Processor:
    """Seconds in which threads were ready and other programs had the processors (Linux's schedstat; else always 0)."""

    def __init__(self, *natives: int) -> None:
        self._files: list[int] = []
        with contextlib.suppress(OSError):
            for native in natives:
                self._files.append(os.open(f"/proc/self/task/{native}/schedstat", os.O_RDONLY))
        self._before = self._read()

    def __enter__(self) -> _Processor:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def begin(self) -> None:
        """Count from here."""
        self._before = self._read()

    def waited(self) -> float:
        """Seconds since `begin`, of the thread that waited longest."""
        return max((now - then for now, then in zip(self._read(), self._before, strict=True)), default=0.0)

    def _read(self) -> list[float]:
        try:
            return [int(os.pread(file, 99, 0).split()[1]) * 1e-9 for file in self._files]
        except (OSError, ValueError, IndexError):
            return [0.0] * len(self._files)


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for work, for another thread, or for what a socket brings."""
    return frame.f_code.co_filename in _WAITING or frame.f_code.co_qualname in _IDLE


def _of_one_call(frame: FrameType) -> tuple[list[FrameType], str]:
    """The frames of what the loop runs just now, innermost first, and its episode."""
    stack: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        if at.f_code is _RUN:
            # Tasks have a copy of the context that they were made in, so those that an episode makes have its key too.
            return stack, str(at.f_locals["self"]._context.get(EPISODE, ""))
        stack.append(at)
        at = at.f_back
    return stack, ""


def _place(stack: list[FrameType]) -> tuple[CodeLine | None, CodeLine | None]:
    """The innermost line of the user's code, else of this package's, else of any; and the innermost line of all if it differs."""
    places = [CodeLine(f.f_code.co_filename, f.f_lineno or 0, f.f_code.co_qualname, _owner(f.f_code.co_filename)) for f in stack]
    if not places:
        return None, None
    chosen = next((p for owner in ("user", "package") for p in places if p.owner == owner), places[0])
    return chosen, places[0] if places[0] != chosen else None


@cache
def _owner(file: str) -> Owner:
    """Whose code a file is. Content that the package brings along (`_shelf`) counts as the user's, who may have changed it."""
    if file.startswith("<"):  # made by a library (a dataclass, a named tuple)
        return "library"
    path = Path(file).resolve()
    if path.is_relative_to(_PACKAGE):
        return "user" if path.is_relative_to(_PACKAGE / "_shelf") else "package"
    return "library" if any(path.is_relative_to(folder) for folder in _LIBRARIES) else "user"


def _short(file: str) -> str:
    """A path as one reads it: relative to the working folder, or to where its library is installed."""
    for folder in (Path.cwd(), _PACKAGE.parent, *_LIBRARIES):
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file
