"""Balance sequences over ranks and micro-batch rows.

A step runs rows of R micro-batches side by side, so it costs the sum over rows of the largest one.
Given any set of bins, sorting them by cost and cutting into rows of R minimizes that sum (an exchange
argument), so several packings are built, each re-rowed, and the best is kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rowed:
    """Bins in row order: `bins[micro * ranks + rank]`. A bin holds row numbers; it may be empty."""

    name: str
    bins: list[list[int]]
    micros: int
    cost: float
    bound: float


def partition(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Longest-processing-time greedy: the costliest item first, each to the least loaded rank."""
    heap = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        parts[rank].append(item)
        heapq.heappush(heap, (load + float(costs[item]), rank))
    return parts


def greedy(tokens: np.ndarray, costs: np.ndarray, cap: int, count: int) -> np.ndarray | None:
    """Bin of each item: costliest first into the cheapest of `count` bins; None where the cap breaks."""
    heap = [(0.0, bin_) for bin_ in range(count)]
    room = [cap] * count
    where = np.zeros(len(tokens), dtype=np.int64)
    size, price = tokens.tolist(), costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        passed = []
        while heap and room[heap[0][1]] < size[item]:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, bin_ = heap[0]
        heapq.heapreplace(heap, (load + price[item], bin_))
        room[bin_] -= size[item]
        where[item] = bin_
        for entry in passed:
            heapq.heappush(heap, entry)
    return where


def balance_bins(tokens: np.ndarray, costs: np.ndarray, ranks: int, cap: int) -> Rowed:
    """The best packing found."""
    micros = max(1, -(-int(tokens.sum()) // (cap * ranks)))
    while (where := greedy(tokens, costs, cap, micros * ranks)) is None:
        micros += max(1, micros // 50)
    return reroll("greedy", where, costs, ranks)


def reroll(name: str, where: np.ndarray, costs: np.ndarray, ranks: int) -> Rowed:
    """Sort the bins by cost and cut into rows of `ranks`."""
    count = int(where.max()) + 1 if len(where) else 1
    micros = max(1, -(-count // ranks))
    loads = np.bincount(where, weights=costs, minlength=micros * ranks)
    order = np.argsort(-loads, kind="stable")
    items = np.argsort(where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=micros * ranks))
    members = [part.tolist() for part in np.split(items, ends[:-1])]
    bins = [members[bin_] for bin_ in order.tolist()]
    return Rowed(name, bins, micros, float(loads[order[::ranks]].sum()), float(costs.sum()) / ranks)
