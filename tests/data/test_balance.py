"""The balancer: every sequence once, the cap kept, equal counts, never worse than the baselines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.packing import (
    baselines,
    first_fit_decreasing,
    group_units,
    in_rows,
    least_loaded,
    lower_bound,
    partition,
    plan,
    portfolio,
    shelf_packing,
)
from agentrl.utils.errors import ConfigError

sizes = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def table_is_whole(made, lengths, cap):
    flat = sorted(row for rank in made.rows for micro in rank for row in micro)
    assert flat == list(range(len(lengths)))
    assert {len(rank) for rank in made.rows} == {made.micros}
    for micro in itertools.chain.from_iterable(made.rows):
        assert sum(lengths[row] for row in micro) <= cap


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 9), st.integers(100, 400), st.sampled_from([0.0, 0.01, 1.0]))
def test_every_sequence_once_cap_kept_equal_counts_never_worse(lengths, ranks, cap, b):
    made = plan(lengths, ranks, cap, 1.0, b)
    table_is_whole(made, lengths, cap)
    tokens = np.asarray(lengths)
    costs = tokens + b * tokens.astype(float) ** 2
    slowest = [max(sum(costs[row] for row in made.rows[rank][micro]) for rank in range(ranks)) for micro in range(made.micros)]
    assert np.isclose(sum(slowest), made.cost)
    assert made.cost >= made.bound * (1 - 1e-9)
    for name, where in baselines(tokens, costs, ranks, cap):
        assert np.bincount(where, weights=tokens).max() <= cap
        loads = np.bincount(where, weights=costs, minlength=ranks * (where.max() // ranks + 1)).reshape(-1, ranks)
        assert made.cost <= loads.max(axis=1).sum() * (1 + 1e-9), name


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 6), st.integers(0, 5))
def test_groups_stay_together_as_far_as_the_cap_allows(lengths, ranks, groups):
    number = [row % (groups + 1) for row in range(len(lengths))]
    cap = 250
    made = plan(lengths, ranks, cap, groups=number)
    table_is_whole(made, lengths, cap)
    for group in set(number):
        members = [row for row in range(len(lengths)) if number[row] == group]
        homes = {(r, m) for r, rank in enumerate(made.rows) for m, micro in enumerate(rank) if set(micro) & set(members)}
        if sum(lengths[row] for row in members) <= cap:
            assert len(homes) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(-1, 4)), min_size=1, max_size=50), st.integers(1, 5))
def test_a_prefix_counts_once_a_micro_batch_and_the_cap_holds_for_what_is_computed(rows, ranks):
    """Groups 0..4 share their first 40 tokens; number -1 is not a group."""
    lengths = [40 + own for own, _ in rows]
    numbers = [number for _, number in rows]
    prefix = [40 if number >= 0 else 0 for number in numbers]
    cap, loads = 220, {}
    made = plan(lengths, ranks, cap, groups=numbers, prefix=prefix)
    assert sorted(row for rank in made.rows for micro in rank for row in micro) == list(range(len(rows)))
    assert {len(rank) for rank in made.rows} == {made.micros}
    for at, rank in enumerate(made.rows):
        for step, micro in enumerate(rank):
            spared = sum(40 * (sum(numbers[row] == number for row in micro) - 1) for number in {numbers[r] for r in micro} - {-1})
            loads[at, step] = sum(lengths[row] for row in micro) - spared
            assert loads[at, step] <= cap
    slowest = sum(max(loads[at, step] for at in range(ranks)) for step in range(made.micros))
    assert slowest <= made.cost + 1e-9  # parts of a group that meet again cost even less than planned
    for number in set(numbers) - {-1}:
        members = [row for row in range(len(rows)) if numbers[row] == number]
        if 40 + sum(lengths[row] - 40 for row in members) <= cap:
            assert sum(any(row in micro for row in members) for rank in made.rows for micro in rank) == 1


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 9), st.permutations(range(9)))
def test_rerowing_is_optimal_for_given_bins(lengths, ranks, shuffle):
    """Sorting bins by cost and cutting is never worse than any other order of the same bins."""
    costs = np.asarray(lengths, dtype=float)
    where = np.asarray([shuffle[i % 9] for i in range(len(lengths))])
    loads = np.bincount(where, weights=costs, minlength=9 * ranks).reshape(-1, ranks)
    assert in_rows("x", where, costs, ranks).cost <= loads.max(axis=1).sum() + 1e-9


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 9))
def test_first_fit_decreasing_is_the_plain_algorithm(lengths, ranks):
    cap = 120
    room: list[int] = []
    expected = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        home = next((b for b, left in enumerate(room) if left >= lengths[row]), len(room))
        if home == len(room):
            room.append(cap)
        room[home] -= lengths[row]
        expected[row] = home
    assert first_fit_decreasing(np.asarray(lengths), cap).tolist() == [expected[row] for row in range(len(lengths))]
    costs = np.asarray(lengths, dtype=float)
    for where in (
        shelf_packing(np.asarray(lengths), costs, ranks, cap, 50.0),
        least_loaded(np.asarray(lengths), costs, ranks, cap),
    ):
        assert np.bincount(where, weights=lengths).max() <= cap


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 9), st.sampled_from([0.0, 30.0]))
def test_no_bin_costs_more_than_its_shelf_is_high(lengths, ranks, height):
    """A shelf is as high as its costliest item, at least `height`: what is laid on it later adds nothing to its row."""
    costs = np.asarray(lengths, dtype=float) ** 2 / 100
    where = shelf_packing(np.asarray(lengths), costs, ranks, 120, height)
    for shelf in set(where // ranks):
        there = where // ranks == shelf
        assert np.bincount(where[there], weights=costs[there]).max() <= max(height, costs[there].max()) + 1e-9


def test_a_step_with_equal_sequences_is_perfect_and_small_ones_tie_to_few_micro_batches():
    made = plan([10] * 64, 8, 40, 1.0, 0.1)
    assert made.cost == made.bound == 64 * 20 / 8 and made.micros == 2
    assert plan(range(1, 40), 1, 100).micros == -(-sum(range(1, 40)) // 100)


def test_overhead_makes_fewer_micro_batches():
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(6.5, 0.8, 600), 1, 8192).astype(int)
    free = plan(lengths, 8, 8192, 1.0, 1 / 8192)
    dear = plan(lengths, 8, 8192, 1.0, 1 / 8192, overhead=1e6)
    assert dear.micros <= free.micros and dear.micros == -(-int(first_fit_decreasing(lengths, 8192).max() + 1) // 8)


def test_one_sequence_over_the_cap_is_named():
    with pytest.raises(ConfigError, match=r"sequence 1 has 301 tokens.*optim.micro_tokens to at least 301"):
        plan([5, 301], 2, 300)


def test_partition_is_balanced_and_whole():
    costs = np.random.default_rng(0).lognormal(6, 1, 500)
    parts = partition(costs, 8)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(500))
    assert max(costs[part].sum() for part in parts) <= 1.01 * costs.sum() / 8
    assert partition(np.zeros(0), 3) == [[], [], []]


def test_bound_counts_sequences_that_cannot_share():
    tokens = np.asarray([60, 60, 60, 10])
    assert lower_bound(tokens, tokens.astype(float), 2, 100) == 120.0
    assert portfolio(tokens, tokens.astype(float), 2, 100).cost == 120.0


def test_a_group_is_cut_in_the_order_of_its_rows():
    """20 rows of each of two groups in turn: five rows of ten tokens fill a cap of 50, the first ones first."""
    unit = group_units(np.full(40, 10), np.tile([1, 0], 20), 50.0)
    assert unit[1::2].tolist() == np.repeat([0, 1, 2, 3], 5).tolist()
    assert unit[0::2].tolist() == np.repeat([4, 5, 6, 7], 5).tolist()
