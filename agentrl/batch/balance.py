"""Sequences of given lengths over ranks (`partition`) and into micro-batches under a hard token cap (`plan`).

A step runs rows of R micro-batches side by side, so it costs the sum over rows of the largest one.
Given any set of bins, sorting them by cost and cutting into rows of R minimizes that sum (an exchange
argument); what is lost against the ideal is then at most the costliest bin less the cheapest. So
several packings are built, each is re-rowed, and the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.batch.karmarkar import karmarkar_karp
from agentrl.batch.packings import (
    capped_greedy,
    first_fit_decreasing,
    fits,
    karmarkar_ranks,
    least_loaded,
    longest_first,
    shelf_packing,
)
from agentrl.errors import ConfigError

GOOD_ENOUGH = 1e-4
"""No further packing is tried once the cost is this close to the lower bound."""

LARGE = 20_000
"""Sequences from which on fewer packings are tried."""


@dataclass(frozen=True, slots=True)
class Rowed:
    """A packing in rows: micro-batch m of rank r is bin `m * ranks + r`; `where[i]` is item i's bin.
    `cost` = sum over rows of the costliest bin."""

    name: str
    where: np.ndarray
    micros: int
    cost: float


@dataclass(frozen=True, slots=True)
class BalancePlan:
    """`rows[rank][micro]` are row numbers; every rank has the same number of micro-batches (an empty
    list is a dummy). `cost` = sum over micro-batches of the slowest rank's cost, never below `bound`."""

    rows: list[list[list[int]]]
    cost: float
    bound: float
    winner: str

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def micros(self) -> int:
        """Micro-batches a rank, the same on all ranks, at least 1."""
        return len(self.rows[0])


def partition(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Items of each rank such that the largest total is small: the better of greedy and Karmarkar-Karp."""
    # Neither is always better: Karmarkar-Karp keeps item counts equal, which costs it where a few items are very long.
    candidates = [longest_first(costs, ranks), karmarkar_karp(costs, ranks)]
    best = min(candidates, key=lambda where: _largest(where, costs, ranks))
    return [np.flatnonzero(best == rank).tolist() for rank in range(ranks)]


def _largest(where: np.ndarray, costs: np.ndarray, bins: int) -> float:
    return float(np.bincount(where, weights=costs, minlength=bins).max())


def plan(
    lengths: Sequence[int] | np.ndarray | torch.Tensor,
    ranks: int,
    cap: int,
    a: float = 1.0,
    b: float = 0.0,
    *,
    overhead: float = 0.0,
    groups: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    prefix: Sequence[int] | np.ndarray | torch.Tensor | None = None,
) -> BalancePlan:
    """Place every sequence exactly once, at most `cap` tokens a micro-batch, with a small total cost.

    A sequence of n tokens costs a n + b n^2 (`b` = 0: linear layers only; attention adds the square)
    and each micro-batch `overhead` more. The step takes as long as its slowest rank in each row of
    micro-batches, so what is minimized is the sum over rows of the largest micro-batch cost.

    `groups[i]`, where given, is a group number: sequences of one group go into the same micro-batch as
    far as the cap allows. A negative number is no group: that sequence is free. `prefix[i]`: the first
    tokens of the sequence that the members of its group in one micro-batch compute once between them
    (equal within a group; 0: none). They cost, and count against the cap, once.

    Raises ConfigError where a single sequence is longer than the cap.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    check_cap(tokens, cap)
    costs = a * tokens.astype(np.float64) + b * tokens.astype(np.float64) ** 2
    once = np.zeros_like(tokens) if prefix is None else np.asarray(prefix, dtype=np.int64)
    unit = np.arange(len(tokens)) if groups is None else group_units(tokens, np.asarray(groups), cap, once)
    size = unit_sums(unit, tokens, once).astype(np.int64)
    price = unit_sums(unit, costs, a * once + b * once.astype(np.float64) ** 2)
    best = portfolio(size, price, ranks, cap, overhead)
    table = _table(best.where[unit], ranks, best.micros)
    return BalancePlan(table, best.cost, lower_bound(size, price, ranks, cap), best.name)


def group_units(tokens: np.ndarray, groups: np.ndarray, cap: float, prefix: np.ndarray | None = None) -> np.ndarray:
    """Unit of each sequence: a group, or the parts of a group that fill the cap one after the other; a
    sequence with a negative group number is a unit alone. See `plan` for `prefix`."""
    unit = np.empty(len(tokens), dtype=np.int64)
    once = np.zeros_like(tokens) if prefix is None else prefix
    last, room, number = -1, 0.0, -1
    # Stable, so that a group's rows keep their order; row by row, as what fits depends on what was taken before.
    for row in np.argsort(groups, kind="stable").tolist():
        joins = groups[row] == last and last >= 0 and room >= tokens[row] - once[row]
        if not joins:
            number, last, room = number + 1, int(groups[row]), float(cap)
        room -= float(tokens[row] - (once[row] if joins else 0))
        unit[row] = number
    return unit


def unit_sums(unit: np.ndarray, values: np.ndarray, once: np.ndarray) -> np.ndarray:
    """Sum of `values` over each unit, where `once` (equal within a unit) counts for one member only."""
    count = int(unit.max()) + 1 if len(unit) else 0
    total = np.bincount(unit, weights=values, minlength=count)
    members = np.bincount(unit, minlength=count)
    spared = np.zeros(count)
    spared[unit] = once
    return np.asarray(total - (members - 1) * spared)


def _table(where: np.ndarray, ranks: int, micros: int) -> list[list[list[int]]]:
    order = np.argsort(where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=micros * ranks))
    bins = [part.tolist() for part in np.split(order, ends[:-1])]
    return [[bins[micro * ranks + rank] for micro in range(micros)] for rank in range(ranks)]


