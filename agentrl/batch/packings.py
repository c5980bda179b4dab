"""Ways to put sequences into micro-batches under a hard token cap. Each returns the bin of every item.

The first ones are in common use; `portfolio` in `balance.py` tries them all and sorts the bins of each into
rows, so it is never worse than any of them.
"""

from __future__ import annotations

import heapq
import itertools

import numpy as np

from agentrl.batch.karmarkar import karmarkar_karp

GROWTH = 1.1
"""Factor between the numbers of micro-batches that are tried until one fits under the cap."""


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
    for size, count in zip(*_runs(sizes), strict=True):
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


def _runs(values: np.ndarray) -> tuple[list[int], list[int]]:
    """Distinct values of a sorted array, in its order, and how often each occurs."""
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1]))) if len(values) else values
    return values[starts].tolist(), np.diff(np.append(starts, len(values))).tolist()


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


def karmarkar_ranks(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> np.ndarray:
    """Karmarkar-Karp with equal counts over ranks, then over a common number of micro-batches per rank.

    That number grows from the least possible until every rank's micro-batches fit under the cap. Within
    a rank the micro-batches are sorted by cost. Bin number = micro-batch * ranks + rank.
    """
    owner = karmarkar_karp(costs, ranks)
    per_rank = [np.flatnonzero(owner == rank) for rank in range(ranks)]
    micros = max(1, max(-(-int(tokens[items].sum()) // cap) for items in per_rank))
    # The number grows by a factor, not by one: each attempt partitions every rank again, and a nearly full cap can
    # need many more micro-batches than the least number.
    while True:
        inner = _fill_ranks(tokens, costs, per_rank, micros, cap)
        if inner is not None:
            break
        micros = int(micros * GROWTH) + 1
    bin_of = np.empty(len(tokens), dtype=np.int64)
    for rank, (items, micro) in enumerate(zip(per_rank, inner, strict=True)):
        loads = np.bincount(micro, weights=costs[items], minlength=micros)
        position = np.empty(micros, dtype=np.int64)
        position[np.argsort(-loads, kind="stable")] = np.arange(micros)
        bin_of[items] = position[micro] * ranks + rank
    return bin_of


def _fill_ranks(
    tokens: np.ndarray, costs: np.ndarray, per_rank: list[np.ndarray], micros: int, cap: int
) -> list[np.ndarray] | None:
    out: list[np.ndarray] = []
    for items in per_rank:
        micro = karmarkar_karp(costs[items], micros)
        if not fits(tokens[items], micro, cap):
            return None
        out.append(micro)
    return out


def fits(tokens: np.ndarray, bin_of: np.ndarray, cap: int) -> bool:
    """Whether every bin is within the cap."""
    return len(bin_of) == 0 or int(np.bincount(bin_of, weights=tokens).max()) <= cap


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
