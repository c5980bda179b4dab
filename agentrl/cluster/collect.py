"""How the results of the ranks become one result: joined, put back into row order, or reduced as metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.rows import build, concat, is_ragged, jagged, offsets_of, select
from agentrl.errors import DispatchError


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


METRIC_REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "mean": _mean,
    "max": max,
    "min": min,
}


def reduced_metrics(label: str, parts: Sequence[Any], how: Mapping[str, str]) -> dict[str, float]:
    """One dict from the ranks' dicts, key by key, over the ranks that report the key."""
    values: dict[str, list[float]] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            raise DispatchError(f"{label}: collect='metrics' needs a dict from each rank, got {type(part).__name__}")
        for key, value in part.items():
            values.setdefault(key, []).append(float(value))
    # Not over all ranks: one that got no rows reports nothing, and a 0 in its name would pull means and minima down.
    return {key: METRIC_REDUCTIONS[how.get(key, "mean")](items) for key, items in values.items()}


def joined(label: str, parts: Sequence[Any]) -> Any:
    """TensorDicts, tensors (dense or jagged) or lists of the ranks, one after the other."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise DispatchError(f"{label}: ranks returned different types: {[type(part).__name__ for part in parts]}")
    if isinstance(first, TensorDict):
        return concat(parts)
    if isinstance(first, torch.Tensor):
        return _joined_tensors(parts)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    raise DispatchError(f"{label}: cannot collect rows of a {type(first).__name__}; return a TensorDict, tensor or list")


def _joined_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # torch cannot concatenate jagged tensors along their rows, so values and row lengths are joined below.
    if not is_ragged(parts[0]):
        return torch.cat(list(parts))
    counts = torch.cat([offsets_of(part).diff() for part in parts])
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return jagged(torch.cat([part.values() for part in parts]), offsets)


def reordered(label: str, parts: Sequence[Any], rows: Sequence[np.ndarray]) -> Any:
    """The ranks' rows in the driver's order: entry k of `parts[r]` is row `rows[r][k]`.

    Raises DispatchError if a rank returned another number of rows than it was given.
    """
    given, got = [len(row) for row in rows], [len(part) for part in parts]
    if given != got:
        raise DispatchError(f"{label}: collect='source' needs one result per row; ranks got {given}, returned {got}")
    whole = joined(label, parts)
    order = np.argsort(np.concatenate(list(rows)), kind="stable")
    # One rank, or rows split contiguously: saves a copy of the whole batch.
    if np.array_equal(order, np.arange(len(order))):
        return whole
    if isinstance(whole, TensorDict):
        return select(whole, order)
    if isinstance(whole, list):
        return [whole[i] for i in order.tolist()]
    # As a batch of one column, because `select` alone knows how rows of a jagged tensor are picked.
    return select(build({"value": whole}, len(order)), order).get("value")
