"""Partition sequences over ranks and pack them into micro-batches under a token cap."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch


def partition(costs: np.ndarray, ranks: int) -> np.ndarray:
    """Assign items to ranks so that the largest total cost is small; returns the rank of each item.

    Longest processing time first (Graham, 1969): each item, in order of falling cost, goes to the least loaded rank."""
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
    """Pack sequences into micro-batches of at most `cap` tokens, the largest first; at least one, which may be an empty dummy.

    Every sequence is in exactly one; none may be longer than the cap (`plan_micro_batches` checks it). `groups[i]`: group number;
    sequences of a group go into one micro-batch as far as the cap allows, those with a negative number anywhere. `prefix[i]`:
    number of first tokens that a group's sequences in one micro-batch compute only once (equal within a group, 0: none); they
    count against the cap once.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    once = np.zeros_like(tokens) if prefix is None else np.asarray(prefix, dtype=np.int64)
    unit = np.arange(len(tokens)) if groups is None else group_units(tokens, np.asarray(groups), cap, once)
    size = unit_sums(unit, tokens, once).astype(np.int64)
    # First-fit decreasing: each unit, longest first, goes into the first micro-batch with room. It needs at most as many as
    # next-fit, which only fills the last one.
    bin_of, room, opened = np.empty(len(size), dtype=np.int64), np.full(len(size), cap, dtype=np.int64), 0
    for item in np.argsort(-size, kind="stable").tolist():
        bin_of[item] = first = int(np.argmax(room[: opened + 1] >= size[item]))  # among the open ones and a new one
        opened = max(opened, first + 1)
        room[first] -= size[item]
    place = np.argsort(np.argsort(-np.bincount(bin_of, weights=size), kind="stable"))
    home = place[bin_of][unit]
    return np.split(np.argsort(home, kind="stable"), np.cumsum(np.bincount(home))[:-1])


def group_units(tokens: np.ndarray, groups: np.ndarray, cap: float, prefix: np.ndarray | None = None) -> np.ndarray:
    """Return the unit of each sequence: a group, or consecutive parts of it that fill the cap.

    A sequence with a negative group number is a unit. `prefix`: as for `micro_batches`."""
    unit = np.empty(len(tokens), dtype=np.int64)
    once = np.zeros_like(tokens) if prefix is None else prefix
    last, room, number = -1, 0.0, -1
    # Stable, so that a group's rows keep their order. Row by row, because the room depends on earlier rows.
    for row in np.argsort(groups, kind="stable").tolist():
        joins = groups[row] == last and last >= 0 and room >= tokens[row] - once[row]
        if not joins:
            number, last, room = number + 1, int(groups[row]), float(cap)
        room -= float(tokens[row] - (once[row] if joins else 0))
        unit[row] = number
    return unit


def unit_sums(unit: np.ndarray, values: np.ndarray, once: np.ndarray) -> np.ndarray:
    """Sum `values` over each unit; the part `once` of each value (equal within a unit) counts for one member only."""
    count = int(unit.max()) + 1 if len(unit) else 0
    total = np.bincount(unit, weights=values, minlength=count)
    members = np.bincount(unit, minlength=count)
    spared = np.zeros(count)
    spared[unit] = once
    return np.asarray(total - (members - 1) * spared)
