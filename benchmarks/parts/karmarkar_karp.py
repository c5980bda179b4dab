"""The packing of verl and others, as a peer: Karmarkar-Karp with equal counts over ranks, then over their micro-batches."""

from __future__ import annotations

import heapq

import numpy as np

from agentrl.data.packing import Rowed

# Karmarkar-Karp differencing with equal counts: the largest differencing method over k-tuples.
#
# N. Karmarkar and R. M. Karp, "The differencing method of set partitioning", 1982; the k-way form with
# bins of equal cardinality keeps sorted k-tuples and always merges the two with the largest spread, adding the
# largest entry of one to the smallest of the other.


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


GROWTH = 1.1
"""Factor between the numbers of micro-batches that are tried until one fits under the cap."""


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


def fits(tokens: np.ndarray, bin_of: np.ndarray, cap: int) -> bool:
    """Return True if every bin is within the cap."""
    return len(bin_of) == 0 or int(np.bincount(bin_of, weights=tokens).max()) <= cap


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


def as_given(name: str, bin_of: np.ndarray, costs: np.ndarray, ranks: int) -> Rowed:
    """A packing with its bins in the rows that their numbers imply (as the baselines are run elsewhere)."""
    micros = (int(bin_of.max()) // ranks if len(bin_of) else 0) + 1
    loads = np.bincount(bin_of, weights=costs, minlength=micros * ranks)
    return Rowed(name, bin_of, micros, float(loads.reshape(micros, ranks).max(axis=1).sum()))
