"""Partition sequences over ranks and pack them into micro-batches under a token cap."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.utils.errors import ConfigError

# Ways to put sequences into micro-batches under a hard token cap. Each returns the bin of every item.


def longest_first(costs: np.ndarray, bins: int) -> np.ndarray:
    """Longest processing time first (Graham, 1969): each item, the costliest first, goes to the least loaded bin."""
    bin_of = np.empty(len(costs), dtype=np.int64)
    heap = [(0.0, bin_) for bin_ in range(bins)]
    price = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        load, bin_ = heap[0]
        bin_of[item] = bin_
        heapq.heapreplace(heap, (load + price[item], bin_))
    return bin_of


def first_fit_decreasing(tokens: np.ndarray, cap: int) -> np.ndarray:
    """First-fit decreasing: each item, the longest first, goes into the first open bin with room.

    Items of equal length are placed together: the open bins with room take as many as fit, in order.
    """
    order = np.argsort(-tokens, kind="stable")
    sizes = tokens[order]
    bin_of = np.empty(len(tokens), dtype=np.int64)
    room = np.empty(max(1, len(tokens)), dtype=np.int64)
    opened, at = 0, 0
    starts = np.flatnonzero(np.concatenate(([True], sizes[1:] != sizes[:-1]))) if len(sizes) else sizes
    counts = np.diff(np.append(starts, len(sizes)))
    for size, count in zip(sizes[starts].tolist(), counts.tolist(), strict=True):
        slots = np.flatnonzero(room[:opened] >= size)
        fits = room[slots] // size if size else np.full(len(slots), count)
        # A bin takes what the bins before it left over: the same result as item by item, in one pass per distinct length.
        taken = np.minimum(fits, np.maximum(0, count - (np.cumsum(fits) - fits)))
        left = count - int(taken.sum())
        if left:
            per_bin = cap // size if size else left
            fresh = -(-left // per_bin)
            amounts = np.full(fresh, per_bin)
            amounts[-1] = left - per_bin * (fresh - 1)
            room[opened : opened + fresh] = cap
            slots = np.concatenate((slots, np.arange(opened, opened + fresh)))
            taken = np.concatenate((taken, amounts))
            opened += fresh
        room[slots] -= taken * size
        bin_of[order[at : at + count]] = np.repeat(slots, taken)
        at += count
    return bin_of


def least_loaded(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> np.ndarray:
    """Greedy over ranks; each rank then fills its micro-batches one after the other (next fit).

    Bin number = micro-batch * ranks + rank.
    """
    owner = longest_first(costs, ranks)
    order = np.argsort(-costs, kind="stable").tolist()
    micro, room = [0] * ranks, [cap] * ranks
    bin_of = np.empty(len(tokens), dtype=np.int64)
    size, rank_of = tokens.tolist(), owner.tolist()
    for item in order:
        rank = rank_of[item]
        if room[rank] < size[item]:
            micro[rank] += 1
            room[rank] = cap
        room[rank] -= size[item]
        bin_of[item] = micro[rank] * ranks + rank
    return bin_of


def capped_greedy(tokens: np.ndarray, costs: np.ndarray, bins: int, cap: int, look: int = 8) -> np.ndarray | None:
    """Greedy over all bins of all ranks at once: each item goes into the cheapest of the `look` least loaded
    bins that has room; None if none of them has."""
    bin_of = np.empty(len(tokens), dtype=np.int64)
    heap = [(0.0, bin_) for bin_ in range(bins)]
    room = [cap] * bins
    size, price = tokens.tolist(), costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        # Bins without room for this item are set aside, then put back, because a shorter item may still fit. Giving up
        # after `look` of them keeps the time near n log n; the caller then tries other packings or more bins.
        full: list[tuple[float, int]] = []
        while heap and len(full) < look and room[heap[0][1]] < size[item]:
            full.append(heapq.heappop(heap))
        if not heap or len(full) == look:
            return None
        load, bin_ = heap[0]
        heapq.heapreplace(heap, (load + price[item], bin_))
        room[bin_] -= size[item]
        bin_of[item] = bin_
        for entry in full:
            heapq.heappush(heap, entry)
    return bin_of


def shelf_packing(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int, height: float) -> np.ndarray:
    """First-fit decreasing onto shelves: a shelf is a row of `ranks` bins, as high as the cost of its first (costliest)
    item, at least `height`; later items fill any bin that has room under the shelf's height and the cap, which makes the
    row no costlier.

    The idea is that of first-fit decreasing height in strip packing (Coffman et al., 1980). Bin number =
    shelf * ranks + rank.
    """
    order = np.lexsort((-tokens, -costs))
    pair = np.stack((costs[order], tokens[order].astype(np.float64)), axis=1)
    changed = np.ones(len(pair), dtype=bool)
    changed[1:] = (pair[1:] != pair[:-1]).any(axis=1)
    starts = np.flatnonzero(changed).tolist()
    bin_of = np.empty(len(tokens), dtype=np.int64)
    limit = max(1, len(tokens)) + ranks
    room, free = np.zeros(limit), np.zeros(limit)
    opened = 0
    for at, end in itertools.pairwise([*starts, len(pair)]):
        price, size = pair[at]
        while at < end:
            slots = np.flatnonzero((room[:opened] >= size) & (free[:opened] >= price))
            by_size = room[slots] // max(size, 1.0)
            by_price = free[slots] // price if price > 0 else by_size
            amount = np.minimum(by_size, by_price).astype(np.int64)
            # Equal items are placed at once: the bins, in order, take what fits until no item is left.
            amount = np.minimum(amount, np.maximum(0, end - at - (np.cumsum(amount) - amount)))
            placed = int(amount.sum())
            bin_of[order[at : at + placed]] = np.repeat(slots, amount)
            room[slots] -= amount * size
            free[slots] -= amount * price
            at += placed
            if at < end:
                room[opened : opened + ranks] = cap
                free[opened : opened + ranks] = max(price, height)
                opened += ranks
    return bin_of


# Sequences of given lengths over ranks (`partition`) and into micro-batches under a hard token cap (`plan`).
#
# A step runs rows of R micro-batches in parallel, so its cost is the sum over rows of the largest one.
# Given any set of bins, sorting them by cost and cutting into rows of R minimizes that sum (by an exchange
# argument); the loss against the ideal is then at most the cost of the costliest bin minus that of the cheapest.
# So several packings are built, the bins of each are sorted into rows, and the best packing is kept.

GOOD_ENOUGH = 1e-4
"""No further packing is tried once the cost is this close to the lower bound."""

LARGE = 20_000
"""From this many sequences on, fewer packings are tried."""


@dataclass(frozen=True, slots=True)
class Rowed:
    """A packing in rows: micro-batch m of rank r is bin `m * ranks + r`; `bin_of[i]` is item i's bin.
    `cost` = sum over rows of the costliest bin."""

    name: str
    bin_of: np.ndarray
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
        """Micro-batches per rank, the same on all ranks, at least 1."""
        return len(self.rows[0])


def partition(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """The items of each rank, so that the largest total is small."""
    owner = longest_first(costs, ranks)
    return [np.flatnonzero(owner == rank).tolist() for rank in range(ranks)]


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
    """Place every sequence exactly once, at most `cap` tokens per micro-batch, with a small total cost.

    A sequence of n tokens costs a n + b n^2 (`b` = 0: linear layers only; attention adds the square),
    and each micro-batch costs `overhead` more. In each row of micro-batches the step waits for its slowest
    rank, so the plan minimizes the sum over rows of the largest micro-batch cost.

    `groups[i]`, if given, is a group number: sequences of one group go into the same micro-batch as
    far as the cap allows. A sequence with a negative number has no group and may go anywhere. `prefix[i]`:
    the number of first tokens of the sequence that the members of its group in one micro-batch compute only
    once (equal within a group; 0: none). They cost, and count against the cap, once.

    Raises ConfigError if a single sequence is longer than the cap.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    check_cap(tokens, cap)
    costs = a * tokens.astype(np.float64) + b * tokens.astype(np.float64) ** 2
    once = np.zeros_like(tokens) if prefix is None else np.asarray(prefix, dtype=np.int64)
    unit = np.arange(len(tokens)) if groups is None else group_units(tokens, np.asarray(groups), cap, once)
    size = unit_sums(unit, tokens, once).astype(np.int64)
    # A further member saves the prefix's own cost. Its remaining tokens still attend to the prefix, and this part of their
    # square stays.
    price = unit_sums(unit, costs, a * once + b * once.astype(np.float64) ** 2)
    best = portfolio(size, price, ranks, cap, overhead)
    table = _table(best.bin_of[unit], ranks, best.micros)
    return BalancePlan(table, best.cost, lower_bound(size, price, ranks, cap), best.name)


