"""Sequences over ranks and in micro-batches: every sequence once, the cap kept, few micro-batches."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.packing import group_units, micro_batches, partition
from tests.conftest import examples

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@settings(max_examples=examples(150), deadline=None)
@given(sizes, st.integers(100, 400))
def test_every_sequence_once_under_the_cap_in_the_first_micro_batch_with_room_and_never_more_than_next_fit_makes(lengths, cap):
    made = micro_batches(lengths, cap)
    loads = [sum(lengths[row] for row in micro) for micro in made]
    assert min(map(len, made)) and max(loads) <= cap and loads == sorted(loads, reverse=True)
    where = plainly(lengths, cap, last_only=False)
    assert sorted(map(list, made)) == sorted([row for row, one in enumerate(where) if one == number] for number in set(where))
    assert len(made) <= len(set(plainly(lengths, cap, last_only=True)))


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


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(-1, 4)), min_size=1, max_size=50), st.sampled_from([0, 40]))
def test_groups_stay_together_as_far_as_the_cap_allows_and_their_prefix_counts_once_a_micro_batch(rows, shared):
    """Groups 0..4 share their first 40 tokens, or none; number -1 is not a group."""
    lengths = [shared + own for own, _ in rows]
    numbers = [number for _, number in rows]
    prefix = [shared if number >= 0 else 0 for number in numbers] if shared else None
    made = micro_batches(lengths, cap := 220, groups=numbers, prefix=prefix)
    assert sorted(itertools.chain.from_iterable(made)) == list(range(len(rows)))
    loads = []
    for micro in made:
        spared = sum(shared * (sum(numbers[row] == number for row in micro) - 1) for number in {numbers[r] for r in micro} - {-1})
        loads.append(sum(lengths[row] for row in micro) - spared)
    assert min(map(len, made)) and max(loads) <= cap
    for number in set(numbers) - {-1}:
        members = [row for row in range(len(rows)) if numbers[row] == number]
        if shared + sum(lengths[row] - shared for row in members) <= cap:
            assert sum(any(row in micro for row in members) for micro in made) == 1
    assert shared or loads == sorted(loads, reverse=True)  # a cut group counts its prefix in each part


def test_few_micro_batches_and_none_at_all():
    assert len(micro_batches(range(1, 40), 100)) == -(-sum(range(1, 40)) // 100)
    assert [micro.tolist() for micro in micro_batches([10] * 8, 40)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [micro.tolist() for micro in micro_batches([], 10)] == [[]]  # a dummy, which takes part in the collectives


def test_partition_is_balanced_and_whole():
    costs = np.random.default_rng(0).lognormal(6, 1, 500)
    rank = partition(costs, 8)
    assert len(rank) == 500 and set(rank.tolist()) == set(range(8))
    assert np.bincount(rank, weights=costs).max() <= 1.01 * costs.sum() / 8
    assert not len(partition(np.zeros(0), 3))


def test_a_group_is_cut_in_the_order_of_its_rows():
    """20 rows of each of two groups in turn: five rows of ten tokens fill a cap of 50, the first ones first."""
    unit = group_units(np.full(40, 10), np.tile([1, 0], 20), 50.0)
    assert unit[1::2].tolist() == np.repeat([0, 1, 2, 3], 5).tolist()
    assert unit[0::2].tolist() == np.repeat([4, 5, 6, 7], 5).tolist()
