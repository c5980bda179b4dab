"""The scheduler's loop with made-up sessions and a made-up clock, so that hours of scheduling take milliseconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.gpu_tests import scheduler as card_module
from agentrl.contrib.gpu_tests.run import exit_code
from agentrl.contrib.gpu_tests.scheduler import CardMemory, CardPool, Scheduler
from agentrl.contrib.gpu_tests.session import Case, FileJob, FileResult


def job(name: str, gpus: int = 0, timeout: float = 1000.0) -> FileJob:
    return FileJob(name, (name,), gpus, timeout, (f"test_{name}",))


@dataclass
class MadeUpSession:
    """Runs for `seconds`; asked to end, it takes 0.3 s. Its test passes if it comes to its own end."""

    job: FileJob
    cards: tuple[int, ...]
    began: float
    seconds: float
    ended: Callable[[tuple[int, ...]], None]
    stuck: bool = False
    ending_since: float | None = None
    interrupted: bool = False
    current: str = "test_x"

    def tick(self, now: float) -> FileResult | None:
        if self.ending_since is None and now - self.began > self.job.timeout:
            self.end(now)
        if self.ending_since is None:
            return self.abandon(now) if now - self.began >= self.seconds else None
        return self.abandon(now) if not self.stuck and now - self.ending_since >= 0.3 else None

    def interrupt(self, now: float) -> None:
        self.interrupted = True
        if not self.stuck:
            self.end(now)

    def end(self, now: float) -> None:
        self.ending_since = self.ending_since if self.ending_since is not None else now

    def abandon(self, now: float) -> FileResult:
        self.ended(self.cards)
        outcome = "passed" if self.ending_since is None else "interrupted" if self.interrupted else "failed"
        return FileResult(self.job.file, (Case(self.job.tests[0], outcome),), self.job.gpus, self.cards, now - self.began)


class World:
    """A scheduler over made-up cards. `lengths`: seconds of each file (10 for others). `used`: MiB in use by others."""

    def __init__(
        self, jobs: list[FileJob], cards: int, locks: Path, lengths: Mapping[str, float] | None = None, *, slots: int = 1,
        wait: float = 60.0, leaks: tuple[str, ...] = (), stuck: tuple[str, ...] = (),
        used: Callable[[int, float], int] = lambda card, now: 0,
    ) -> None:  # fmt: skip
        self.now, self.lines, self.starts, self.ends = 0.0, list[str](), list[tuple[float, str, tuple[int, ...]]](), list[str]()
        self.each: Callable[[Scheduler, float], None] = lambda scheduler, now: None
        self.held: dict[int, int] = {}

        def read() -> list[CardMemory]:
            return [
                CardMemory(n, f"made-up-{n}", "made up", used(n, self.now) + self.held.get(n, 0), 80_000) for n in range(cards)
            ]

        def start(one: FileJob, cards: tuple[int, ...], now: float) -> MadeUpSession:
            self.starts.append((now, one.file, cards))
            self.held |= dict.fromkeys(cards, 3000)
            left = 4000 if one.file in leaks else 0
            seconds = (lengths or {}).get(one.file, 10.0)
            return MadeUpSession(
                one, cards, now, seconds, lambda cards: self.held.update(dict.fromkeys(cards, left)), one.file in stuck
            )

        self.read, self.pool = read, CardPool(read(), locks=locks)
        self.scheduler = Scheduler(
            jobs, self.pool, start, slots=slots, wait=wait, say=self.lines.append,  # type: ignore[arg-type]
            ended=lambda result: self.ends.append(result.file), clock=lambda: self.now, sleep=self._sleep,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        self.each(self.scheduler, self.now)
        self.now += 0.5

    def run(self) -> dict[str, FileResult]:
        before, card_module.read_cards = card_module.read_cards, self.read
        try:
            return {result.file: result for result in self.scheduler.run()}
        finally:
            card_module.read_cards = before


def test_large_files_first_small_ones_beside_them_and_slots_besides(tmp_path: Path) -> None:
    jobs = [job("one"), job("two"), job("a", 1), job("b", 2), job("c", 3)]
    world = World(jobs, 4, tmp_path, {"c": 40.0, "one": 7.0})
    results = world.run()
    assert {name: one.counts["passed"] for name, one in results.items()} == dict.fromkeys(["one", "two", "a", "b", "c"], 1)
    starts = {name: (began, cards) for began, name, cards in world.starts}
    assert starts == {"c": (0.0, (0, 1, 2)), "a": (0.0, (3,)), "one": (0.0, ()), "two": (7.0, ()), "b": (40.0, (0, 1))}
    assert exit_code(list(results.values()), False) == 0
    assert "running: c on cards 0,1,2 for 0:30 (test_x); waiting: 1" in world.lines


def test_smaller_files_take_only_what_a_larger_one_leaves_over(tmp_path: Path) -> None:
    """Six cards: the file with four waits for the first one's three, so one of the two that are free is over."""
    jobs = [job("five", 5), job("four", 4), *(job(f"small{number}", 1) for number in range(6))]
    world = World(jobs, 6, tmp_path, {"small0": 100.0})
    world.run()
    starts = {name: began for began, name, _ in world.starts}
    assert (starts["five"], starts["small0"], starts["four"]) == (0.0, 0.0, 10.0)
    assert sorted(starts[f"small{number}"] for number in range(1, 6)) == [10.0, 20.0, 20.0, 20.0, 20.0]