def check_cap(tokens: np.ndarray, cap: int) -> None:
    """Raise ConfigError, naming the sequence, where one is longer than the cap."""
    if len(tokens) and int(tokens.max()) > cap:
        worst = int(tokens.argmax())
        raise ConfigError(
            f"sequence {worst} has {int(tokens[worst])} tokens, more than the hard cap of {cap} tokens "
            f"a micro-batch: "
            f"set optim.micro_tokens to at least {int(tokens[worst])}, or lower rollout.max_episode_tokens"
        )


def portfolio(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int, overhead: float = 0.0) -> Rowed:
    """The best packing found; never worse than any of the packings it tries.

    `overhead` is what each micro-batch row costs beside its tokens. No item may exceed the cap.
    """
    bound = lower_bound(tokens, costs, ranks, cap)
    found = [in_rows(name, where, costs, ranks) for name, where in baselines(tokens, costs, ranks, cap)]
    best = found[0]
    for rowed in found[1:]:
        best = _better(rowed, best, overhead)
    fewest = min(rowed.micros for rowed in found)
    for name, where in _improvements(tokens, costs, ranks, cap, fewest):
        # More micro-batches than needed are only worth it for a lower cost: with `fewest` of them at the bound, stop.
        if best.cost <= bound * (1 + GOOD_ENOUGH) and best.micros == fewest:
            break
        best = _better(in_rows(name, where, costs, ranks), best, overhead)
    return best


def _better(one: Rowed, other: Rowed, overhead: float) -> Rowed:
    """The cheaper packing; of two that differ by rounding only, the one with fewer micro-batches."""
    first, second = one.cost + overhead * one.micros, other.cost + overhead * other.micros
    if abs(first - second) <= 1e-12 * max(first, second):
        return one if one.micros < other.micros else other
    return one if first < second else other


def baselines(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> Iterator[tuple[str, np.ndarray]]:
    """What the field uses, by name; bins are numbered micro-batch * ranks + rank."""
    yield "karmarkar_ranks", karmarkar_ranks(tokens, costs, ranks, cap)
    yield "least_loaded", least_loaded(tokens, costs, ranks, cap)
    yield "first_fit_decreasing", first_fit_decreasing(tokens, cap)


def _improvements(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int, fewest: int) -> Iterator[tuple[str, np.ndarray]]:
    """Packings over all ranks at once, for rising numbers of micro-batches."""
    # How high a row of micro-batches would be if all were equal: shelves a little above and below it are tried too.
    mean = float(costs.sum()) / (ranks * fewest)
    for micros in _micro_counts(fewest, len(tokens)):
        where = capped_greedy(tokens, costs, micros * ranks, cap)
        if where is not None:
            yield f"greedy_bins_{micros}", where
        where = karmarkar_karp(costs, micros * ranks)
        if fits(tokens, where, cap):
            yield f"karmarkar_bins_{micros}", where
    for share in (1.0, 1.02, 0.9) if len(tokens) <= LARGE else (1.0, 0.9):
        yield f"shelves_{share}", shelf_packing(tokens, costs, ranks, cap, share * mean)


def _micro_counts(fewest: int, items: int) -> list[int]:
    """Numbers of micro-batches to try: many for small instances, few for large ones."""
    if items > LARGE:
        return sorted({fewest, fewest + 1 + fewest // 25})
    return sorted({fewest, fewest + 1, *(int(fewest * (1 + 0.04 * step)) + step for step in range(1, 5))})


def in_rows(name: str, where: np.ndarray, costs: np.ndarray, ranks: int) -> Rowed:
    """Sort the bins by cost and cut into rows of `ranks`; missing bins are empty ones."""
    count = int(where.max()) + 1 if len(where) else 1
    loads = np.bincount(where, weights=costs, minlength=count)
    order = np.argsort(-loads, kind="stable")
    order = order[: max(1, np.count_nonzero(np.bincount(where, minlength=count)))]  # empty bins go
    micros = -(-len(order) // ranks)
    place = np.full(count, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    return Rowed(name, place[where], micros, float(loads[order[::ranks]].sum()))


def as_given(name: str, where: np.ndarray, costs: np.ndarray, ranks: int) -> Rowed:
    """A packing with its bins in the rows that their numbers say (how the baselines run)."""
    micros = (int(where.max()) // ranks if len(where) else 0) + 1
    loads = np.bincount(where, weights=costs, minlength=micros * ranks)
    return Rowed(name, where, micros, float(loads.reshape(micros, ranks).max(axis=1).sum()))


def lower_bound(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> float:
    """No plan costs less: the mean over ranks, the costliest item, and the items longer than half the
    cap, no two of which share a bin, cut into rows of `ranks`."""
    if len(costs) == 0:
        return 0.0
    # Two items longer than half the cap never share a bin, so each needs one of its own, `ranks` of them in a row, and a
    # row costs what its costliest bin does: sorted by cost, every ranks-th of them.
    large = -np.sort(-costs[2 * tokens > cap])
    return max(float(costs.sum()) / ranks, float(costs.max()), float(large[::ranks].sum()))
