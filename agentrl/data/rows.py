"""Rows of a batch: read, cut, join and pack them, move them to a device, and ship them without copies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch import device as Device

from agentrl.data.images import Image

# A batch by its rows: how it is read (`Ragged`), cut, joined, and put end to end for a model (`pack`).
#
# A batch is a TensorDict whose ragged columns are jagged nested tensors. All of them share one offsets tensor, so that
# they can be combined element-wise. `select`, `concat` and `pack` return fresh storage, because a slice of a nested tensor
# is pickled with its whole storage.

Rows = Sequence[int] | np.ndarray | torch.Tensor
IMAGES = "images"
"""The column with the images of each row (a tuple of agentrl.data.images.Image), in batches with images."""
TRUNCATED = "truncated"
"""The bool column of rows whose episode a budget of turns, tokens or time ended."""
DUMMY_ROW = -1
"""The row number of the one-token dummy that stands in for a micro-batch without rows."""


@dataclass(frozen=True)
class Ragged:
    """A view for reading a batch of N rows and T tokens: flat columns, and row boundaries that are computed once.

    `offsets` int64 [N + 1] cut every token column into rows of `lengths` int64 [N] tokens (1 in a batch without token
    columns). It is made where a batch arrives (in the learner, in dispatch, on a worker) and passed on from there. Only
    `batch` is sent between processes, never the view.
    """

    batch: TensorDict
    offsets: torch.Tensor
    lengths: np.ndarray

    @classmethod
    def of(cls, batch: TensorDict) -> Ragged:
        column = ragged_column(batch)
        offsets = torch.arange(len(batch) + 1) if column is None else offsets_of(column)
        return cls(batch, offsets, offsets.diff().numpy())

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in set(self.batch.keys())

    def tokens(self, name: str) -> torch.Tensor:
        """A token column, flat: [T, ...]."""
        values: torch.Tensor = self.batch.get(name).values()
        return values

    def row(self, name: str) -> torch.Tensor:
        """A row column: [N, ...]."""
        values: torch.Tensor = self.batch.get(name)
        return values

    def numbers(self, name: str) -> np.ndarray:
        """A row column as a numpy array: [N, ...]."""
        return np.asarray(self.batch.get(name))

    def images(self, row: int) -> tuple[Image, ...]:
        """The images of a row, in the order of their placeholders."""
        found: tuple[Image, ...] = self.batch.get(IMAGES)[row].data if IMAGES in self else ()
        return found

    @cached_property
    def episode(self) -> np.ndarray:
        """The episode of each row, int64 [N], numbered by first appearance: rows with equal (group, member) are one episode."""
        keys = np.stack([self.numbers("group"), self.numbers("member")], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        # np.unique numbers by sorted key; the rank of a key's first row is its number by first appearance.
        return np.asarray(np.argsort(np.argsort(first))[inverse.reshape(-1)], dtype=np.int64)

    def with_tokens(self, **columns: torch.Tensor) -> Ragged:
        """The view with these flat token columns [T, ...] added or replaced."""
        return self._with({name: nested_tensor(values, self.offsets) for name, values in columns.items()})

    def with_rows(self, **columns: torch.Tensor) -> Ragged:
        """The view with these row columns [N, ...] added or replaced."""
        return self._with(columns)

    def with_wide(self, **values: Any) -> Ragged:
        """The view with these batch-wide values added or replaced."""
        return self._with({name: wide(value, len(self)) for name, value in values.items()})

    def without(self, name: str) -> Ragged:
        """The view without one column."""
        return Ragged(self.batch.exclude(name), self.offsets, self.lengths)

    def _with(self, columns: Mapping[str, Any]) -> Ragged:
        # A shallow copy: the columns are shared, so it costs nothing, and whoever holds the old view sees no change.
        out: TensorDict = self.batch.copy()
        for name, column in columns.items():
            out.set(name, column)
        return Ragged(out, self.offsets, self.lengths)


def nested_tensor(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """A nested tensor [N, ragged, ...] over `values` [T, ...] and `offsets` int64 [N + 1]; no copy."""
    return torch.nested.nested_tensor_from_jagged(values, offsets)


def is_ragged(value: Any) -> bool:
    """True for a jagged nested tensor."""
    return isinstance(value, torch.Tensor) and value.is_nested


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Row boundaries int64 [N + 1] of a jagged nested tensor."""
    nested: Any = column
    offsets: torch.Tensor = nested.offsets()
    return offsets


