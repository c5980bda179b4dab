"""Cards, sessions and a clock that are made up, so that hours of scheduling take milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.contrib.gpu_tests.cards import CardMemory, CardPool
from agentrl.contrib.gpu_tests.scheduler import RunLimits, Running, Scheduler
from agentrl.contrib.gpu_tests.session import FileJob
from agentrl.contrib.gpu_tests.verdict import Case, FileResult


def job(name: str, gpus: int = 0, timeout: float = 1000.0, known: float | None = None) -> FileJob:
    return FileJob(name, (name,), gpus, timeout, known, (f"test_{name}",))


@dataclass
class MadeUpCards:
    """`used(card, now)`: MiB in use by others. Files that leak add to `leaked`."""

    count: int
    now: Callable[[], float]
    used: Callable[[int, float], int] = lambda card, now: 0
    leaked: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    locks: Path = Path("/nowhere")
    read_every: float = 0.0

    def read(self) -> list[CardMemory]:
        def total(card: int) -> int:
            return self.used(card, self.now()) + self.leaked.get(card, 0) + self.held.get(card, 0)

        return [CardMemory(card, f"made-up-{card}", "made up", total(card), 80_000) for card in range(self.count)]

    def holders(self, card: int) -> list[str]:
        return ["pid 77 (other)"] if self.used(card, self.now()) else []


@dataclass
class MadeUpSession:
    """Runs for `seconds`; told to end, it takes 0.3 s. Its test passes if it comes to its own end."""

    job: FileJob
    cards: tuple[int, ...]
    began: float
    seconds: float
    cards_of: MadeUpCards
    leaks: bool = False
    stuck: bool = False
    ending: float | None = None
    interrupted: bool = False

    @property
    def stuck_for(self) -> float | None:
        return self.ending

    def tick(self, now: float) -> FileResult | None:
        if self.ending is None and now - self.began > self.job.timeout:
            self.end(now)
        ended = now - self.began >= self.seconds if self.ending is None else not self.stuck and now - self.ending >= 0.3
        return self._result(now) if ended else None

    def _result(self, now: float) -> FileResult:
        for card in self.cards:
            self.cards_of.held.pop(card, None)
            if self.leaks:
                self.cards_of.leaked[card] = 4000
        outcome = "passed" if self.ending is None else "interrupted" if self.interrupted else "failed"
        case = Case(self.job.listed[0], outcome)
        return FileResult(self.job.file, (case,), self.job.gpus, self.cards, now - self.began, collected=True)

    def interrupt(self, now: float) -> None:
        self.interrupted = True
        if not self.stuck:
            self.ending = self.ending if self.ending is not None else now

    def end(self, now: float) -> None:
        self.ending = self.ending if self.ending is not None else now

    def abandon(self, now: float) -> FileResult:
        return self._result(now)


class Noted:
    """A watcher that notes what it is told, with the time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.starts: list[tuple[float, str, tuple[int, ...]]] = []
        self.ends: list[tuple[float, str]] = []
        self.each: Callable[[Scheduler, float], None] = lambda scheduler, now: None

    def started(self, session: Running, now: float) -> None:
        self.starts.append((now, session.job.file, session.cards))

    def ended(self, result: FileResult, now: float) -> None:
        self.ends.append((now, result.file))

    def beat(self, scheduler: Scheduler, now: float) -> None:
        self.each(scheduler, now)

    def say(self, line: str) -> None:
        self.lines.append(line)


class NoLocks:
    """Locks that nobody else has, but for the cards in `others`."""

    def __init__(self) -> None:
        self.ours: set[int] = set()
        self.others: set[int] = set()

    def take(self, card: int) -> bool:
        assert card not in self.ours, f"card {card} is given twice"
        self.ours |= {card} - self.others
        return card not in self.others

    def drop(self, card: int) -> None:
        self.ours.discard(card)


class World:
    """A scheduler over made-up cards. `lengths`: seconds of each file (10 for others)."""

    def __init__(
        self,
        jobs: list[FileJob],
        cards: int,
        lengths: Mapping[str, float] | None = None,
        *,
        slots: int = 1,
        wait: float = 60.0,
        leaks: tuple[str, ...] = (),
        stuck: tuple[str, ...] = (),
        used: Callable[[int, float], int] = lambda card, now: 0,
        tick: float = 0.5,
    ) -> None:
        self.now, self.tick, self.noted = 0.0, tick, Noted()
        self.cards = MadeUpCards(cards, lambda: self.now, used)
        self.locks = NoLocks()
        self.pool = CardPool(self.cards, range(cards), self.locks, self.noted.say, settle_s=5.0)

        def start(one: FileJob, given: tuple[int, ...], now: float) -> Running:
            self.cards.held |= dict.fromkeys(given, 3000)
            seconds = (lengths or {}).get(one.file, 10.0)
            return MadeUpSession(one, given, now, seconds, self.cards, one.file in leaks, one.file in stuck)

        limits = RunLimits(slots, wait)
        self.scheduler = Scheduler(jobs, self.pool, limits, start, self.noted, lambda: self.now, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += self.tick

    def run(self) -> dict[str, FileResult]:
        return {result.file: result for result in self.scheduler.run()}
