"""What the progress display shows, and how: a frame of a few lines on a terminal, or one plain line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

QUIET_S = 15.0
"""Seconds without progress after which an activity says what it waits for."""
BAR = 24
DETAIL_LINES = 3


def nothing() -> str:
    return ""


class Count:
    """How many of so many are done, by default episodes; called with each."""

    def __init__(self, total: int, unit: str = "episodes") -> None:
        self.done, self.total, self._unit = 0, total, unit

    def __call__(self, _: object) -> None:
        self.done += 1

    def __str__(self) -> str:
        return f"{self.done}/{self.total} {self._unit}"


@dataclass(slots=True)
class Activity:
    """What goes on within a step, since `began`. `look`: how far it is ("33/96 episodes"), `waits`: what it waits for; both are
    called from the display's thread. `usual`: the seconds that it took last time, None if this is the first."""

    what: str
    began: float
    look: Callable[[], str] = nothing
    waits: Callable[[], str] = nothing
    usual: float | None = None
    _seen: str = ""
    _moved: float | None = None

    def told(self, now: float) -> str:
        """In words, at the time `now`."""
        far = self.look()
        if far != self._seen or self._moved is None:
            self._seen, self._moved = far, now
        passed = f"{now - self.began:.0f} s" + (f" of ~{self.usual:.0f}" if self.usual is not None and self.usual >= 1 else "")
        waits = self.waits() if now - max(self._moved, self.began) >= QUIET_S else ""
        return "  ".join(part for part in (f"{self.what} {far}".rstrip(), passed, f"waits: {waits}" if waits else "") if part)


@dataclass(slots=True)
class Shown:
    """The state of the display. `values`: what a step said first, in plain lines too; `details`: what it said besides. `best`:
    the best training success of this phase; `held`: (success, updates) of the last evaluation, `best_held`: of the best one."""

    phase: str = ""
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


def plain_step(shown: Shown, now: float) -> str:
    """The line of a step."""
    return f"[{shown.phase}] {shown.done}/{shown.total}  " + "  ".join([*_said(shown), f"ETA {shown.eta(now)}"])


def plain_doing(shown: Shown, now: float) -> str:
    """The line of what goes on; "" if nothing does."""
    if not shown.doing:
        return ""
    where = f" {shown.done}/{shown.total}" if shown.total > 1 else ""
    return f"[{shown.phase}]{where}  {_doing(shown, now)}"


def frame(shown: Shown, now: float, width: int) -> Text:
    """The live display: at most 4 + DETAIL_LINES lines, none wider than `width`."""
    lines = [_first_line(shown, now, width)]
    if shown.doing:
        lines.append(Text(_cut(f"  {_doing(shown, now)}", width), style="cyan"))
        lines += [Text(_cut(f"  engine: {shown.engine}", width), style="cyan")] if shown.engine else []
    cells = [
        *_said(shown),
        *_held(shown),
        *(f"{key} {short(value)}" for key, value in shown.details.items() if value is not None),
    ]
    lines += [Text(line) for line in _flow(cells, width, DETAIL_LINES)]
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


def _first_line(shown: Shown, now: float, width: int) -> Text:
    name, several = shown.phase or "start", shown.total > 1
    count, left = f" {shown.done}/{shown.total}" if several else "", f"  ETA {shown.eta(now)}" if several else ""
    passed = f"  {clock(now - shown.began)}" if shown.phase else ""
    room = width - len(name) - len(count) - len(passed) - len(left) - 2
    if room < 0:
        return Text(_cut(f"{name}{count}{left}", width), style="bold")
    line = Text().append(name, style="bold")
    if several and room >= 8:
        size = min(BAR, room)
        full = size * shown.done // shown.total
        line.append("  " + "━" * full, style="green").append("─" * (size - full), style="dim")
    return line.append(f"{count}{passed}{left}")


def _doing(shown: Shown, now: float) -> str:
    """The innermost activity within the others."""
    *outer, last = shown.doing
    return "".join(f"{activity.what} > " for activity in outer) + last.told(now)


def _said(shown: Shown) -> Iterator[str]:
    for key, value in shown.values.items():
        if value is not None:
            best = f" (best {short(shown.best)})" if key == "success" and shown.best is not None and shown.best > value else ""
            yield f"{key} {short(value)}{best}"


def _held(shown: Shown) -> Iterator[str]:
    if shown.held is not None and shown.best_held is not None:
        best = f" (best {percent(shown.best_held[0])} at {shown.best_held[1]})" if shown.best_held[0] > shown.held[0] else ""
        yield f"held-out {percent(shown.held[0])}{best}"


def _flow(cells: Sequence[str], width: int, most: int) -> list[str]:
    """The cells in lines; those that do not fit into `most` lines are left out."""
    lines = [""]
    for cell in cells:
        if lines[-1] and len(lines[-1]) + 2 + len(cell) > width:
            lines.append("")
        lines[-1] += f"  {cell}"
    return [_cut(line, width) for line in lines[:most] if line]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"
