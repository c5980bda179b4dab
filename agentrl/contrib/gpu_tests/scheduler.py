"""Start test files as cards come free, largest first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.contrib.gpu_tests.cards import CardPool
from agentrl.contrib.gpu_tests.session import FileJob
from agentrl.contrib.gpu_tests.verdict import Case, FileResult

# Which waiting test file starts next: the largest first, smaller ones beside it, and none waits for ever.
#
# Pure functions. As in EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995) the largest file that does not fit
# gets a
# reservation: of the files that ran when it was first refused, those expected to end soonest, until their cards and the free ones
# suffice. What these leave over goes to smaller files at once. So a file with a reservation starts, at the latest, when all files
# have ended that ran when it got it. Unlike EASY, no file is let past the reservation because it is expected to end in time: that
# rests on lengths, which may be unknown or wrong.


@dataclass(frozen=True)
class Queued:
    """A file that waits. `gpus`: cards that it needs. `seconds`: how long it took last time, None: not known."""

    name: str
    gpus: int
    seconds: float | None = None


@dataclass(frozen=True)
class Held:
    """A file that runs on this many `cards`, until about `end` (seconds on the run's clock; infinite: not known)."""

    name: str
    cards: int
    end: float = math.inf


@dataclass(frozen=True)
class Reservation:
    """The file that is next, and the files for whose end it waits."""

    name: str
    running: frozenset[str]


@dataclass(frozen=True)
class Starts:
    """The files to start now with their cards, in order, and the reservation that holds from now on."""

    starts: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    reserved: Reservation | None = None


def largest_first(waiting: Sequence[Queued]) -> list[Queued]:
    """By cards, then by length (an unknown one counts as the longest), then by name."""
    return sorted(waiting, key=lambda one: (-one.gpus, -math.inf if one.seconds is None else -one.seconds, one.name))


def choose(waiting: Sequence[Queued], free: Sequence[int], held: Sequence[Held], reserved: Reservation | None = None) -> Starts:
    """Choose the files that need cards and start now, each with some of the `free` cards. `reserved`: what the last choice
    reserved."""
    left, running = sorted(free), list(held)
    starts: list[tuple[str, tuple[int, ...]]] = []
    kept: Reservation | None = None
    over = 0  # cards that the reservation leaves to smaller files
    for one in largest_first(waiting):
        if one.gpus <= (len(left) if kept is None else min(len(left), over)):
            starts.append((one.name, tuple(left[: one.gpus])))
            del left[: one.gpus]
            over -= one.gpus if kept is not None else 0
            running.append(Held(one.name, one.gpus))
        elif kept is None:
            before = reserved.running if reserved is not None and reserved.name == one.name else frozenset()
            kept, over = _reserve(one, len(left), [other for other in running if other.name in before])
            if kept is None:
                kept, over = _reserve(one, len(left), running)
    return Starts(starts, kept)


def _reserve(one: Queued, free: int, running: Sequence[Held]) -> tuple[Reservation | None, int]:
    """Its reservation, and the cards left over; none if the running files do not have enough: it would then hold up the rest for
    nothing, since what it lacks is not ours."""
    cards = free
    for other in sorted(running, key=lambda other: other.end):
        if cards >= one.gpus:
            break
        cards += other.cards
    if cards < one.gpus:
        return None, 0
    return Reservation(one.name, frozenset(other.name for other in running)), cards - one.gpus


def time_left(waiting: Sequence[Queued], ends: Mapping[str, tuple[int, float]], free: Sequence[int], slots: int) -> float:
    """Seconds until all files have ended, by playing the rest with the lengths that are known (an unknown one counts 0).

    `ends`: of each running file its cards (0: it has a slot) and the seconds that it is expected to take from now on. `slots`:
    free ones for files without cards.
    """
    now, cards, left = 0.0, len(free), list(waiting)
    running = {name: (gpus, max(seconds, 0.0)) for name, (gpus, seconds) in ends.items()}
    lengths = {one.name: one.seconds or 0.0 for one in waiting}
    reserved: Reservation | None = None
    while left or running:
        held = [Held(name, gpus, end) for name, (gpus, end) in running.items() if gpus]
        choice = choose([one for one in left if one.gpus], range(cards), held, reserved)
        reserved = choice.reserved
        starting = {name: len(given) for name, given in choice.starts}
        cards -= sum(starting.values())
        for one in largest_first([one for one in left if not one.gpus])[: max(slots, 0)]:
            starting[one.name] = 0
            slots -= 1
        running |= {name: (gpus, now + lengths[name]) for name, gpus in starting.items()}
        left = [one for one in left if one.name not in starting]
        if not running:  # what is left fits nowhere
            break
        name = min(running, key=lambda name: running[name][1])
        gpus, now = running.pop(name)
        cards, slots = cards + gpus, slots + (gpus == 0)
    return now


TICK = 0.05
"""Seconds between two looks at what runs."""
STOP_S = 15.0
"""Seconds that running files have to end after the first Ctrl-C."""
STUCK_S = 30.0
"""Seconds after which processes that do not end are given up, with their cards."""


class Running(Protocol):
    """A started file; `testing.session.FileSession` has the meanings."""

    job: FileJob
    cards: tuple[int, ...]
    began: float

    @property
    def stuck_for(self) -> float | None: ...
    def tick(self, now: float) -> FileResult | None: ...
    def interrupt(self, now: float) -> None: ...
    def end(self, now: float) -> None: ...
    def abandon(self, now: float) -> FileResult: ...


class Watcher(Protocol):
    """Receiver of events: the lines on the terminal."""

    def started(self, session: Running, now: float) -> None: ...
    def ended(self, result: FileResult, now: float) -> None: ...
    def beat(self, scheduler: Scheduler, now: float) -> None: ...
    def say(self, line: str) -> None: ...


@dataclass(frozen=True)
class RunLimits:
    """`slots`: files without cards at the same time. `wait`: seconds to wait for cards that others use, once nothing of ours
    could be given instead."""

    slots: int
    wait: float


class Scheduler:
    """Runs `jobs` on the pool's cards and on slots. `start(job, cards, now)` starts one. Clock and sleep are seconds."""

    def __init__(
        self,
        jobs: Sequence[FileJob],
        pool: CardPool,
        limits: RunLimits,
        start: Callable[[FileJob, tuple[int, ...], float], Running],
        watcher: Watcher,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pool, self.limits = pool, limits
        self._start, self._watcher, self._clock, self._sleep = start, watcher, clock, sleep
        self.waiting: dict[str, FileJob] = {job.file: job for job in jobs}
        self.running: dict[str, Running] = {}
        self.results: dict[str, FileResult] = {}
        self._reserved: Reservation | None = None
        self._stops, self._stopped_at = 0, 0.0
        self._blocked_since: float | None = None

    def stop(self) -> None:
        """Ctrl-C: once, running files get it too and nothing more starts; twice, everything is killed. Only notes it, so that a
        signal's handler may call it."""
        self._stops += 1

    @property
    def interrupted(self) -> bool:
        """True if the run was stopped from outside."""
        return self._stops > 0

    def run(self) -> list[FileResult]:
        """Run all files; their results, in the order in which they ended."""
        try:
            while not self.step(self._clock()):
                self._sleep(TICK)
        finally:
            for session in self.running.values():  # after an error in here: their keepers end them
                session.end(self._clock())
        return list(self.results.values())

    def step(self, now: float) -> bool:
        """Look once, and do what can be done now. Whether everything has its result, and every card its memory back."""
        for session in list(self.running.values()):
            self._look_at(session, now)
        self._pass_stop_on(now)
        if self.pool.settling or any(job.gpus for job in self.waiting.values()):
            self.pool.refresh(now)
        for job in list(self.waiting.values()):
            if job.gpus > len(self.pool.in_service):  # more cards than there can be
                there = len(self.pool.in_service)
                out = "".join(f"; card {card} is out of service: {why}" for card, why in self.pool.out.items())
                why = f": {self.pool.missing}" if self.pool.missing else out
                self._not_run(job, f"{_needs(job)}, and {there or 'none'} can be used{why}")
        if not self.interrupted:
            self._start_files(now)
        self._wait_for_others(now)
        self._watcher.beat(self, now)
        return not self.waiting and not self.running and not self.pool.settling

    def _look_at(self, session: Running, now: float) -> None:
        result, stuck = session.tick(now), False
        if result is None and session.stuck_for is not None and now - session.stuck_for > STUCK_S:
            result, stuck = session.abandon(now), True
        if result is None:
            return
        name = session.job.file
        del self.running[name]
        self.results[name] = result
        if stuck:
            self.pool.retire(session.cards, f"the processes of {name} could not be ended")
        else:
            self.pool.give_back(session.cards, now)
        self._watcher.ended(result, now)

    def _pass_stop_on(self, now: float) -> None:
        if not self._stops:
            return
        if not self._stopped_at:
            self._stopped_at = now
            told = f"{_files(len(self.running))} interrupted, with {STOP_S:.0f} s to end (Ctrl-C again: none)"
            self._watcher.say(f"stopping: {told}; {_files(len(self.waiting))} will not be run")
            for job in list(self.waiting.values()):
                self._not_run(job, "interrupted (Ctrl-C) before its file began")
            for session in self.running.values():
                session.interrupt(now)
        if self._stops > 1 or now - self._stopped_at > STOP_S:
            for session in self.running.values():
                session.end(now)

    def _wait_for_others(self, now: float) -> None:
        """Report files whose cards others have used for too long."""
        # Others' cards are waited for only while nothing of ours runs on cards: its end changes what is free.
        ours = any(session.cards for session in self.running.values()) or self.pool.settling
        blocked = [job for job in self.waiting.values() if job.gpus > len(self.pool.free())]
        if ours or not blocked:
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
            cards = "; ".join(f"card {card}: {told}" for card, told in self.pool.foreign().items())
            self._watcher.say(f"waiting up to {self.limits.wait:.0f} s for cards that are not free: {cards}")
        elif now - self._blocked_since >= self.limits.wait:
            cards = "; ".join(f"card {card}: {told}" for card, told in self.pool.foreign().items())
            for job in blocked:
                self._not_run(job, f"{_needs(job)}, {len(self.pool.free())} free after {self.limits.wait:.0f} s; {cards}")

    def _not_run(self, job: FileJob, reason: str) -> None:
        del self.waiting[job.file]
        cases = tuple(Case(name, "not run", reason=reason) for name in job.listed)
        self.results[job.file] = FileResult(job.file, cases, job.gpus, problem=None if self.interrupted else f"not run: {reason}")
        self._watcher.ended(self.results[job.file], self._clock())

    def _start_files(self, now: float) -> None:
        free = self.pool.free()
        choice = choose([waits(job) for job in self.waiting.values() if job.gpus], free, self.held(), self._reserved)
        self._reserved = choice.reserved
        for name, cards in choice.starts:
            if self.pool.take(cards, name):
                self._begin(self.waiting[name], cards, now)
        slots = self.limits.slots - sum(not session.cards for session in self.running.values())
        for one in largest_first([waits(job) for job in self.waiting.values() if not job.gpus])[: max(slots, 0)]:
            self._begin(self.waiting[one.name], (), now)

    def _begin(self, job: FileJob, cards: tuple[int, ...], now: float) -> None:
        self.running[job.file] = self._start(job, cards, now)
        del self.waiting[job.file]
        self._watcher.started(self.running[job.file], now)

    def held(self) -> list[Held]:
        """Jobs that run on cards, with their expected ends: as last time, at the latest at its limit."""
        return [
            Held(name, len(session.cards), session.began + (session.job.known or session.job.timeout))
            for name, session in self.running.items()
            if session.cards
        ]


def waits(job: FileJob) -> Queued:
    """A job as the packing sees it."""
    return Queued(job.file, job.gpus, job.known)


def _files(count: int) -> str:
    return f"{count} file{'s' if count != 1 else ''}"


def _needs(job: FileJob) -> str:
    return f"needs {job.gpus} card{'s' if job.gpus > 1 else ''}"


def exit_code(results: Sequence[FileResult], interrupted: bool) -> int:
    """0: every test that was asked for ran, and none failed. 130: interrupted. 1: anything else, also no test at all."""
    if interrupted:
        return 130
    whole = all(not result.failed and not result.counts["not run"] for result in results)
    return 0 if whole and any(result.cases for result in results) else 1


def totals(results: Sequence[FileResult]) -> Mapping[str, int]:
    """Number of tests per outcome, over all files."""
    counts: dict[str, int] = {}
    for result in results:
        for outcome, count in result.counts.items():
            counts[outcome] = counts.get(outcome, 0) + count
    return counts
