"""A batch in a form that Ray's object store ships without copies: flat numpy arrays and shared offsets.

What arrives is shared memory that other workers read too, so `deserialize` always copies the rows it
takes: no worker can change another worker's data in place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from agentrl.batch.rows import (
    build,
    columns,
    gather_runs,
    is_ragged,
    items_column,
    jagged,
    offsets_of,
    pick,
    ragged_column,
    row_index,
    token_runs,
    wide,
)


@dataclass(slots=True)
class SerializedBatch:
    """Columns of a batch of `rows` rows: ragged values [T, ...] over one `offsets` [N + 1], dense
    values [N, ...], per-sample items and batch-wide values. `dtypes` are torch's, as numpy lacks bfloat16."""

    rows: int
    offsets: np.ndarray | None
    ragged: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]
    items: dict[str, list[Any]]
    wide: dict[str, Any]
    dtypes: dict[str, torch.dtype]


def _to_numpy(value: torch.Tensor) -> np.ndarray:
    value = value.detach()
    if value.dtype == torch.bfloat16:  # numpy has no bfloat16: its bits travel as int16
        value = value.contiguous().view(torch.int16)
    return value.cpu().numpy()


def _to_torch(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over `array`, whose memory may be read-only: the caller copies before anyone writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def serialize(batch: TensorDict) -> SerializedBatch:
    """The serialized form of a CPU batch, without copying its tensors.

    Raises ValueError if ragged columns have different row lengths, TypeError for a column of another kind.
    """
    column = ragged_column(batch)
    offsets = None if column is None else offsets_of(column)
    serialized = SerializedBatch(len(batch), None if offsets is None else offsets.cpu().numpy(), {}, {}, {}, {}, {})
    for key, value in columns(batch):
        if isinstance(value, torch.Tensor):
            serialized.dtypes[key] = value.dtype
        if is_ragged(value):
            # Only one offsets array travels; a column with others would arrive cut in the wrong places, without an error.
            if offsets is not None and not torch.equal(offsets_of(value), offsets):
                raise ValueError(f"ragged column {key!r} has other row lengths than the first one")
            serialized.ragged[key] = _to_numpy(value.values())
        elif isinstance(value, torch.Tensor):
            serialized.dense[key] = _to_numpy(value)
        elif isinstance(value, NonTensorStack):
            serialized.items[key] = value.tolist()
        elif isinstance(value, NonTensorData):
            serialized.wide[key] = value.data
        else:
            raise TypeError(f"column {key!r}: a batch holds tensors or non-tensors, not {type(value).__name__}")
    return serialized


def deserialize(serialized: SerializedBatch, rows: Any = None) -> TensorDict:
    """The rows `rows` (all by default) as a batch in fresh storage."""
    index = np.arange(serialized.rows, dtype=np.int64) if rows is None else row_index(rows)
    out: dict[str, Any] = {}
    if serialized.offsets is not None:
        runs = token_runs(index, serialized.offsets)
        fresh = torch.zeros(len(index) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(np.diff(serialized.offsets)[index]), 0, out=fresh[1:])
        for key, values in serialized.ragged.items():
            out[key] = jagged(gather_runs(_to_torch(values, serialized.dtypes[key]), runs), fresh)
    for key, values in serialized.dense.items():
        out[key] = pick(_to_torch(values, serialized.dtypes[key]), index)
    for key, items in serialized.items.items():
        out[key] = items_column([items[i] for i in index.tolist()])
    for key, value in serialized.wide.items():
        out[key] = wide(value, len(index))
    return build(out, len(index))
