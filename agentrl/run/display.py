"""The progress display of a run: a live frame on a terminal, plain lines in a file or a pipe."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agentrl.utils.redaction import redact_said
from agentrl.utils.terminal import console as safe_console
from agentrl.utils.terminal import safe

# The frame

QUIET_S = 15.0
"""Seconds without progress after which the display shows the cause of an activity's wait."""
BAR = 24
DETAIL_LINES = 3


class Count:
    """Counter of finished items, by default episodes; call it once per item, `str` shows it."""

    def __init__(self, total: int, unit: str = "episodes") -> None:
        self.done, self.total, self._unit = 0, total, unit

    def __call__(self, _: object) -> None:
        self.done += 1

    def __str__(self) -> str:
        return f"{self.done}/{self.total} {self._unit}"


@dataclass(slots=True)
class Activity:
    """Activity within a step, begun at the monotonic time `began`. `progress` returns how far it is ("33/96 episodes"),
    `waits` the cause of its wait; the display's thread calls both. `usual`: seconds that it took last time, or None. `outer`:
    the activities that contain it ("evaluation > ")."""

    what: str
    began: float
    progress: Callable[[], str] = str
    waits: Callable[[], str] = str
    usual: float | None = None
    outer: str = ""
    _seen: str = ""
    _moved: float | None = None

    def describe(self, now: float) -> str:
        """Describe the activity at the time `now`: progress, seconds, and the cause of a long wait."""
        far = self.progress()
        if far != self._seen or self._moved is None:
            self._seen, self._moved = far, now
        passed = f"{now - self.began:.0f} s" + (f" of ~{self.usual:.0f}" if self.usual is not None and self.usual >= 1 else "")
        waits = self.waits() if now - max(self._moved, self.began) >= QUIET_S else ""
        return f"{self.outer}{self.what} {far}".rstrip() + f"  {passed}" + (f"  waits: {waits}" if waits else "")


@dataclass(slots=True)
class Shown:
    """State of the display. `values`: main figures of a step, also in plain lines; `details`: its other figures. `best`: best
    training success of this phase; `held`: (success, updates) of the last held-out evaluation, `best_held`: of the best one."""

    phase: str = "start"
    total: int = 0
    first: int = 0
    done: int = 0
    began: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    best: float | None = None
    held: tuple[float, int] | None = None
    best_held: tuple[float, int] | None = None
    doing: tuple[Activity, ...] = ()
    engine: str = ""
    trouble: str = ""

    def eta(self, now: float) -> str:
        """Estimate the time left in the phase from the steps of this process (without those before a resume)."""
        steps = self.done - self.first
        if steps <= 0:
            return "--:--"
        return clock((now - self.began) / steps * max(0, self.total - self.done))


PLAIN_DETAILS = ("kl to reference", "kl behaviour", "entropy", "grad norm", "lr")
"""Details that plain lines show too, because they show whether the policy still changes."""


def plain_step(shown: Shown, now: float) -> str:
    """Format the line of a step, without details that are 0 or unknown."""
    details = [f"{key} {short(shown.details[key])}" for key in PLAIN_DETAILS if shown.details.get(key)]
    return f"[{shown.phase}] {shown.done}/{shown.total}  " + "  ".join([*_main_figures(shown), *details, f"ETA {shown.eta(now)}"])


