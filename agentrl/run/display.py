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
"""Seconds without progress after which an activity says what it waits for."""
BAR = 24
DETAIL_LINES = 3


class Count:
    """Progress of a count, by default of episodes; called with each."""

    def __init__(self, total: int, unit: str = "episodes") -> None:
        self.done, self.total, self._unit = 0, total, unit

    def __call__(self, _: object) -> None:
        self.done += 1

    def __str__(self) -> str:
        return f"{self.done}/{self.total} {self._unit}"


@dataclass(slots=True)
class Activity:
    """Activity within a step, since `began`. `look`: how far it is ("33/96 episodes"), `waits`: what it waits for; both are
    called from the display's thread. `usual`: the seconds that it took last time, None if this is the first. `outer`: the
    activities that it lies in ("evaluation > ")."""

    what: str
    began: float
    look: Callable[[], str] = str
    waits: Callable[[], str] = str
    usual: float | None = None
    outer: str = ""
    _seen: str = ""
    _moved: float | None = None

    def describe(self, now: float) -> str:
        """In words, at the time `now`."""
        far = self.look()
        if far != self._seen or self._moved is None:
            self._seen, self._moved = far, now
        passed = f"{now - self.began:.0f} s" + (f" of ~{self.usual:.0f}" if self.usual is not None and self.usual >= 1 else "")
        waits = self.waits() if now - max(self._moved, self.began) >= QUIET_S else ""
        return f"{self.outer}{self.what} {far}".rstrip() + f"  {passed}" + (f"  waits: {waits}" if waits else "")


@dataclass(slots=True)
class Shown:
    """The state of the display. `values`: a step's first figures, in plain lines too; `details`: its other figures. `best`:
    the best training success of this phase; `held`: (success, updates) of the last evaluation, `best_held`: of the best one."""

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
        """The time left of the phase, by the steps of this process: those before a resume took none of its time."""
        steps = self.done - self.first
        if steps <= 0:
            return "--:--"
        return clock((now - self.began) / steps * max(0, self.total - self.done))


PLAIN_DETAILS = ("kl to reference", "kl behaviour", "entropy", "grad norm", "lr")
"""Details that plain lines have too: whether the policy still moves, and how far."""


def plain_step(shown: Shown, now: float) -> str:
    """The line of a step. Details that are 0 or unknown are left out."""
    details = [f"{key} {short(shown.details[key])}" for key in PLAIN_DETAILS if shown.details.get(key)]
    return f"[{shown.phase}] {shown.done}/{shown.total}  " + "  ".join([*_said(shown), *details, f"ETA {shown.eta(now)}"])


def frame(shown: Shown, now: float, width: int) -> Text:
    """The live display: at most 4 + DETAIL_LINES lines, none wider than `width`."""
    # Phase, bar, count, time and ETA; a narrow terminal has no bar, and then no time.
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
        *_said(shown),
        *([] if held is None else [f"held-out {percent(held[0])}{best}"]),
        *(f"{key} {short(value)}" for key, value in shown.details.items() if value is not None),
    ]
    flow = [""]
    for cell in cells:
        if flow[-1] and len(flow[-1]) + 2 + len(cell) > width:
            flow.append("")
        flow[-1] += f"  {cell}"
    lines += [Text(_cut(line, width)) for line in flow[:DETAIL_LINES] if line]  # what does not fit into them is left out
    if shown.trouble:
        lines.append(Text(_cut(f"  {shown.trouble}", width), style="yellow"))
    return Text("\n", no_wrap=True).join(lines)


def clock(seconds: float) -> str:
    """1:02, or 1:02:03 from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(value: Any) -> str:
    """A number as one reads it in passing."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A rate in percent; "-" if it is unknown."""
    return "-" if value is None else f"{100 * value:.1f} %"


def _said(shown: Shown) -> Iterator[str]:
    for key, value in shown.values.items():
        if value is not None:
            best = f" (best {short(shown.best)})" if key == "success" and shown.best is not None and shown.best > value else ""
            yield f"{key} {short(value)}{best}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


log = logging.getLogger(__name__)

_PLAIN_EVERY_S = 5.0
_PLAIN_MOST_S = 40.0
"""Plain lines about one activity come less and less often, down to one in this many seconds."""
_BEAT_S = 1.0
_PER_SECOND = 4
NONE: Mapping[str, Any] = MappingProxyType({})

_GONE = "agentrl: what read this output is gone (`| head`), so the command ends here; let it go to a file, `> log`"


