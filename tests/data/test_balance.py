"""Sequences over ranks and in micro-batches: every sequence once, the cap kept, few micro-batches."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.packing import first_fit_decreasing, group_units, micro_batches, next_fit_decreasing, partition
from agentrl.utils.errors import ConfigError
from tests.conftest import examples

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def is_whole(made, lengths, cap):
    assert sorted(itertools.chain.from_iterable(made)) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in micro) for micro in made]
    assert all(made) and max(loads) <= cap and loads == sorted(loads, reverse=True)


@settings(max_examples=examples(150), deadline=None)
@given(sizes, st.integers(100, 400))
def test_every_sequence_once_under_the_cap_in_as_few_micro_batches_as_either_way_finds(lengths, cap):
    made = micro_batches(lengths, cap)
    is_whole(made, lengths, cap)
    plain = {name: plainly(lengths, cap, last_only=name == "next") for name in ("first", "next")}
    assert len(made) == min(len(set(where)) for where in plain.values())
    assert first_fit_decreasing(np.asarray(lengths), cap).tolist() == plain["first"]
    assert next_fit_decreasing(np.asarray(lengths), cap).tolist() == plain["next"]


def plainly(lengths, cap, last_only):
    """The bin of each sequence, the longest first: in the first open bin with room, or in the last bin if it has room."""
    room: list[int] = []
    home = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        bins = range(max(len(room) - 1, 0), len(room)) if last_only else range(len(room))
        home[row] = next((number for number in bins if room[number] >= lengths[row]), len(room))
        room += [cap] * (home[row] == len(room))
        room[home[row]] -= lengths[row]
    return [home[row] for row in range(len(lengths))]


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 5))
def test_groups_stay_together_as_far_as_the_cap_allows(lengths, groups):
    number = [row % (groups + 1) for row in range(len(lengths))]
    cap = 250
    made = micro_batches(lengths, cap, groups=number)
    is_whole(made, lengths, cap)
    for group in set(number):
        members = [row for row in range(len(lengths)) if number[row] == group]
        if sum(lengths[row] for row in members) <= cap:
            assert sum(bool(set(micro) & set(members)) for micro in made) == 1


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(-1, 4)), min_size=1, max_size=50))
def test_a_prefix_counts_once_a_micro_batch_and_the_cap_holds_for_what_is_computed(rows):
    """Groups 0..4 share their first 40 tokens; number -1 is not a group."""
    lengths = [40 + own for own, _ in rows]
    numbers = [number for _, number in rows]
    prefix = [40 if number >= 0 else 0 for number in numbers]
    made = micro_batches(lengths, cap := 220, groups=numbers, prefix=prefix)
    assert sorted(itertools.chain.from_iterable(made)) == list(range(len(rows)))
    for micro in made:
        spared = sum(40 * (sum(numbers[row] == number for row in micro) - 1) for number in {numbers[r] for r in micro} - {-1})
        assert sum(lengths[row] for row in micro) - spared <= cap
    for number in set(numbers) - {-1}:
        members = [row for row in range(len(rows)) if numbers[row] == number]
        if 40 + sum(lengths[row] - 40 for row in members) <= cap:
            assert sum(any(row in micro for row in members) for micro in made) == 1


def test_few_micro_batches_and_none_at_all():
    assert len(micro_batches(range(1, 40), 100)) == -(-sum(range(1, 40)) // 100)
    assert micro_batches([10] * 8, 40) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert micro_batches([], 10) == [[]]  # a dummy, which takes part in the collectives


def test_one_sequence_over_the_cap_is_named():
    with pytest.raises(ConfigError, match=r"sequence 1 has 301 tokens.*optim.micro_tokens to at least 301"):
        micro_batches([5, 301], 300)


def test_partition_is_balanced_and_whole():
    costs = np.random.default_rng(0).lognormal(6, 1, 500)
    parts = partition(costs, 8)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(500))
    assert max(costs[part].sum() for part in parts) <= 1.01 * costs.sum() / 8
    assert partition(np.zeros(0), 3) == [[], [], []]


def test_a_group_is_cut_in_the_order_of_its_rows():
    """20 rows of each of two groups in turn: five rows of ten tokens fill a cap of 50, the first ones first."""
    unit = group_units(np.full(40, 10), np.tile([1, 0], 20), 50.0)
    assert unit[1::2].tolist() == np.repeat([0, 1, 2, 3], 5).tolist()
    assert unit[0::2].tolist() == np.repeat([4, 5, 6, 7], 5).tolist()