def test_nothing_starts_on_a_free_card_that_a_larger_one_needs(tmp_path: Path) -> None:
    """Two of six cards are another's for 3 s: of these the file with five needs one when the first files have ended."""
    jobs = [job("five", 5), job("three", 3), *(job(f"small{number}", 1) for number in range(3))]
    world = World(jobs, 6, tmp_path, {"small0": 20.0}, used=lambda card, now: 9000 if card > 3 and now < 3 else 0)
    world.run()
    starts = {name: began for began, name, _ in world.starts}
    assert starts["three"] == starts["small0"] == 0.0 < 3.0 <= starts["small1"] < starts["five"] < starts["small2"]


def test_cards_that_are_not_free_are_waited_for_so_long(tmp_path: Path) -> None:
    # Card 1 is somebody else's until second 30; meanwhile the smaller file is not held up.
    world = World([job("two", 2), job("one", 1)], 2, tmp_path, used=lambda card, now: 900 if card == 1 and now < 30 else 200)
    results = world.run()
    assert [(began, name) for began, name, _ in world.starts] == [(0.0, "one"), (30.0, "two")] and not results["two"].failed
    world = World([job("leaks", 2), job("two", 2), job("one", 1), job("many", 3)], 2, tmp_path, wait=7.0, leaks=("leaks",))
    results = world.run()
    facts = "card 0: 4000 MiB in use (free: at most 256), last given to leaks; card 1: 4000 MiB"
    assert results["two"].cases[0].reason.startswith(f"needs 2 cards, 0 free after 7 s; {facts}")
    assert results["one"].problem.startswith("not run: needs 1 card, 0 free") and exit_code(list(results.values()), False) == 1
    assert results["many"].problem == "not run: needs 3 cards, and 2 can be used"


def test_processes_that_do_not_end_cost_their_card_and_not_the_run(tmp_path: Path) -> None:
    jobs = [job("hangs", 1, timeout=20.0), job("next", 1), job("stuck", 1, timeout=20.0)]
    world = World(jobs, 1, tmp_path, {"hangs": 1e9, "stuck": 1e9}, stuck=("stuck",))
    results = world.run()
    assert [results[name].cases[0].outcome for name in ("hangs", "next", "stuck")] == ["failed", "passed", "failed"]
    assert [(began, name) for began, name, _ in world.starts] == [(0.0, "hangs"), (21.0, "next"), (31.0, "stuck")]
    assert world.now == pytest.approx(82.0) and world.pool.free() == []


@pytest.mark.parametrize(("stuck", "again", "ended"), [(False, False, 12.5), (True, False, 58.0), (True, True, 44.0)])
def test_ctrl_c_reports_every_test(stuck: bool, again: bool, ended: float, tmp_path: Path) -> None:
    """Once: what runs is interrupted; a file that ignores it is ended 15 s later and given up 30 s after that. Twice: now."""
    jobs = [job("done", 1), job("long", 1), job("waits", 1), job("without")]
    world = World(jobs, 1, tmp_path, {"done": 5.0, "long": 1e9}, stuck=("long",) if stuck else ())
    world.each = lambda scheduler, now: scheduler.stop() if now in ((11.5, 13.0) if again else (11.5,)) else None
    results = world.run()
    outcomes = {name: one.cases[0].outcome for name, one in results.items()}
    assert outcomes == {"done": "passed", "without": "passed", "long": "interrupted", "waits": "not run"}
    assert results["waits"].cases[0].reason == "interrupted (Ctrl-C) before its file began" and not results["waits"].failed
    assert (world.now, world.scheduler.interrupted, exit_code(list(results.values()), True)) == (ended, True, 130)


KINDS = ["well", "leaks", "hangs", "stuck"]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.sampled_from(KINDS)), max_size=10),
    cards=st.integers(0, 4), slots=st.integers(1, 3), stop=st.one_of(st.none(), st.integers(0, 60)),
    foreign=st.sets(st.integers(0, 3)),
)  # fmt: skip
def test_every_file_runs_once_or_is_reported(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int, str]], cards: int, slots: int, stop: int | None,
    foreign: set[int],
) -> None:  # fmt: skip
    names = [f"f{number}" for number in range(len(sizes))]
    kinds = dict(zip(names, (kind for _, _, kind in sizes), strict=True))
    world = World(
        [job(name, gpus, timeout=40.0) for name, (gpus, _, _) in zip(names, sizes, strict=True)], cards,
        tmp_path_factory.mktemp("locks"),
        {name: 1e9 if kind in ("hangs", "stuck") else seconds for name, (_, seconds, kind) in zip(names, sizes, strict=True)},
        slots=slots, leaks=tuple(name for name in names if kinds[name] == "leaks"),
        stuck=tuple(name for name in names if kinds[name] == "stuck"), used=lambda card, now: 5000 * (card in foreign),
    )  # fmt: skip

    def looked(scheduler: Scheduler, now: float) -> None:
        held = [card for session in scheduler.running.values() for card in session.cards]
        assert len(held) == len(set(held)) and not set(held) & foreign
        assert sum(not session.cards for session in scheduler.running.values()) <= slots
        if stop is not None and now >= stop:
            scheduler.stop()

    world.each = looked
    results = world.run()
    started = [name for _, name, _ in world.starts]
    assert sorted(results) == sorted(names) == sorted(world.ends)
    assert len(started) == len(set(started))
    assert all((one.cases[0].outcome == "not run") == (name not in started) for name, one in results.items())
    usable = cards - len({card for card in foreign if card < cards})
    faultless = stop is None and all(kind == "well" for kind in kinds.values())
    fits = {name for name, (gpus, _, _) in zip(names, sizes, strict=True) if gpus <= usable}
    assert set(started) <= fits and (set(started) == fits or not faultless)