def ragged_column(batch: TensorDict) -> torch.Tensor | None:
    """The first ragged column (the one whose offsets are the batch's), or None."""
    return next((value for value in batch.values() if is_ragged(value)), None)


def columns(batch: TensorDict) -> list[tuple[str, Any]]:
    """Names and columns; non-tensors as NonTensorStack (per sample) or NonTensorData (batch-wide)."""
    names: list[str] = list(batch.keys())
    return [(name, batch.get(name)) for name in names]


def lengths(batch: TensorDict) -> torch.Tensor:
    """Tokens of each row, int64 [N]; ones if the batch has no ragged column."""
    column = ragged_column(batch)
    if column is None:
        return torch.ones(len(batch), dtype=torch.int64)
    return offsets_of(column).diff()


def row_index(rows: Rows) -> np.ndarray:
    """Row numbers as int64 [K]."""
    return np.asarray(rows, dtype=np.int64).reshape(-1)


def token_runs(rows: np.ndarray, offsets: np.ndarray) -> list[tuple[int, int]]:
    """The token spans [start, stop) that `rows` cover, in order, adjacent rows merged into one span."""
    if len(rows) == 0:
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    first = np.concatenate(([0], breaks))
    last = np.concatenate((breaks, [len(rows)])) - 1
    return list(zip(offsets[rows[first]].tolist(), offsets[rows[last] + 1].tolist(), strict=True))


