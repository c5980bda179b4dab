"""Start test files as cards come free, largest first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from agentrl.contrib.gpu_tests.cards import CardPool
from agentrl.contrib.gpu_tests.session import Case, FileJob, FileResult, FileSession

TICK = 0.05
"""Seconds between two looks at what runs."""
READ_S = 1.0
"""Seconds between two readings of the cards."""
HEARTBEAT_S = 30.0
"""Seconds between two lines that say what runs."""
STOP_S = 15.0
"""Seconds that running files have to end after the first Ctrl-C."""
STUCK_S = 30.0
"""Seconds after which processes that do not end are given up, with their cards."""


class Scheduler:
    """Runs `jobs` on the pool's cards, and files without cards on `slots`. `wait`: seconds to wait for cards that are not free
    while nothing of ours runs on cards. `say` gets lines for the terminal, `ended` each result."""

    def __init__(
        self,
        jobs: Sequence[FileJob],
        pool: CardPool,
        start: Callable[[FileJob, tuple[int, ...], float], FileSession],
        *,
        slots: int,
        wait: float,
        say: Callable[[str], None],
        ended: Callable[[FileResult], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.pool, self._slots, self._wait = pool, slots, wait
        self._start, self._say, self._ended, self._clock, self._sleep = start, say, ended, clock, sleep
        # By cards, then by name.
        self.waiting = {job.file: job for job in sorted(jobs, key=lambda job: (-job.gpus, job.file))}
        self.running: dict[str, FileSession] = {}
        self.results: dict[str, FileResult] = {}
        self._next, self._beside = "", set[str]()
        """The largest file that did not fit, and the smaller ones that were started since."""
        self._stops, self._stopped_at = 0, 0.0
        self._blocked_since: float | None = None
        self._read_at = self._said_at = float("-inf")

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
        """Look once, and do what can be done now. Whether everything has its result."""
        for name, session in list(self.running.items()):
            self._look_at(name, session, now)
        if self._stops:
            self._pass_stop_on(now)
        elif self.waiting:
            self._start_files(now)
        if self.running and now - self._said_at >= HEARTBEAT_S:
            if self._said_at >= 0:
                self._say(self.state(now))
            self._said_at = now
        return not self.waiting and not self.running

    def _look_at(self, name: str, session: FileSession, now: float) -> None:
        result, stuck = session.tick(now), False
        if result is None and session.ending_since is not None and now - session.ending_since > STUCK_S:
            result, stuck = session.abandon(now), True
        if result is None:
            return
        del self.running[name]
        self.results[name] = result
        if not stuck:  # else its cards stay taken
            self.pool.give_back(session.cards)
            self._read_at = float("-inf")
        self._ended(result)

    def _pass_stop_on(self, now: float) -> None:
        if not self._stopped_at:
            self._stopped_at = now
            self._say(f"stopping: {STOP_S:.0f} s to end (Ctrl-C again: none); {len(self.waiting)} files will not be run")
            for job in list(self.waiting.values()):
                self._not_run(job, "interrupted (Ctrl-C) before its file began")
            for session in self.running.values():
                session.interrupt(now)
        if self._stops > 1 or now - self._stopped_at > STOP_S:
            for session in self.running.values():
                session.end(now)

    def _start_files(self, now: float) -> None:
        if any(job.gpus for job in self.waiting.values()) and now - self._read_at >= READ_S:
            self._read_at = now
            self.pool.refresh()
        left: int | None = None  # cards that the next file leaves to smaller ones
        for job in list(self.waiting.values()):
            free = self.pool.free() if job.gpus else []
            if job.gpus > len(self.pool.cards):
                there = f"{_needs(job)}, and {len(self.pool.cards) or 'none'} can be used"
                self._not_run(job, f"{there}: {self.pool.missing}" if self.pool.missing else there)
            elif not job.gpus:
                if sum(not session.cards for session in self.running.values()) < self._slots:
                    self._begin(job, (), now)
            elif job.gpus <= len(free) and (left is None or job.gpus <= left):
                if self.pool.take(cards := tuple(free[: job.gpus]), job.file):
                    self._begin(job, cards, now)
                    if left is not None:
                        left -= job.gpus
                        self._beside.add(job.file)
            elif left is None:
                left = self._reserve(job, len(free))
        self._wait_for_cards(now)

    def _reserve(self, job: FileJob, free: int) -> int | None:
        """Number of cards that the largest file which does not fit leaves to smaller ones: it starts, at the latest, when all
        files have ended that ran when it was first refused. None if ours do not suffice for it: it would hold up the rest for
        nothing."""
        if job.file != self._next:
            self._next, self._beside = job.file, set()
        left = free + sum(len(session.cards) for name, session in self.running.items() if name not in self._beside) - job.gpus
        return left if left >= 0 else None

    def _begin(self, job: FileJob, cards: tuple[int, ...], now: float) -> None:
        self.running[job.file] = self._start(job, cards, now)
        del self.waiting[job.file]
        self._say(f"start   {job.file}{on_cards(cards)}")

    def _wait_for_cards(self, now: float) -> None:
        """Report files that wait too long for cards. Only while nothing of ours runs on cards: its end changes what is free."""
        blocked = [job for job in self.waiting.values() if job.gpus]
        if not blocked or any(session.cards for session in self.running.values()):
            self._blocked_since = None
        elif self._blocked_since is None:
            self._blocked_since = now
        elif now - self._blocked_since >= self._wait:
            free = f"{len(self.pool.free())} free after {self._wait:.0f} s; {self.pool.not_free()}"
            for job in blocked:
                self._not_run(job, f"{_needs(job)}, {free}")

    def _not_run(self, job: FileJob, reason: str) -> None:
        del self.waiting[job.file]
        cases = tuple(Case(name, "not run", reason=reason) for name in job.tests)
        self.results[job.file] = FileResult(job.file, cases, job.gpus, problem=None if self.interrupted else f"not run: {reason}")
        self._ended(self.results[job.file])

    def state(self, now: float) -> str:
        """One line on what runs and what waits."""
        running = []
        for name, session in self.running.items():
            test = f" ({session.current})" if session.current else ""
            running.append(f"{name}{on_cards(session.cards)} for {clock(now - session.began)}{test}")
        waiting = f"; waiting: {len(self.waiting)}" if self.waiting else ""
        return f"running: {', '.join(running)}{waiting}"


def _needs(job: FileJob) -> str:
    return f"needs {job.gpus} card{'s' if job.gpus > 1 else ''}"


def on_cards(cards: Sequence[int]) -> str:
    """ " on cards 0,1" """
    return f" on card{'s' if len(cards) > 1 else ''} {','.join(map(str, cards))}" if cards else ""


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours from 60 minutes on."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
