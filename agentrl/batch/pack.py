"""A micro-batch as one flat sequence: rows laid end to end, with positions that restart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from agentrl.batch.rows import (
    Rows,
    columns,
    gather_runs,
    is_ragged,
    offsets_of,
    pick,
    ragged_column,
    row_index,
    token_runs,
)

DUMMY_ROW = -1
"""The row number of the one-token dummy that stands in for a micro-batch without rows."""


def pack(batch: TensorDict, rows: Rows) -> TensorDict:
    """The rows `rows` of a batch, end to end: T tokens in N sequences. `batch_size` is [].

    Every ragged column becomes [T]; every dense row column [N]. Added: `position_ids` int64 [T]
    (restart at 0 in each sequence), `cu_seqlens` int32 [N + 1], `segments` int64 [T] (which sequence,
    0..N-1), `rows` int64 [N] (row numbers in `batch`). Non-tensor columns are left out.

    With no rows the result is a dummy: T = N = 1, `rows` [-1], `sampled` False and zeros elsewhere. A
    model cannot take zero tokens, and every rank must run the same number of micro-batches.
    """
    index = row_index(rows)
    column = ragged_column(batch)
    if column is None:
        raise ValueError("pack needs a batch with at least one ragged column")
    if len(index) == 0:
        return _dummy(batch)
    offsets = offsets_of(column).numpy()
    counts = torch.from_numpy(np.diff(offsets)[index])
    ends = torch.cumsum(counts, 0)
    total = int(ends[-1])
    out: dict[str, Any] = {}
    runs = token_runs(index, offsets)
    for key, value in columns(batch):
        if is_ragged(value):
            out[key] = gather_runs(value.values(), runs)
        elif isinstance(value, torch.Tensor):
            out[key] = pick(value, index)
    starts = torch.repeat_interleave(ends - counts, counts)
    out["position_ids"] = torch.arange(total) - starts
    out["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    out["segments"] = torch.repeat_interleave(torch.arange(len(index)), counts)
    out["rows"] = torch.from_numpy(index)
    return TensorDict(out, batch_size=[])


def _dummy(batch: TensorDict) -> TensorDict:
    out: dict[str, Any] = {}
    for key, value in columns(batch):
        if isinstance(value, torch.Tensor):
            like = value.values() if is_ragged(value) else value
            out[key] = torch.zeros(1, *like.shape[1:], dtype=like.dtype)
    out["position_ids"] = torch.zeros(1, dtype=torch.int64)
    out["cu_seqlens"] = torch.tensor([0, 1], dtype=torch.int32)
    out["segments"] = torch.zeros(1, dtype=torch.int64)
    out["rows"] = torch.tensor([DUMMY_ROW])
    return TensorDict(out, batch_size=[])


def unpack(batch: TensorDict, packed: TensorDict, values: torch.Tensor, into: torch.Tensor) -> None:
    """Write per-token `values` [T, ...] of a packed micro-batch into `into`, the flat values [sum T_i,
    ...] of a ragged column of `batch` (same offsets). A dummy writes nothing."""
    column = ragged_column(batch)
    assert column is not None
    offsets = offsets_of(column)
    at = 0
    for row in packed.get("rows").tolist():
        if row == DUMMY_ROW:
            return
        start, stop = int(offsets[row]), int(offsets[row + 1])
        into[start:stop] = values[at : at + stop - start]
        at += stop - start
