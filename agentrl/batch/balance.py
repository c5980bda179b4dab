"""Partition sequences over ranks so that the largest load is small."""

from __future__ import annotations

import heapq

import numpy as np


def partition(costs: np.ndarray, ranks: int) -> list[list[int]]:
    """Longest-processing-time greedy: the costliest item first, each to the least loaded rank."""
    heap = [(0.0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        parts[rank].append(item)
        heapq.heappush(heap, (load + float(costs[item]), rank))
    return parts