def frame(shown: Shown, now: float, width: int) -> Text:
    """Draw the live display: at most 4 + DETAIL_LINES lines, none wider than `width`."""
    # Phase, bar, count, time and ETA; a narrow terminal drops first the bar, then the time.
    name, several = shown.phase, shown.total > 1
    count, left = f" {shown.done}/{shown.total}" if several else "", f"  ETA {shown.eta(now)}" if several else ""
    passed = f"  {clock(now - shown.began)}"
    room = width - len(name) - len(count) - len(passed) - len(left) - 2
    first = Text().append(name, style="bold") if room >= 0 else Text(_cut(f"{name}{count}{left}", width), style="bold")
    if several and room >= 8:
        size = min(BAR, room)
        full = size * shown.done // shown.total
        first.append("  " + "━" * full, style="green").append("─" * (size - full), style="dim")
    lines = [first.append(f"{count}{passed}{left}") if room >= 0 else first]
    if shown.doing:
        lines.append(Text(_cut(f"  {shown.doing[-1].describe(now)}", width), style="cyan"))
        lines += [Text(_cut(f"  engine: {shown.engine}", width), style="cyan")] if shown.engine else []
    held, top = shown.held, shown.best_held
    best = f" (best {percent(top[0])} at {top[1]})" if held is not None and top is not None and top[0] > held[0] else ""
    cells = [
        *_main_figures(shown),
        *([] if held is None else [f"held-out {percent(held[0])}{best}"]),
        *(f"{key} {short(value)}" for key, value in shown.details.items() if value is not None),
    ]
    flow = [""]
    for cell in cells:
        if flow[-1] and len(flow[-1]) + 2 + len(cell) > width:
            flow.append("")
        flow[-1] += f"  {cell}"
    lines += [Text(_cut(line, width)) for line in flow[:DETAIL_LINES] if line]  # further details are left out
    if shown.trouble:
        lines.append(Text(_cut(f"  {shown.trouble}", width), style="yellow"))
    return Text("\n", no_wrap=True).join(lines)


