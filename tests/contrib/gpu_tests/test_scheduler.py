"""The scheduler's loop with made-up sessions and a made-up clock, and the cards that there are."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.gpu_tests import scheduler as card_module
from agentrl.contrib.gpu_tests.run import exit_code
from agentrl.contrib.gpu_tests.scheduler import CardMemory, CardPool, Scheduler, choose_cards, read_cards
from agentrl.contrib.gpu_tests.session import Case, FileJob, FileResult
from agentrl.utils.errors import ResourceError
from tests.contrib.gpu_tests.conftest import Smi


def job(name: str, gpus: int = 0, timeout: float = 1000.0) -> FileJob:
    return FileJob(name, (name,), gpus, timeout, (f"test_{name}",))


class MadeUpTime(asyncio.SelectorEventLoop):
    """A loop that does not wait: its clock goes on to whatever comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.now, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def skip(timeout: float | None) -> object:
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = skip  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


@dataclass
class MadeUpSession:
    """Runs for `seconds`; asked to end it takes 0.3 s, or 30 s if it is `stuck`; asked again none."""

    job: FileJob
    cards: tuple[int, ...]
    seconds: float
    ended: Callable[[tuple[int, ...]], None]
    stuck: bool = False
    why: str = "by itself"
    asked: list[asyncio.Event] = field(default_factory=lambda: [asyncio.Event(), asyncio.Event()])
    current: str = "test_x"

    async def result(self) -> FileResult:
        outcome = "passed"
        try:
            async with asyncio.timeout(min(self.seconds, self.job.timeout)):
                await self.asked[0].wait()
                outcome = "interrupted"
        except TimeoutError:
            outcome = "passed" if self.seconds <= self.job.timeout else "failed"
        if outcome != "passed":
            try:
                async with asyncio.timeout(30.0 if self.stuck else 0.3):
                    await self.asked[1].wait()
            except TimeoutError:
                self.why = "stuck" if self.stuck else self.why
        self.ended(self.cards)
        return FileResult(self.job.file, (Case(self.job.tests[0], outcome),), self.job.gpus, self.cards, 1.0)

    def stop(self, why: str) -> None:
        self.asked[self.asked[0].is_set()].set()


class World:
    """A scheduler over made-up cards. `lengths`: seconds by file; `used`: MiB of others; `stops`: of each Ctrl-C."""

    def __init__(
        self, jobs: list[FileJob], cards: int, locks: Path, lengths: Mapping[str, float] | None = None, *, slots: int = 1,
        wait: float = 60.0, leaks: tuple[str, ...] = (), stuck: tuple[str, ...] = (), stops: tuple[float, ...] = (),
        used: Callable[[int, float], int] = lambda card, now: 0, look: Callable[[Scheduler], None] = lambda scheduler: None,
    ) -> None:  # fmt: skip
        self.lines, self.starts, self.ends = list[str](), list[tuple[float, str, tuple[int, ...]]](), list[str]()
        self.end = 0.0
        self.held: dict[int, int] = {}
        self.loop = MadeUpTime()

        def read() -> list[CardMemory]:
            rows = ((n, used(n, self.loop.now) + self.held.get(n, 0)) for n in range(cards))
            return [CardMemory(n, f"made-up-{n}", mib) for n, mib in rows]

        def start(one: FileJob, cards: tuple[int, ...]) -> MadeUpSession:
            self.starts.append((round(self.loop.now, 1), one.file, cards))
            self.loop.call_soon(look, self.scheduler)
            self.held |= dict.fromkeys(cards, 3000)
            left = dict.fromkeys(cards, 4000 if one.file in leaks else 0)
            seconds = (lengths or {}).get(one.file, 10.0)
            return MadeUpSession(one, cards, seconds, lambda cards: self.held.update(left), one.file in stuck)

        self.read, self.pool = read, CardPool(read(), locks=locks)
        self.scheduler = Scheduler(
            jobs, self.pool, start, slots=slots, wait=wait, say=self.lines.append,  # type: ignore[arg-type]
            ended=lambda result: self.ends.append(result.file),
        )  # fmt: skip
        for when in stops:
            self.loop.call_later(when, self.scheduler.stop)

    def run(self) -> dict[str, FileResult]:
        before, card_module.read_cards = card_module.read_cards, self.read
        try:
            return {result.file: result for result in self.loop.run_until_complete(self.scheduler.run())}
        finally:
            card_module.read_cards = before
            self.end = round(self.loop.now, 1)
            self.loop.close()


def test_large_files_first_small_ones_beside_them_and_slots_besides(tmp_path: Path) -> None:
    jobs = [job("one"), job("two"), job("a", 1), job("b", 2), job("c", 3)]
    world = World(jobs, 4, tmp_path, {"c": 40.0, "one": 7.0})
    results = world.run()
    assert {name: one.counts["passed"] for name, one in results.items()} == dict.fromkeys(["one", "two", "a", "b", "c"], 1)
    starts = {name: (began, cards) for began, name, cards in world.starts}
    assert starts == {"c": (0.0, (0, 1, 2)), "a": (0.0, (3,)), "one": (0.0, ()), "two": (7.0, ()), "b": (40.0, (0, 1))}
    assert exit_code(list(results.values()), False) == 0
    assert "running: c on cards 0,1,2 for 0:30 (test_x); waiting: 1" in world.lines


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
    assert [(began, name) for began, name, _ in world.starts] == [(0.0, "hangs"), (20.3, "next"), (30.3, "stuck")]
    assert world.end == 80.3 and world.pool.free() == []