def group_units(tokens: np.ndarray, groups: np.ndarray, cap: float, prefix: np.ndarray | None = None) -> np.ndarray:
    """The unit of each sequence: a group, or the parts of a group that fill the cap one after the other; a
    sequence with a negative group number is a unit by itself. See `plan` for `prefix`."""
    unit = np.empty(len(tokens), dtype=np.int64)
    once = np.zeros_like(tokens) if prefix is None else prefix
    last, room, number = -1, 0.0, -1
    # Stable, so that a group's rows keep their order. Row by row, because what fits depends on the rows placed before.
    for row in np.argsort(groups, kind="stable").tolist():
        joins = groups[row] == last and last >= 0 and room >= tokens[row] - once[row]
        if not joins:
            number, last, room = number + 1, int(groups[row]), float(cap)
        room -= float(tokens[row] - (once[row] if joins else 0))
        unit[row] = number
    return unit


def unit_sums(unit: np.ndarray, values: np.ndarray, once: np.ndarray) -> np.ndarray:
    """Sum of `values` over each unit; `once` (equal within a unit) is part of each value and counted for one member only."""
    count = int(unit.max()) + 1 if len(unit) else 0
    total = np.bincount(unit, weights=values, minlength=count)
    members = np.bincount(unit, minlength=count)
    spared = np.zeros(count)
    spared[unit] = once
    return np.asarray(total - (members - 1) * spared)