class Display:
    """Phase, step, its activity, success and its best, and other numbers. Use as a context manager.

    `live`: whether there is a frame that is drawn again and again; by default on a terminal that can do so, and not in CI.
    `trouble`: returns the faults so far, or ""; shown once, at the first fault. `took`: the seconds of each activity the last
    time. May be called from any thread.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool | None = None,
        now: Callable[[], float] = time.monotonic,
        phase: str = "start",
    ) -> None:
        self.console = console or safe_console(gone=_GONE, file=sys.stdout, highlight=False, soft_wrap=True)
        self.trouble: Callable[[], str] = str
        self._respawns = 0.0
        self._wanted = animates(self.console) if live is None else live
        self._now = now
        self._live: Live | None = None
        self._last = Text()
        self._shown = Shown(phase, began=now())
        self.took: dict[str, float] = {}
        self._printed, self._pause = 0.0, _PLAIN_EVERY_S
        self._stepped = -math.inf  # when the last step was printed, in plain output
        self._told = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Display:
        if self._wanted:
            self._live = Live(get_renderable=self._frame, console=self.console, refresh_per_second=_PER_SECOND, transient=True)
            self._live.start()
        self._thread = threading.Thread(target=self._beats, daemon=True, name="agentrl-display")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        try:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            self._keep()
        finally:  # also if Ctrl-C comes again: a terminal without its cursor is no place to work
            if self._live is not None:
                self._live.stop()
                self._live = None

    # -- what is shown -----------------------------------------------------------------------------

    def phase(self, name: str, total: int, first: int = 0) -> None:
        """Start a phase of `total` steps; a resumed run has done the first `first`."""
        self._keep()
        before = self._shown
        self._shown = Shown(
            name, total, first, first, self._now(), held=before.held, best_held=before.best_held, doing=before.doing
        )
        self._printed, self._pause, self._stepped = 0.0, _PLAIN_EVERY_S, -math.inf
        if self._live is None:
            self.say(f"[{name}] {total} steps" if total > 1 else f"[{name}]")
            self._printed = 0.0

    def step(self, done: int, values: Mapping[str, Any], details: Mapping[str, Any] = NONE) -> None:
        """Show that `done` steps of the phase are done, with values such as success and tokens/s; `details` in the frame, and
        PLAIN_DETAILS in plain lines. In plain output the first step is printed, then one every few seconds."""
        shown, now = self._shown, self._now()
        success = values.get("success")
        if success is not None:
            shown.best = success if shown.best is None else max(shown.best, success)
        shown.done, shown.values, shown.details = done, dict(values), dict(details)
        if self._live is None and (done >= shown.total or now - self._stepped >= _PLAIN_EVERY_S):
            self._printed, self._pause, self._stepped = now, _PLAIN_EVERY_S, now
            self.say(plain_step(shown, now))

    @contextmanager
    def doing(self, what: str, look: Callable[[], str] = str, waits: Callable[[], str] = str) -> Iterator[None]:
        """Show an activity meanwhile, within the current one; `look` and `waits` as in `Activity`."""
        began, within = self._now(), self._shown.doing
        outer = f"{within[-1].outer}{within[-1].what} > " if within else ""
        activity = Activity(what, began, look, waits, self.took.get(what), outer)
        self._shown.doing = (*within, activity)
        self._pause = _PLAIN_EVERY_S
        try:
            yield
        finally:
            self._shown.doing = tuple(other for other in self._shown.doing if other is not activity)
            self.took[what] = self._now() - began

    def show_evaluation(self, step: int, success: float | None) -> None:
        """A held-out evaluation after `step` updates."""
        if success is not None:
            shown, held = self._shown, (success, step)
            shown.held = held
            shown.best_held = held if shown.best_held is None or success > shown.best_held[0] else shown.best_held

    def engine(self, what: str, respawns: float = 0) -> None:
        """The engine's activity, for the frame; "": nothing that matters. More `respawns` than before are said."""
        self._shown.engine = what
        if respawns > self._respawns:
            self._respawns = respawns
            self.say("warning: a replica of the engine died and another is started; log.txt has the cause")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(safe(redact_said(text)), markup=False)  # paths and messages may contain [brackets]

    def warn(self, text: str) -> None:
        """Print a warning that stays, and log it if a log is kept."""
        if log.hasHandlers():  # else logging's last resort would print it, too
            log.warning(text)
        self.say(f"warning: {text}")

    # -- the display's thread ----------------------------------------------------------------------

    def beat(self) -> None:
        """Lines that are due now: trouble that is new, and in plain output a line about an activity that takes long."""
        self._shown.trouble = self.trouble()
        if self._shown.trouble and not self._told:
            self._told = True
            self.say(f"warning: {self._shown.trouble}")
        shown, now = self._shown, self._now()
        if self._live is not None or not shown.doing:
            return
        if now - max(self._printed, shown.doing[-1].began) >= self._pause:
            self._printed, self._pause = now, min(2 * self._pause, _PLAIN_MOST_S)
            where = f" {shown.done}/{shown.total}" if shown.total > 1 else ""
            self.say(f"[{shown.phase}]{where}  {shown.doing[-1].describe(now)}")

    def _beats(self) -> None:
        while not self._over.wait(_BEAT_S):
            try:
                self.beat()
            except Exception:  # what it looks at changes meanwhile; a run must not end because of how it is shown
                log.exception("the display failed")

    def _frame(self) -> Text:
        try:
            self._last = frame(self._shown, self._now(), self.console.width)
        except Exception:  # as in `_beats`
            log.exception("the display failed")
        return self._last

    def _keep(self) -> None:
        """A frame that ends leaves the line of its last step."""
        if self._live is not None and self._shown.values:
            self.say(plain_step(self._shown, self._now()))


@contextmanager
def shown_working(phase: str, what: str) -> Iterator[None]:
    """Show on stderr that a command is at work, if it takes long: its output may be for a program."""
    console = safe_console(gone=_GONE, file=sys.stderr, highlight=False, soft_wrap=True)
    with Display(console, phase=phase) as display, display.doing(what):
        yield


def animates(console: Console) -> bool:
    """Return True if frames can be drawn over one another: on a terminal that moves its cursor, outside of CI, whose logs keep
    all.

    Asked of the file itself: FORCE_COLOR makes rich take any pipe for a terminal."""
    return console.file.isatty() and not console.is_dumb_terminal and not os.environ.get("CI")
