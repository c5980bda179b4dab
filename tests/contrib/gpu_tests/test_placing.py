"""Which file starts next: against rules of its own, on random files, lengths and cards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.gpu_tests.scheduler import Held, Queued, Reservation, choose, largest_first, time_left

needs = st.lists(st.tuples(st.integers(1, 5), st.one_of(st.none(), st.integers(1, 30))), max_size=12)


def files(sizes: Sequence[tuple[int, float | None]]) -> list[Queued]:
    return [Queued(f"f{number}", gpus, seconds) for number, (gpus, seconds) in enumerate(sizes)]


def test_the_largest_start_first_and_smaller_ones_beside_them() -> None:
    waiting = [Queued("a", 1), Queued("b", 3), Queued("c", 2, 5.0), Queued("d", 2, 9.0)]
    assert [one.name for one in largest_first(waiting)] == ["b", "d", "c", "a"]
    assert choose(waiting, range(8), []).starts == [("b", (0, 1, 2)), ("d", (3, 4)), ("c", (5, 6)), ("a", (7,))]
    # Four cards: 3 + 1; neither of the files with 2 fits, and the first of them waits for b.
    choice = choose(waiting, range(4), [])
    assert choice.starts == [("b", (0, 1, 2)), ("a", (3,))] and choice.reserved == Reservation("d", frozenset({"b"}))


def test_a_small_file_uses_only_what_the_reservation_leaves_over() -> None:
    held = [Held("old", 3, end=50.0), Held("long", 1, end=90.0)]
    waiting = [Queued("big", 4), Queued("small", 1), Queued("tiny", 1)]
    # Of 6 cards 2 are free; big needs 4: with old's 3 there are 5, so one is over, for one small file.
    choice = choose(waiting, [4, 5], held)
    assert choice == choose(waiting, [4, 5], held, choice.reserved)
    assert choice.starts == [("small", (4,))] and choice.reserved == Reservation("big", frozenset({"old", "long"}))
    # With 1 free nothing is over: 1 + 3 are just what big needs.
    assert choose(waiting, [5], held, choice.reserved).starts == []


def test_a_file_that_our_own_cards_cannot_satisfy_holds_nobody_up() -> None:
    choice = choose([Queued("big", 4), Queued("small", 1)], [0, 1], [Held("old", 1)])  # a fourth card is somebody else's
    assert choice.starts == [("small", (0,))] and choice.reserved is None


@settings(deadline=None)
@given(needs, st.sets(st.integers(0, 7)), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=4))
def test_cards_are_given_once_to_whom_they_are_free_and_larger_files_that_fit_are_not_passed_over(
    sizes: list[tuple[int, float | None]], free: set[int], running: list[tuple[int, int]]
) -> None:
    waiting, held = files(sizes), [Held(f"r{number}", cards, end) for number, (cards, end) in enumerate(running)]
    choice = choose(waiting, list(free), held)
    given_cards = [card for _, cards in choice.starts for card in cards]
    assert len(given_cards) == len(set(given_cards)) and set(given_cards) <= free
    assert {name: len(cards) for name, cards in choice.starts}.items() <= {one.name: one.gpus for one in waiting}.items()
    started = {name for name, _ in choice.starts}
    left = len(free)
    for one in largest_first(waiting):  # before anything is refused, every file that fits is started
        if one.name not in started:
            assert choice.reserved is not None or one.gpus > left
            break
        left -= one.gpus


@settings(deadline=None)
@given(needs, st.integers(1, 6), st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_played_to_the_end_every_file_runs_once_and_a_reservation_is_kept(
    sizes: list[tuple[int, float | None]], cards: int, true: list[int]
) -> None:
    """With true lengths that have nothing to do with the expected ones. A file with a reservation starts no later than the end of
    all files that ran when it was first refused."""
    waiting = [one for one in files(sizes) if one.gpus <= cards]
    lengths = {one.name: true[number] for number, one in enumerate(waiting)}
    now, free, ran, promise = 0, set(range(cards)), [], dict[str, int]()
    running: dict[str, tuple[tuple[int, ...], int, float]] = {}  # cards, true end, expected end
    reserved: Reservation | None = None
    while waiting or running:
        held = [Held(name, len(given_cards), expected) for name, (given_cards, _, expected) in running.items()]
        choice = choose(waiting, sorted(free), held, reserved)
        for name, given_cards in choice.starts:
            assert set(given_cards) <= free
            free -= set(given_cards)
            ran.append(name)
            assert now <= promise.get(name, math.inf)
            seconds = next(one.seconds for one in waiting if one.name == name)
            running[name] = (given_cards, now + lengths[name], now + (seconds or math.inf))
        waiting = [one for one in waiting if one.name not in running]
        reserved = choice.reserved
        if reserved is not None and reserved.name not in promise:
            promise[reserved.name] = max(running[name][1] for name in reserved.running)
        assert running, "files wait while nothing runs"
        now = min(end for _, end, _ in running.values())
        for name in [name for name, (_, end, _) in running.items() if end == now]:
            free |= set(running.pop(name)[0])
    assert len(ran) == len(set(ran)) == sum(gpus <= cards for gpus, _ in sizes)


def test_the_time_left_is_that_of_the_same_packing() -> None:
    waiting = [
        Queued("a", 2, 30.0),
        Queued("b", 1, 20.0),
        Queued("c", 1, 5.0),
        Queued("cpu1", 0, 12.0),
        Queued("cpu2", 0, 9.0),
    ]
    # Two cards, of which one is used for 10 s more: a begins at 10 and ends at 40, then b and c side by side until 60.
    assert time_left(waiting, {"old": (1, 10.0)}, [0], slots=1) == pytest.approx(60.0)
    assert time_left(waiting[3:], {}, [], slots=1) == pytest.approx(21.0)
    assert time_left([Queued("x", 4, 9.0)], {}, [0], slots=1) == 0.0  # fits nowhere
