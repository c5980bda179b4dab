"""The scheduler's loop on made-up cards and a made-up clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.gpu_tests.scheduler import Scheduler, exit_code
from tests.contrib.gpu_tests.made_up import World, job


def test_large_files_first_small_ones_beside_them_and_slots_besides() -> None:
    jobs = [job("one"), job("two"), job("a", 1), job("b", 2), job("c", 3)]
    world = World(jobs, cards=4, lengths={"c": 20.0, "one": 7.0}, slots=1)
    results = world.run()
    assert {name: counts.counts["passed"] for name, counts in results.items()} == dict.fromkeys(["one", "two", "a", "b", "c"], 1)
    starts = {name: (began, cards) for began, name, cards in world.noted.starts}
    assert starts == {"c": (0.0, (0, 1, 2)), "a": (0.0, (3,)), "one": (0.0, ()), "two": (7.0, ()), "b": (20.0, (0, 1))}
    assert world.locks.ours == set() and exit_code(list(results.values()), False) == 0


def test_a_card_whose_memory_does_not_come_back_is_out_of_service_and_the_rest_goes_on() -> None:
    jobs = [job("leaks", 2), job("needs_two", 2), job("small", 1), job("tiny", 1)]
    world = World(jobs, cards=3, lengths={"small": 3.0, "tiny": 30.0}, leaks=("leaks",))
    results = world.run()
    assert sorted(world.pool.out) == [0, 1] and world.pool.in_service == [2]
    assert world.pool.out[0] == "5 s after leaks ended: 4000 MiB in use (free: at most 256)"
    assert results["needs_two"].cases[0].outcome == "not run"
    assert results["needs_two"].problem.startswith(
        "not run: needs 2 cards, and 1 can be used; card 0 is out of service: 5 s after leaks"
    )
    assert [results[name].cards for name in ("small", "tiny")] == [(2,), (2,)]
    assert exit_code(list(results.values()), False) == 1


def test_a_card_is_free_again_by_a_new_reading_alone_and_never_once_it_is_out_of_service() -> None:
    world = World([], cards=2)
    pool, held = world.pool, world.cards.held

    def free(now: float) -> list[int]:
        world.now = now
        pool.refresh(now)
        return pool.free()

    assert free(0.0) == [0, 1] and pool.take([0], "a")
    held[0] = 3000
    pool.give_back([0], 1.0)
    assert pool.free() == [1], "the last reading is from before the file had it"
    assert free(2.0) == [1]
    held[0] = 100
    assert free(3.0) == [0, 1] and pool.take([0], "b")
    held[0] = 3000
    pool.give_back([0], 4.0)
    assert free(9.0) == [1] and list(pool.out) == [0]
    held[0] = 0
    assert free(10.0) == [1] and world.locks.ours == set()


def test_cards_that_others_use_are_not_given_and_waited_for_so_long() -> None:
    # Card 1 is somebody else's until second 30.
    world = World([job("two", 2), job("one", 1)], cards=2, used=lambda card, now: 900 if card == 1 and now < 30 else 200)
    results = world.run()
    assert [(began, name) for began, name, _ in world.noted.starts] == [(0.0, "one"), (30.0, "two")]
    waited = "waiting up to 60 s for cards that are not free: card 1: 900 MiB in use (free: at most 256), held by pid 77 (other)"
    assert world.noted.lines == [waited] and not results["two"].failed
    world = World([job("two", 2), job("one", 1)], cards=2, used=lambda card, now: 900 if card == 1 else 0, wait=7.0)
    results = world.run()
    assert results["one"].cases[0].outcome == "passed"
    assert (
        results["two"].cases[0].reason.startswith("needs 2 cards, 1 free after 7 s; card 1: 900 MiB in use") and world.now == 17.0
    )


def test_a_card_that_another_scheduler_has_locked_is_not_free() -> None:
    world = World([job("one", 1), job("two", 2)], cards=2, wait=3.0)
    world.locks.others = {0}
    results = world.run()
    assert results["two"].cases[0].reason.endswith("card 0: taken by another `agentrl test`")
    assert results["one"].cards == (1,)


def test_a_file_ends_with_its_limit_and_its_cards_go_on() -> None:
    world = World([job("hangs", 1, timeout=20.0), job("next", 1)], cards=1, lengths={"hangs": 1e9})
    results = world.run()
    assert results["hangs"].cases[0].outcome == "failed" and results["next"].cases[0].outcome == "passed"
    assert [(began, name) for began, name, _ in world.noted.starts] == [(0.0, "hangs"), (21.0, "next")]


def test_processes_that_do_not_end_cost_their_card_and_not_the_run() -> None:
    world = World([job("stuck", 1, timeout=20.0), job("next", 1)], cards=2, lengths={"stuck": 1e9}, stuck=("stuck",))
    world.run()
    assert world.pool.out == {1: "the processes of stuck could not be ended"} and world.now == pytest.approx(51.0)


@pytest.mark.parametrize(("stuck", "again", "ended"), [(False, False, 13.0), (True, False, 58.5), (True, True, 44.5)])
def test_ctrl_c_reports_every_test(stuck: bool, again: bool, ended: float) -> None:
    """Once: what runs is interrupted; a file that ignores it is ended 15 s later and given up 30 s after that. Twice: now."""
    jobs = [job("done", 1, known=3.0), job("long", 1, known=2.0), job("waits", 1, known=1.0), job("without")]
    world = World(jobs, cards=1, lengths={"done": 5.0, "long": 1e9}, stuck=("long",) if stuck else ())
    world.noted.each = lambda scheduler, now: scheduler.stop() if now in ((12.0, 13.5) if again else (12.0,)) else None
    results = world.run()
    outcomes = {name: one.cases[0].outcome for name, one in results.items()}
    assert outcomes == {"done": "passed", "without": "passed", "long": "interrupted", "waits": "not run"}
    assert results["waits"].cases[0].reason == "interrupted (Ctrl-C) before its file began" and not results["waits"].failed
    assert (world.now, world.scheduler.interrupted, exit_code(list(results.values()), True)) == (ended, True, 130)
    assert world.noted.lines[0] == "stopping: 1 file interrupted, with 15 s to end (Ctrl-C again: none); 1 file will not be run"


KINDS = ["well", "leaks", "hangs", "stuck"]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30), st.sampled_from(KINDS)), max_size=10),
    cards=st.integers(0, 4), slots=st.integers(1, 3), stop=st.one_of(st.none(), st.integers(0, 60)),
    foreign=st.sets(st.integers(0, 3)),
)  # fmt: skip
def test_every_file_runs_once_or_is_reported(
    sizes: list[tuple[int, int, str]], cards: int, slots: int, stop: int | None, foreign: set[int]
) -> None:
    names = [f"f{number}" for number in range(len(sizes))]
    kinds = dict(zip(names, (kind for _, _, kind in sizes), strict=True))
    world = World(
        [job(name, gpus, timeout=40.0) for name, (gpus, _, _) in zip(names, sizes, strict=True)],
        cards,
        {name: 1e9 if kind in ("hangs", "stuck") else seconds for name, (_, seconds, kind) in zip(names, sizes, strict=True)},
        slots=slots, leaks=tuple(name for name in names if kinds[name] == "leaks"),
        stuck=tuple(name for name in names if kinds[name] == "stuck"), used=lambda card, now: 5000 * (card in foreign),
    )  # fmt: skip

    def looked(scheduler: Scheduler, now: float) -> None:
        held = [card for session in scheduler.running.values() for card in session.cards]
        assert len(held) == len(set(held)) and not set(held) & (foreign | set(world.pool.out))
        assert sum(not session.cards for session in scheduler.running.values()) <= slots
        assert set(held) <= world.locks.ours
        if stop is not None and now >= stop:
            scheduler.stop()

    world.noted.each = looked
    results = world.run()
    started = [name for _, name, _ in world.noted.starts]
    assert sorted(results) == sorted(names) == sorted(name for _, name in world.noted.ends)
    assert len(started) == len(set(started))
    assert all((one.cases[0].outcome == "not run") == (name not in started) for name, one in results.items())
    usable = cards - len({card for card in foreign if card < cards})
    faultless = stop is None and all(kind == "well" for kind in kinds.values())
    fits = {name for name, (gpus, _, _) in zip(names, sizes, strict=True) if gpus <= usable}
    assert set(started) <= fits and (set(started) == fits or not faultless)
    assert world.locks.ours == set()
