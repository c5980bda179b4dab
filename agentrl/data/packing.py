"""Partition sequences over ranks and pack them into micro-batches under a token cap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch


def partition(costs: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each item, so that the largest total is small: longest processing time first (Graham, 1969), where each item,
    the costliest first, goes to the least loaded rank."""
    owner = np.empty(len(costs), dtype=np.int64)
    heap = [(0.0, rank) for rank in range(ranks)]
    price = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = heap[0]
        owner[item] = rank
        heapq.heapreplace(heap, (load + price[item], rank))
    return owner


def micro_batches(
    lengths: Sequence[int] | np.ndarray | torch.Tensor,
    cap: int,
    *,
    groups: Sequence[int] | np.ndarray | torch.Tensor | None = None,
    prefix: Sequence[int] | np.ndarray | torch.Tensor | None = None,
) -> list[np.ndarray]:
    """The sequences of each micro-batch, at least one (an empty one is a dummy): every sequence exactly once, at most `cap`
    tokens in each, the largest micro-batch first. No sequence is longer than the cap (`plan_micro_batches` checks it).

    `groups[i]`, if given, is a group number: sequences of one group go into the same micro-batch as
    far as the cap allows. A sequence with a negative number has no group and may go anywhere. `prefix[i]`:
    the number of first tokens of the sequence that the members of its group in one micro-batch compute only
    once (equal within a group; 0: none). They count against the cap once.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    once = np.zeros_like(tokens) if prefix is None else np.asarray(prefix, dtype=np.int64)
    unit = np.arange(len(tokens)) if groups is None else group_units(tokens, np.asarray(groups), cap, once)
    size = unit_sums(unit, tokens, once).astype(np.int64)
    # First-fit decreasing: each unit, the longest first, goes into the first micro-batch with room. Never more of them than
    # next-fit makes, in which only the last one may have room.
    bin_of, room, opened = np.empty(len(size), dtype=np.int64), np.full(len(size), cap, dtype=np.int64), 0
    for item in np.argsort(-size, kind="stable").tolist():
        bin_of[item] = first = int(np.argmax(room[: opened + 1] >= size[item]))  # of the open ones and one more
        opened = max(opened, first + 1)
        room[first] -= size[item]
    place = np.argsort(np.argsort(-np.bincount(bin_of, weights=size), kind="stable"))
    home = place[bin_of][unit]
    return np.split(np.argsort(home, kind="stable"), np.cumsum(np.bincount(home))[:-1])


def group_units(tokens: np.ndarray, groups: np.ndarray, cap: float, prefix: np.ndarray | None = None) -> np.ndarray:
    """The unit of each sequence: a group, or the parts of a group that fill the cap one after the other; a
    sequence with a negative group number is a unit by itself. See `micro_batches` for `prefix`."""
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