def _table(bin_of: np.ndarray, ranks: int, micros: int) -> list[list[list[int]]]:
    order = np.argsort(bin_of, kind="stable")
    ends = np.cumsum(np.bincount(bin_of, minlength=micros * ranks))
    bins = [part.tolist() for part in np.split(order, ends[:-1])]
    return [[bins[micro * ranks + rank] for micro in range(micros)] for rank in range(ranks)]


def check_cap(tokens: np.ndarray, cap: int) -> None:
    """Raise ConfigError, naming the sequence, if one is longer than the cap."""
    if len(tokens) and int(tokens.max()) > cap:
        worst = int(tokens.argmax())
        raise ConfigError(
            f"sequence {worst} has {int(tokens[worst])} tokens, more than the hard cap of {cap} tokens per micro-batch: "
            f"set optim.micro_tokens to at least {int(tokens[worst])}, or lower rollout.max_episode_tokens"
        )


def portfolio(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int, overhead: float = 0.0) -> Rowed:
    """The best packing found; never worse than any of the packings it tries.

    `overhead` is what each row of micro-batches costs in addition to its tokens. No item may exceed the cap.
    """
    bound = lower_bound(tokens, costs, ranks, cap)
    standard = [in_rows(name, bin_of, costs, ranks) for name, bin_of in baselines(tokens, costs, ranks, cap)]
    best = standard[0]
    for rowed in standard[1:]:
        best = _better(rowed, best, overhead)
    fewest = min(rowed.micros for rowed in standard)
    for name, bin_of in _improvements(tokens, costs, ranks, cap, fewest):
        # More micro-batches than needed are only worth it for a lower cost: once `fewest` of them reach the bound, stop.
        if best.cost <= bound * (1 + GOOD_ENOUGH) and best.micros == fewest:
            break
        best = _better(in_rows(name, bin_of, costs, ranks), best, overhead)
    return best


def _better(one: Rowed, other: Rowed, overhead: float) -> Rowed:
    """The cheaper packing; if the two differ by rounding only, the one with fewer micro-batches."""
    first, second = one.cost + overhead * one.micros, other.cost + overhead * other.micros
    if abs(first - second) <= 1e-12 * max(first, second):
        return one if one.micros < other.micros else other
    return one if first < second else other


def baselines(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> Iterator[tuple[str, np.ndarray]]:
    """Two packings in common use, by name; bins are numbered micro-batch * ranks + rank."""
    yield "least_loaded", least_loaded(tokens, costs, ranks, cap)
    yield "first_fit_decreasing", first_fit_decreasing(tokens, cap)


def _improvements(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int, fewest: int) -> Iterator[tuple[str, np.ndarray]]:
    """Packings over all ranks at once, for increasing numbers of micro-batches."""
    # The cost of a row of micro-batches if all were equal: shelves a little above and below it are tried too.
    mean = float(costs.sum()) / (ranks * fewest)
    for micros in _micro_counts(fewest, len(tokens)):
        bin_of = capped_greedy(tokens, costs, micros * ranks, cap)
        if bin_of is not None:
            yield f"greedy_bins_{micros}", bin_of
    for share in (1.0, 1.02, 0.9) if len(tokens) <= LARGE else (1.0, 0.9):
        yield f"shelves_{share}", shelf_packing(tokens, costs, ranks, cap, share * mean)


def _micro_counts(fewest: int, items: int) -> list[int]:
    """Numbers of micro-batches to try: many for small instances, few for large ones."""
    if items > LARGE:
        return sorted({fewest, fewest + 1 + fewest // 25})
    return sorted({fewest, fewest + 1, *(int(fewest * (1 + 0.04 * step)) + step for step in range(1, 5))})


def in_rows(name: str, bin_of: np.ndarray, costs: np.ndarray, ranks: int) -> Rowed:
    """Sort the bins by cost and cut them into rows of `ranks`; the last row may lack bins, which are then empty."""
    count = int(bin_of.max()) + 1 if len(bin_of) else 1
    loads = np.bincount(bin_of, weights=costs, minlength=count)
    order = np.argsort(-loads, kind="stable")
    order = order[: max(1, np.count_nonzero(np.bincount(bin_of, minlength=count)))]  # drops empty bins, which sort last
    micros = -(-len(order) // ranks)
    place = np.full(count, -1, dtype=np.int64)
    place[order] = np.arange(len(order))
    # Sorted, the first bin of each row is its costliest.
    return Rowed(name, place[bin_of], micros, float(loads[order[::ranks]].sum()))


def lower_bound(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> float:
    """Lower bound of every plan's cost: the largest of the mean over ranks, the costliest item, and the items longer than half
    the cap (no two fit into one bin), cut into rows of `ranks`."""
    if len(costs) == 0:
        return 0.0
    # Each item longer than half the cap needs a bin of its own, and a row of `ranks` bins costs what its costliest bin
    # costs. With the items sorted by cost, these are every ranks-th item.
    large = -np.sort(-costs[2 * tokens > cap])
    return max(float(costs.sum()) / ranks, float(costs.max()), float(large[::ranks].sum()))