@pytest.mark.parametrize(("stuck", "again", "ended"), [(False, False, 11.8), (True, False, 41.5), (True, True, 13.0)])
def test_ctrl_c_reports_every_test(stuck: bool, again: bool, ended: float, tmp_path: Path) -> None:
    """Once: what runs is interrupted. Twice: it ends now."""
    jobs = [job("done", 1), job("long", 1), job("waits", 1), job("without")]
    stops = (11.5, 13.0) if again else (11.5,)
    world = World(jobs, 1, tmp_path, {"done": 5.0, "long": 1e9}, stuck=("long",) if stuck else (), stops=stops)
    results = world.run()
    outcomes = {name: one.cases[0].outcome for name, one in results.items()}
    assert outcomes == {"done": "passed", "without": "passed", "long": "interrupted", "waits": "not run"}
    assert results["waits"].cases[0].reason == "interrupted (Ctrl-C) before its file began" and not results["waits"].failed
    assert (world.end, exit_code(list(results.values()), world.scheduler.interrupted)) == (ended, 130)


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

    def look(scheduler: Scheduler) -> None:
        held = [card for session, _ in scheduler.running.values() for card in session.cards]
        assert len(held) == len(set(held)) and not set(held) & foreign
        assert sum(not session.cards for session, _ in scheduler.running.values()) <= slots

    world = World(
        [job(name, gpus, timeout=40.0) for name, (gpus, _, _) in zip(names, sizes, strict=True)], cards,
        tmp_path_factory.mktemp("locks"),
        {name: 1e9 if kind in ("hangs", "stuck") else seconds for name, (_, seconds, kind) in zip(names, sizes, strict=True)},
        slots=slots, leaks=tuple(name for name in names if kinds[name] == "leaks"), look=look,
        stuck=tuple(name for name in names if kinds[name] == "stuck"), used=lambda card, now: 5000 * (card in foreign),
        stops=() if stop is None else (stop, stop + 1.0),
    )  # fmt: skip
    results = world.run()
    started = [name for _, name, _ in world.starts]
    assert sorted(results) == sorted(names) == sorted(world.ends)
    assert len(started) == len(set(started))
    assert all((one.cases[0].outcome == "not run") == (name not in started) for name, one in results.items())
    usable = cards - len({card for card in foreign if card < cards})
    faultless = stop is None and all(kind == "well" for kind in kinds.values())
    fits = {name for name, (gpus, _, _) in zip(names, sizes, strict=True) if gpus <= usable}
    assert set(started) <= fits and (set(started) == fits or not faultless)


CARDS = [CardMemory(number, uuid, 0) for number, uuid in enumerate(("GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3"))]


def test_a_card_is_free_by_a_reading_after_its_file_ended_and_the_rest_is_described(smi: Smi, tmp_path: Path) -> None:
    smi.use(1, 20480)
    (smi.folder / "apps").write_text("GPU-1, 4711, /usr/bin/python3, 20470\n")
    cards = read_cards()
    assert cards[1] == CardMemory(1, "GPU-1", 20480)
    pool, other = CardPool(cards, locks=tmp_path), CardPool(cards, locks=tmp_path)
    pool.refresh()
    assert pool.free() == [0, 2]
    assert pool.not_free() == "card 1: 20480 MiB in use (free: at most 256), held by pid 4711 (python3)"
    assert pool.take([0], "a.py") and pool.free() == [2]
    smi.use(0, 3000)
    pool.give_back([0])
    assert pool.free() == [2], "the last reading is from before the file had it"
    pool.refresh()
    assert pool.free() == [2] and "card 0: 3000 MiB in use (free: at most 256), last given to a.py" in pool.not_free()
    smi.use(0, 256)
    pool.refresh()
    other.refresh()
    # Of cards that cannot all be taken none is kept.
    assert pool.take([0], "b.py") and other.free() == [0, 2] and not other.take([2, 0], "c.py")
    assert other.free() == [2] and other.not_free().startswith("card 0: taken by another `agentrl test`; card 1: ")
    assert other.take([2], "c.py")
    pool.give_back([0])
    other.refresh()
    assert other.free() == [0]
    assert {path.stat().st_mode & 0o222 for path in tmp_path.glob("agentrl-card-*.lock")} == {0}
    (smi.folder / "2.card").unlink()
    pool.refresh()
    assert pool.free() == [0] and pool.not_free().endswith("card 2: nvidia-smi does not list it")
    (smi.folder / "fails").touch()
    pool.refresh()
    assert pool.free() == [] and "card 0: nvidia-smi failed with code 1" in pool.not_free()


def test_cards_that_cannot_be_read_are_an_error(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.use(0, "[N/A]")
    with pytest.raises(ResourceError, match="does not say how much of a card's memory is in use: '0, GPU-0, "):
        read_cards()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ResourceError, match="nvidia-smi is not on the PATH"):
        read_cards()


@pytest.mark.parametrize(("asked", "visible", "found"), [
    (None, None, [0, 1, 2]), ([2, 0, 2], None, [0, 2]), (None, "2,0", [2, 0]), (None, "", []), (None, "-1", []),
    (None, "1,7,0", [1]), (None, "GPU-bbcc-3, GPU-aa", [2, 0]), (None, "GPU-bb", []), ([0], "0,1", [0]),
    ([3], None, "there is no card 3; there are 0, 1, 2"), ([2], "0,1", "card 2 is hidden by CUDA_VISIBLE_DEVICES=0,1"),
    (None, "MIG-1", "a part of a card"),
])  # fmt: skip
def test_the_cards_to_use_are_those_asked_for_among_those_shown(
    asked: list[int] | None, visible: str | None, found: list[int] | str
) -> None:
    if isinstance(found, str):
        with pytest.raises(ResourceError, match=found):
            choose_cards(CARDS, asked, visible)
    else:
        assert [card.number for card in choose_cards(CARDS, asked, visible)] == found