def gather_runs(values: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The spans of `values` [T, ...], one after the other, in fresh storage."""
    if not runs:
        return values[:0].clone()
    return torch.cat([values[start:stop] for start, stop in runs])


def pick(values: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """Rows of a dense column in fresh storage."""
    return values[torch.from_numpy(rows)]


def select(batch: TensorDict, rows: Rows) -> TensorDict:
    """The rows `rows` (any order, repeats allowed) of `batch`, in fresh storage.

    Zero rows are legal and keep every column with its dtype. Raises IndexError for a row out of range.
    """
    index = row_index(rows)
    if len(index) and (index.min() < 0 or index.max() >= len(batch)):
        raise IndexError(f"rows {int(index.min())}..{int(index.max())} requested from a batch of {len(batch)} rows")
    column = ragged_column(batch)
    offsets = None if column is None else offsets_of(column).numpy()
    # Spans of adjacent rows, not an index per token: at 8 bytes per token that would be larger than any column it gathers.
    runs = [] if offsets is None else token_runs(index, offsets)
    # One offsets tensor for all columns: nested tensors combine only if they share the same object.
    fresh = torch.zeros(len(index) + 1, dtype=torch.int64)
    if offsets is not None:
        torch.cumsum(torch.from_numpy(np.diff(offsets)[index]), 0, out=fresh[1:])
    out: dict[str, Any] = {}
    for key, value in columns(batch):
        if is_ragged(value):
            out[key] = nested_tensor(gather_runs(value.values(), runs), fresh)
        elif isinstance(value, torch.Tensor):
            out[key] = pick(value, index)
        else:
            out[key] = _select_other(value, index)
    return build(out, len(index))


def _select_other(value: Any, rows: np.ndarray) -> Any:
    """Rows of a per-sample non-tensor; a batch-wide one is passed on."""
    if isinstance(value, NonTensorStack):
        items = value.tolist()
        return items_column([items[i] for i in rows.tolist()])
    if isinstance(value, NonTensorData):
        return wide(value.data, len(rows))
    raise TypeError(f"a batch column holds tensors or non-tensors, not {type(value).__name__}")


def items_column(items: Sequence[Any]) -> Any:
    """A per-sample non-tensor column."""
    if not items:
        return NonTensorStack(stack_dim=0)
    return NonTensorStack(*[NonTensorData(item) for item in items])


def wide(value: Any, rows: int) -> NonTensorData:
    """A batch-wide non-tensor value."""
    return NonTensorData(value, batch_size=[rows])


def build(columns: Mapping[str, Any], rows: int) -> TensorDict:
    """A batch of `rows` rows; jagged columns must already share their offsets."""
    return TensorDict(dict(columns), batch_size=[rows])


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """The rows of all batches, one after the other, in fresh storage.

    Raises ValueError for an empty list and KeyError if the batches differ in their columns.
    """
    if not batches:
        raise ValueError("concat needs at least one batch")
    keys = list(batches[0].keys())
    for other in batches[1:]:
        if set(other.keys()) != set(keys):
            raise KeyError(f"batches differ in columns: {sorted(keys)} and {sorted(other.keys())}")
    rows = sum(len(batch) for batch in batches)
    offsets = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.cat([lengths(batch) for batch in batches]), 0, out=offsets[1:])
    out: dict[str, Any] = {}
    for key in keys:
        values = [batch.get(key) for batch in batches]
        if is_ragged(values[0]):
            out[key] = nested_tensor(torch.cat([value.values() for value in values]), offsets)
        elif isinstance(values[0], torch.Tensor):
            out[key] = torch.cat(values)
        else:
            out[key] = _concat_other(values, rows)
    return build(out, rows)


def _concat_other(values: Sequence[Any], rows: int) -> Any:
    if isinstance(values[0], NonTensorData):
        # A batch-wide value is of the whole batch, hence equal in all of its pieces.
        return wide(values[0].data, rows)
    return items_column([item for value in values for item in value.tolist()])


def pack(view: Ragged, rows: Rows) -> TensorDict:
    """The rows `rows` of a batch, end to end: T tokens in N sequences. `batch_size` is [].

    Every ragged column becomes [T], every dense row column [N]. Added: `position_ids` int64 [T]
    (restart at 0 in each sequence), `cu_seqlens` int32 [N + 1], `segments` int64 [T] (the sequence,
    0..N-1), `rows` int64 [N] (row numbers in `view`). Non-tensor columns are left out.

    With no rows the result is a dummy: T = N = 1, `rows` [-1], `sampled` False and zeros elsewhere, because a
    model cannot take zero tokens, and every rank must run the same number of micro-batches.
    """
    index = row_index(rows)
    if ragged_column(view.batch) is None:
        raise ValueError("pack needs a batch with at least one ragged column")
    if len(index) == 0:
        return _dummy(view.batch)
    counts = torch.from_numpy(view.lengths[index])
    ends = torch.cumsum(counts, 0)
    total = int(ends[-1])
    out: dict[str, Any] = {}
    runs = token_runs(index, view.offsets.numpy())
    for key, value in columns(view.batch):
        if is_ragged(value):
            out[key] = gather_runs(value.values(), runs)
        elif isinstance(value, torch.Tensor):
            out[key] = pick(value, index)
    starts = torch.repeat_interleave(ends - counts, counts)
    out["position_ids"] = torch.arange(total) - starts
    # int32 is what the attention kernels take.
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


def unpack(view: Ragged, rows: Sequence[int], values: torch.Tensor, into: torch.Tensor) -> None:
    """Write per-token `values` [T, ...] of packed `rows` into `into`, the flat values [sum T_i, ...] of a token column of
    `view`. With no rows (a dummy) nothing is written."""
    at = 0
    for row in rows:
        start, stop = int(view.offsets[row]), int(view.offsets[row + 1])
        into[start:stop] = values[at : at + stop - start]
        at += stop - start


# To a device


def on_device(tensor: Tensor, device: Device) -> Tensor:
    """The tensor on `device`. The way to a GPU is by pinned memory and only queued, in order with the kernels that will read it;
    plain memory would be waited for, after all kernels that were queued before."""
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor.to(device)
    # torch's allocator does not give pinned memory to others before its copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


# A batch in a form that Ray's object store ships without copies: flat numpy arrays and shared offsets.
#
# What arrives is shared memory that other workers read too, so `deserialize` always copies the rows it
# takes: no worker can change another worker's data in place.


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
            out[key] = nested_tensor(gather_runs(_to_torch(values, serialized.dtypes[key]), runs), fresh)
    for key, values in serialized.dense.items():
        out[key] = pick(_to_torch(values, serialized.dtypes[key]), index)
    for key, items in serialized.items.items():
        out[key] = items_column([items[i] for i in index.tolist()])
    for key, value in serialized.wide.items():
        out[key] = wide(value, len(index))
    return build(out, len(index))
