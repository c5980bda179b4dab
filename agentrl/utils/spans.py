"""Durations in a run, as nested spans: a step, its parts, its episodes with their turns, calls and scores.

        with span("tool", call.name) as open:          None without a listener, which costs a tenth of a microsecond
        ...
        if open is not None:
            open.set(bytes=len(text))

A trace begins with a `root` span; spans opened inside it, also in its tasks and threads, belong to it. Times are those of the
monotonic clock, which all processes of a machine share. Listeners (`add_listener`) receive spans as they end: OpenTelemetry, the
timeline of a step, or in a rollout worker the connection to the driver."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from agentrl.utils.errors import fault_text
from agentrl.utils.threads import setting

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal[
    "step", "rollout", "batch", "update", "publish", "log", "evaluation", "checkpoint", "call", "bucket", "episode", "turn",
    "generation", "environment", "tool", "scoring",
]  # fmt: skip
Value = str | bool | int | float
now = time.monotonic_ns
HOMES = ("step", "rollout", "evaluation")


@dataclass(slots=True)
class TraceSpan:
    """One span of a trace; times in nanoseconds. `parent`: id of the enclosing span, 0 for a root. `track`: a timeline row, whose
    spans are nested or sequential, except concurrent calls. `sampled`: exported (the trace, and of an episode this episode).
    `place`: the process, "" for the driver."""

    kind: Kind
    name: str
    trace: int
    id: int
    parent: int
    begin: int
    track: str
    sampled: bool
    end: int = 0
    error: str = ""
    place: str = ""
    values: dict[str, Value | None] = field(default_factory=dict)

    def set(self, **values: Value | None) -> None:
        """Add values to the span; None: unknown."""
        self.values.update(values)


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Position in a trace: the parent `id` of new spans, and `home`, the parent of episodes (the phase of a step that runs
    them). `episodes`: the share of episodes that is exported."""

    trace: int
    id: int
    track: str
    sampled: bool
    home: int = 0
    episodes: float = 1.0

    def within(self, opened: TraceSpan) -> TracePlace:
        """Return the position inside a span that was opened here."""
        home = opened.id if opened.kind in HOMES else self.home
        return TracePlace(self.trace, opened.id, opened.track, self.sampled, home, self.episodes)


@dataclass(slots=True)
class _Listeners:
    """Listeners of this process. `all`: number of those that also receive spans that are not sampled."""

    each: tuple[Callable[[TraceSpan], None], ...] = ()
    all: int = 0
    open: dict[int, TraceSpan] = field(default_factory=dict)


_HERE: ContextVar[TracePlace | None] = ContextVar("agentrl_place_in_trace", default=None)
_LISTENERS = _Listeners()
_NOTHING: AbstractContextManager[None] = nullcontext()


def add_listener(listener: Callable[[TraceSpan], None], *, all: bool = False) -> Callable[[], None]:
    """Call `listener` with each span that ends in this process, until the returned function is called. `all`: also with those
    that are not sampled."""
    _LISTENERS.each = (*_LISTENERS.each, listener)
    _LISTENERS.all += all

    def leave() -> None:
        if listener in _LISTENERS.each:
            _LISTENERS.each = tuple(one for one in _LISTENERS.each if one != listener)
            _LISTENERS.all -= all

    return leave


def listens_to_all() -> bool:
    """Return True if spans that are not sampled are recorded too."""
    return _LISTENERS.all > 0


def here() -> TracePlace | None:
    """Return the caller's position in a trace; None outside of a trace or without a listener."""
    return _HERE.get() if _LISTENERS.each else None


def set_place(place: TracePlace | None) -> None:
    """Make `place` the parent of the spans that this task opens."""
    _HERE.set(place)


at: Callable[[TracePlace | None], AbstractContextManager[None]] = functools.partial(setting, _HERE)
"""`at(place)` makes a place, also of another process, the parent of spans inside its context; None: no trace."""


def span(kind: Kind, name: str = "", *, track: str | None = None, root: bool = False) -> AbstractContextManager[TraceSpan | None]:
    """Time the code inside the context. `track`: default the parent's. `root`: starts a trace outside of one; other spans
    outside of a trace are not recorded."""
    if not _LISTENERS.each:
        return _NOTHING
    place = _HERE.get()
    if place is None and root:
        place = TracePlace(new_id(128), 0, "run", True)
    if place is None:
        return _NOTHING
    if kind == "episode" and place.sampled and place.episodes < 1.0 and _share(track or name) >= place.episodes:
        place = replace(place, sampled=False)
    return _open_span(kind, name or kind, place, track) if place.sampled or _LISTENERS.all else at(place)


@contextmanager
def _open_span(kind: Kind, name: str, place: TracePlace, track: str | None) -> Iterator[TraceSpan]:
    opened = begin(kind, name, place, track)
    token = _HERE.set(place.within(opened))
    try:
        yield opened
    except BaseException as fault:
        opened.error = fault_text(fault)[:300]
        raise
    finally:
        _HERE.reset(token)
        finish(opened)


def begin(kind: Kind, name: str, place: TracePlace, track: str | None = None) -> TraceSpan:
    """Open a span for `finish` to end; spans opened in between are not its children."""
    parent = place.home or place.id if kind == "episode" else place.id
    opened = TraceSpan(kind, name, place.trace, new_id(64), parent, now(), track or place.track, place.sampled)
    _LISTENERS.open[opened.id] = opened
    return opened


def finish(opened: TraceSpan) -> None:
    """End a span and pass it to the listeners."""
    _LISTENERS.open.pop(opened.id, None)
    opened.end = opened.end or now()
    receive_span(opened)


def note(
    kind: Kind, name: str, since: int, *, track: str | None = None, place: TracePlace | None = None, **values: Value
) -> None:
    """Record a span from `since` until now in `place` (default: the caller's)."""
    place = here() if place is None else place
    if place is not None and _LISTENERS.each and (place.sampled or _LISTENERS.all):
        opened = begin(kind, name, place, track)
        opened.begin = since
        opened.set(**values)
        finish(opened)


def receive_span(found: TraceSpan) -> None:
    """Pass a span of this or another process to the listeners."""
    for listener in _LISTENERS.each:
        listener(found)


def open_spans() -> list[TraceSpan]:
    """Return the open spans of this process."""
    return list(_LISTENERS.open.values())


def in_span(kind: Kind, root: bool = False) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
    """Decorate an async function: record each call as a span."""

    def wrap(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
        @functools.wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(kind, root=root):
                return await function(*args, **kwargs)

        return call

    return wrap


def new_id(bits: int) -> int:
    """Return a random nonzero id of a trace (128 bits) or a span (64)."""
    return secrets.randbits(bits) or 1


@functools.cache
def machine() -> str:
    """Return an id of this machine's boot; processes with the same id share a monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _share(key: str) -> float:
    """Hash `key` to a number in [0, 1)."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