def clock(seconds: float) -> str:
    """Format seconds as 1:02, or 1:02:03 from one hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(value: Any) -> str:
    """Format a number with about three significant digits; a string stays as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def percent(value: float | None) -> str:
    """Format a rate in percent; "-" if it is unknown."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _main_figures(shown: Shown) -> Iterator[str]:
    for key, value in shown.values.items():
        if value is not None:
            best = f" (best {short(shown.best)})" if key == "success" and shown.best is not None and shown.best > value else ""
            yield f"{key} {short(value)}{best}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


log = logging.getLogger(__name__)

_PLAIN_EVERY_S = 5.0
_PLAIN_MAX_S = 40.0
"""Maximum seconds between plain lines about one activity; the pause between them doubles up to it."""
_BEAT_S = 1.0
EMPTY: Mapping[str, Any] = MappingProxyType({})

_CLOSED = "agentrl: the reader of this output has closed it (`| head`), so the command ends; write to a file instead, `> log`"


class Display:
    """Progress display: phase, step, activity, success and its best, and other figures. Use as a context manager.

    `live`: redraw a frame instead of printing lines; by default (None) on a capable terminal outside of CI. `trouble`: returns
    the faults so far, or ""; shown once, at the first fault. `took`: seconds of each activity the last time. Thread-safe.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
        phase: str = "start",
    ) -> None:
        self.console = console or safe_console(gone=_CLOSED, file=sys.stdout, highlight=False, soft_wrap=True)
        self.trouble: Callable[[], str] = str
        self._respawns = 0.0
        self._wanted = animates(self.console) if live is None else live
        self._now = now
        self._live: Live | None = None
        self._last = Text()
        self._shown = Shown(phase, began=now())
        self.took: dict[str, float] = {}
        self._printed, self._pause = 0.0, _PLAIN_EVERY_S
        self._stepped = -math.inf  # time of the last printed step, in plain output
        self._trouble_said = self._unread = False
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        if self._wanted:
            self._live = Live(get_renderable=self._frame, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        self._thread = threading.Thread(target=self._beats, daemon=True, name="agentrl-display")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        try:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._print_last_step()
        finally:  # also after another Ctrl-C, because `stop` restores the terminal's cursor
            if self._live is not None:
                self._live.stop()
                self._live = None

    # -- changes of the state ----------------------------------------------------------------------

    def phase(self, name: str, total: int, first: int = 0) -> None:
        """Start a phase of `total` steps; a resumed run has already done `first`."""
        self._print_last_step()
        before = self._shown
        self._shown = Shown(
            name, total, first, first, self._now(), held=before.held, best_held=before.best_held, doing=before.doing
        )
        self._printed, self._pause, self._stepped = 0.0, _PLAIN_EVERY_S, -math.inf
        if self._live is None:
            self.say(f"[{name}] {total} steps" if total > 1 else f"[{name}]")
            self._printed = 0.0

    def step(self, done: int, values: Mapping[str, Any], details: Mapping[str, Any] = EMPTY) -> None:
        """Show that `done` steps of the phase are done, with `values` such as success and tokens/s. The frame shows all
        `details`, plain lines PLAIN_DETAILS. Plain output has the first and the last step, and otherwise one every few
        seconds."""
        shown, now = self._shown, self._now()
        success = values.get("success")
        if success is not None:
            shown.best = success if shown.best is None else max(shown.best, success)
        shown.done, shown.values, shown.details = done, dict(values), dict(details)
        if self._live is None and (done >= shown.total or now - self._stepped >= _PLAIN_EVERY_S):
            self._printed, self._pause, self._stepped = now, _PLAIN_EVERY_S, now
            self.say(plain_step(shown, now))

    @contextmanager
    def doing(self, what: str, progress: Callable[[], str] = str, waits: Callable[[], str] = str) -> Iterator[None]:
        """Show an activity inside the current one until exit; `progress` and `waits` as in `Activity`."""
        began, within = self._now(), self._shown.doing
        outer = f"{within[-1].outer}{within[-1].what} > " if within else ""
        activity = Activity(what, began, progress, waits, self.took.get(what), outer)
        self._shown.doing = (*within, activity)
        self._pause = _PLAIN_EVERY_S
        try:
            yield
        finally:
            self._shown.doing = tuple(other for other in self._shown.doing if other is not activity)
            self.took[what] = self._now() - began

    def show_evaluation(self, step: int, success: float | None) -> None:
        if success is not None:
            shown, held = self._shown, (success, step)
            shown.held = held
            shown.best_held = held if shown.best_held is None or success > shown.best_held[0] else shown.best_held

    def engine(self, what: str, respawns: float = 0) -> None:
        """Show the engine's activity in the frame ("": none). Prints a warning if `respawns` has grown."""
        self._shown.engine = what
        if respawns > self._respawns:
            self._respawns = respawns
            self.say("warning: a replica of the engine died and is being replaced; log.txt has the cause")

    def say(self, text: str) -> None:
        """Print a permanent line. Raises SystemExit, once, if the display's thread found the output closed by its reader."""
        if self._unread:
            self._unread = False
            raise SystemExit(1)
        self.console.print(safe(redact_said(text)), markup=False)  # paths and messages may contain [brackets]

    def warn(self, text: str) -> None:
        """Print a permanent warning, and log it if there is a log."""
        if log.hasHandlers():  # else logging's last-resort handler would print it a second time
            log.warning(text)
        self.say(f"warning: {text}")

    # -- the display's thread ----------------------------------------------------------------------

    def beat(self) -> None:
        """Print lines that are due: the first trouble, and in plain output a line about a long activity."""
        self._shown.trouble = self.trouble()
        if self._shown.trouble and not self._trouble_said:
            self._trouble_said = True
            self.say(f"warning: {self._shown.trouble}")
        shown, now = self._shown, self._now()
        if self._live is not None or not shown.doing:
            return
        if now - max(self._printed, shown.doing[-1].began) >= self._pause:
            self._printed, self._pause = now, min(2 * self._pause, _PLAIN_MAX_S)
            where = f" {shown.done}/{shown.total}" if shown.total > 1 else ""
            self.say(f"[{shown.phase}]{where}  {shown.doing[-1].describe(now)}")

    def _beats(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            try:
                self.beat()
            except SystemExit:  # the reader has closed the output, and an exit would end this thread alone
                self._unread = True
                return
            except Exception:  # other threads change the state that it reads, and the display must never end a run
                log.exception("the display failed")

    def _frame(self) -> Text:
        try:
            self._last = frame(self._shown, self._now(), self.console.width)
        except Exception:  # as in `_beats`
            log.exception("the display failed")
        return self._last

    def _print_last_step(self) -> None:
        """Print the line of the frame's last step, before the frame is removed."""
        if self._live is not None and self._shown.values:
            self.say(plain_step(self._shown, self._now()))


@contextmanager
def shown_working(phase: str, what: str) -> Iterator[None]:
    """Show the progress of a long command on stderr, since its output may be for a program."""
    console = safe_console(gone=_CLOSED, file=sys.stderr, highlight=False, soft_wrap=True)
    with Display(console, phase=phase) as display, display.doing(what):
        yield


def animates(console: Console) -> bool:
    """Return True if a frame can be redrawn in place: on a terminal with a movable cursor, outside of CI (whose logs keep all).

    Asks the file itself, because with FORCE_COLOR rich takes any pipe for a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal and not os.environ.get("CI")
