"""Cards that are half taken or not read, reruns, limits of a file's own, and places of what is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.contrib.gpu_tests.cards import CardMemory, CardPool
from agentrl.contrib.gpu_tests.declare import Earlier, recall, remember
from agentrl.contrib.gpu_tests.run import read_jobs
from agentrl.contrib.gpu_tests.scheduler import Held, Queued, Reservation, choose, largest_first
from agentrl.contrib.gpu_tests.session import child_env, own_path
from agentrl.contrib.gpu_tests.verdict import Case, Ending, FileResult, JournalReader, Stacks, conclude
from agentrl.utils.errors import ResourceError
from tests.contrib.gpu_tests.made_up import MadeUpCards, NoLocks, World, job


def pool_of(cards: Any, locks: NoLocks) -> CardPool:
    pool = CardPool(cards, range(cards.count), locks, lambda line: None)  # type: ignore[arg-type]
    pool.refresh(0.0)
    return pool


def test_of_cards_that_cannot_all_be_taken_none_is_kept() -> None:
    locks = NoLocks()
    locks.others = {2}
    pool = pool_of(MadeUpCards(3, lambda: 0.0), locks)
    assert not pool.take([0, 1, 2], "big.py") and locks.ours == set() and pool.free() == [0, 1]
    assert pool.take([0, 1], "small.py") and pool.free() == []


def test_a_card_that_was_given_back_is_looked_at_at_once() -> None:
    """However long a reading is good for otherwise: another file may wait for it."""
    cards = MadeUpCards(1, lambda: 0.0, read_every=60.0)
    pool = pool_of(cards, NoLocks())
    assert pool.take([0], "a.py")
    pool.give_back([0], 1.0)
    assert pool.settling and pool.free() == []
    pool.refresh(1.0)
    assert not pool.settling and pool.free() == [0]


def test_a_card_whose_memory_cannot_be_read_has_not_given_it_back() -> None:
    class Silent(MadeUpCards):
        silent = False

        def read(self) -> list[CardMemory]:
            if self.silent:
                raise ResourceError("no answer")
            return super().read()

    cards = Silent(1, lambda: 0.0)
    pool = pool_of(cards, NoLocks())
    assert pool.take([0], "a.py")
    cards.silent = True
    pool.give_back([0], 1.0)
    pool.refresh(2.0)
    assert pool.settling and pool.free() == []
    pool.refresh(22.0)
    assert "20 s after" in pool.out[0] or "21 s after" in pool.out[0]


def test_a_file_is_expected_to_end_as_last_time_and_else_at_its_limit() -> None:
    world = World([job("known", 1, 100.0, 7.0), job("new", 1, 100.0)], cards=2)
    world.scheduler.step(5.0)
    assert sorted((one.name, one.end) for one in world.scheduler.held()) == [("known", 12.0), ("new", 105.0)]


def test_of_equal_cards_an_unknown_length_counts_as_the_longest() -> None:
    waiting = [Queued("short", 1, 3.0), Queued("new", 1), Queued("long", 1, 90.0)]
    assert [one.name for one in largest_first(waiting)] == ["new", "long", "short"]


def test_a_reservation_waits_for_the_files_that_ran_when_it_was_made_and_no_later_ones() -> None:
    """Else each small file that starts beside it could put it off once more."""
    held = [Held("a", 1, 90.0), Held("b", 1, 50.0), Held("later", 1, 1.0)]
    before = Reservation("big", frozenset({"a", "b"}))
    choice = choose([Queued("big", 3), Queued("tiny", 1)], [7], held, before)
    assert choice.reserved == before and choice.starts == []
    assert choose([Queued("big", 3), Queued("tiny", 1)], [7], held).reserved == Reservation("big", frozenset({"a", "b", "later"}))


def told(path: Path, *reports: tuple[str, str, str]) -> Case:
    events: list[dict[str, Any]] = [{"event": "collected", "tests": ["a.py::test_a"]}]
    for when, outcome, reason in reports:
        events.append({"event": "report", "test": "a.py::test_a", "when": when, "outcome": outcome, "seconds": 1.0,
                       "reason": reason, "text": reason, "output": []})  # fmt: skip
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    said = JournalReader(path)
    said.read()
    [case], _ = conclude(said, Ending(0), ["test_a"], Stacks(), "")
    return case


def test_a_test_that_is_run_again_is_what_it_was_last_and_a_failure_is_the_first_of_its_phases(tmp_path: Path) -> None:
    first = [("setup", "passed", ""), ("call", "failed", "flaky"), ("teardown", "passed", "")]
    again = [("setup", "passed", ""), ("call", "passed", ""), ("teardown", "passed", "")]
    assert told(tmp_path / "j", *first).reason == "flaky"
    found = told(tmp_path / "j", *first, *again)
    assert (found.outcome, found.reason, found.seconds) == ("passed", "", 3.0)
    both = told(tmp_path / "j", ("setup", "passed", ""), ("call", "failed", "1 != 2"), ("teardown", "failed", "no socket"))
    assert (both.outcome, both.phase, both.reason) == ("failed", "call", "1 != 2")


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_exit_code_that_is_no_verdict_is_a_problem_of_the_file(code: int, tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"event": "collected", "tests": []}\n')
    said = JournalReader(tmp_path / "j")
    said.read()
    assert conclude(said, Ending(code), [], Stacks(), "bye")[1] == f"ended with exit code {code} outside of its tests: bye"


@pytest.mark.parametrize(("mark", "limit"), [("pytest.mark.gpus(0, timeout=7)", 7.0), ("pytest.mark.gpus(1)", 99.0)])
def test_a_files_own_limit_is_before_the_runs(mark: str, limit: float, tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text(f"import pytest\npytestmark = {mark}\ndef test_a(): ...\n")
    [one], [] = read_jobs({str(file): (str(file),)}, {str(file): Earlier(3.0)}, 99.0)
    assert (one.timeout, one.known, one.listed) == (limit, 3.0, ("test_a",))


def test_of_tests_that_were_read_from_the_text_the_file_is_run_again_as_a_whole(tmp_path: Path) -> None:
    """With parameters their names are others."""
    remember(tmp_path, [FileResult("a.py", (Case("test_a", "not run"),), collected=False)])
    remember(tmp_path, [FileResult("b.py", (Case("test_b[1]", "failed"),), collected=True)])
    assert {file: one.left for file, one in recall(tmp_path).items()} == {"a.py": None, "b.py": ("test_b[1]",)}


def test_what_a_run_adds_to_the_environment_is_before_what_it_was_started_with() -> None:
    found = child_env({"TMPDIR": "/net", "CUDA_VISIBLE_DEVICES": "0,1,2"}, {"TMPDIR": "/tmp/own"}, (2,))
    assert found["TMPDIR"] == "/tmp/own" and found["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize("kind", ["logs", "journals", "caches"])
def test_no_two_files_write_to_one_place(kind: Any, tmp_path: Path) -> None:
    """Of two that did, each would read the other's tests as its own."""
    files: Sequence[str] = (
        "a/b_test.py", "a_b_test.py", "a/b/test.py", "tests/é.py", "tests/ü.py", "/a/b_test.py", "/a_b_test.py", "test x.py",
        "test_x.py", "test-x.py", "a.py.py", "a.py",
    )  # fmt: skip
    places = [own_path(tmp_path, kind, file) for file in files]
    assert len(set(places)) == len(files) and all(place.is_relative_to(tmp_path / kind) for place in places)
