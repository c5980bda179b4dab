"""Balance sequences over ranks and micro-batch rows.

A step runs rows of R micro-batches side by side, so it costs the sum over rows of the largest one.
Given any set of bins, sorting them by cost and cutting into rows of R minimizes that sum (an exchange
argument); what is lost against the ideal is then at most the costliest bin less the cheapest. So
several packings are built, each is re-rowed, and the best is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from agentrl.batch.karmarkar import karmarkar_karp
from agentrl.batch.packings import (
    capped_greedy,
    first_fit_decreasing,
    fits,
    greedy,
    karmarkar_ranks,
    least_loaded,
    shelves,
)

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


def partition(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Items of each rank such that the largest total is small: the better of greedy and Karmarkar-Karp."""
    candidates = [greedy(costs, ranks), karmarkar_karp(costs, ranks)]
    best = min(candidates, key=lambda where: _largest(where, costs, ranks))
    return [np.flatnonzero(best == rank).tolist() for rank in range(ranks)]


def _largest(where: np.ndarray, costs: np.ndarray, bins: int) -> float:
    return float(np.bincount(where, weights=costs, minlength=bins).max())


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
    mean = float(costs.sum()) / (ranks * fewest)
    for micros in _micro_counts(fewest, len(tokens)):
        where = capped_greedy(tokens, costs, micros * ranks, cap)
        if where is not None:
            yield f"greedy_bins_{micros}", where
        where = karmarkar_karp(costs, micros * ranks)
        if fits(tokens, where, cap):
            yield f"karmarkar_bins_{micros}", where
    for share in (1.0, 1.02, 0.9) if len(tokens) <= LARGE else (1.0, 0.9):
        yield f"shelves_{share}", shelves(tokens, costs, ranks, cap, share * mean)


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
    large = -np.sort(-costs[2 * tokens > cap])
    return max(float(costs.sum()) / ranks, float(costs.max()), float(large[::ranks].sum()))
