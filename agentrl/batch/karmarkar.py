"""Karmarkar-Karp differencing with equal counts: the largest differencing method over k-tuples.

N. Karmarkar and R. M. Karp, "The differencing method of set partitioning", 1982; the k-way form with
bins of equal cardinality keeps sorted k-tuples and always merges the two with the largest spread, adding the
largest entry of one to the smallest of the other.
"""

from __future__ import annotations

import heapq

import numpy as np


def karmarkar_karp(costs: np.ndarray, bins: int) -> np.ndarray:
    """Bin of each item, int64 [n]: bins of nearly equal cost, with item counts that differ by at most one.

    If n is not a multiple of `bins`, items of cost 0 are added. Time: n / bins merges of `bins` entries.
    """
    count = len(costs)
    if bins == 1 or count == 0:
        return np.zeros(count, dtype=np.int64)
    # Every tuple begins with one item per bin, and each merge adds two entries per bin: that makes the item counts equal.
    # Tuples are cut from the sorted costs, so that a tuple's entries are close and its spread is small from the start.
    tuples = -(-count // bins)
    order = np.argsort(-costs, kind="stable")
    padded = np.zeros(tuples * bins)
    padded[:count] = costs[order]
    merges = _merge(padded.reshape(tuples, bins))
    # Merging works on sums alone; which bin an item is in is only known once the entries of the last tuple become the bins.
    slots = _resolve(merges, tuples, bins)
    bin_of = np.empty(count, dtype=np.int64)
    bin_of[order] = slots.reshape(-1)[:count]
    return bin_of


def _merge(leaves: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    """Merge until one tuple is left; per merge (left node, right node, sort order of left + reversed right)."""
    sums: dict[int, np.ndarray] = dict(enumerate(leaves))
    # Entries descend within a tuple, so last minus first is minus the spread: a min-heap gives the largest spread first.
    heap = [(float(leaf[-1] - leaf[0]), node) for node, leaf in enumerate(leaves)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, np.ndarray]] = []
    while len(heap) > 1:
        _, left = heapq.heappop(heap)
        _, right = heap[0]
        # The largest of one is added to the smallest of the other, so the spreads cancel: this is the differencing.
        total = sums.pop(left) + sums.pop(right)[::-1]
        sorting = np.argsort(-total)
        total = total[sorting]
        node = len(leaves) + len(merges)
        merges.append((left, right, sorting))
        sums[node] = total
        heapq.heapreplace(heap, (float(total[-1] - total[0]), node))
    return merges


def _resolve(merges: list[tuple[int, int, np.ndarray]], leaves: int, bins: int) -> np.ndarray:
    """Bin of every leaf slot [leaves, bins], by walking the merges backwards."""
    slots = np.empty((leaves + len(merges), bins), dtype=np.int64)
    slots[-1] = np.arange(bins)
    for number in range(len(merges) - 1, -1, -1):
        left, right, sorting = merges[number]
        merged = slots[leaves + number]
        # Entry j of the merged tuple is place sorting[j] of the unsorted sum: entry sorting[j] of the left tuple plus,
        # because the right one was reversed, its entry bins - 1 - sorting[j].
        slots[left][sorting] = merged
        slots[right][bins - 1 - sorting] = merged
    return slots[:leaves]
