"""Rows of a batch: collate, read, cut, join, pack, move to a device, and serialize without copies."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch import device as Device

from agentrl.data.expert_routing import free
from agentrl.data.images import Image
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Spot, Trajectory, reward_spots, terminal_reward

if TYPE_CHECKING:
    from tensordict import NonTensorData, TensorDict

# A batch is a TensorDict whose ragged columns are jagged nested tensors. All of them share one offsets tensor, so that
# they can be combined element-wise. `select`, `concat` and `pack` return new storage, because a slice of a nested tensor
# is pickled with its whole storage.

Rows = Sequence[int] | np.ndarray | torch.Tensor
IMAGES = "images"
"""Column of the images of each row (a tuple of agentrl.data.images.Image), in batches with images."""
TRUNCATED = "truncated"
"""Bool column: True if a budget of turns, tokens or time ended the row's episode."""


@dataclass(frozen=True)
class Ragged:
    """A view of a batch of N rows and T tokens: flat columns, and row boundaries that are computed once.

    `offsets` int64 [N + 1] cut every token column into rows of `lengths` int64 [N] tokens (1 in a batch without token
    columns). Create it where a batch arrives (learner, dispatch, worker) and pass it on; only `batch` is sent between processes.
    """

    batch: TensorDict
    offsets: torch.Tensor
    lengths: np.ndarray

    @classmethod
    def of(cls, batch: TensorDict) -> Ragged:
        column = next((value for value in batch.values() if is_ragged(value)), None)
        offsets = torch.arange(len(batch) + 1) if column is None else offsets_of(column)
        return cls(batch, offsets, offsets.diff().numpy())

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, name: str) -> bool:
        return name in set(self.batch.keys())

    def tokens(self, name: str) -> torch.Tensor:
        """Return a token column, flat: [T, ...]."""
        values: torch.Tensor = self.batch.get(name).values()
        return values

    def row(self, name: str) -> torch.Tensor:
        """Return a row column: [N, ...]."""
        values: torch.Tensor = self.batch.get(name)
        return values

    def numbers(self, name: str) -> np.ndarray:
        """Return a row column as a numpy array: [N, ...]."""
        return np.asarray(self.batch.get(name))

    def images(self, row: int) -> tuple[Image, ...]:
        """Return the images of a row, in the order of their placeholders."""
        found: tuple[Image, ...] = self.batch.get(IMAGES)[row].data if IMAGES in self else ()
        return found

    def positions(self, rows: Rows) -> torch.Tensor:
        """Return the positions of the tokens of `rows` in a flat token column, int64, in the order of the rows."""
        runs = token_runs(np.asarray(rows, dtype=np.int64), self.offsets.numpy())
        return torch.cat([torch.arange(start, stop) for start, stop in runs])

    @cached_property
    def episode(self) -> np.ndarray:
        """Number the episode of each row by first appearance, int64 [N]; an episode is one (group, member)."""
        keys = np.stack([self.numbers("group"), self.numbers("member")], axis=1)
        _, first, inverse = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        # np.unique numbers by sorted key; the rank of a key's first row is its number by first appearance.
        return np.asarray(np.argsort(np.argsort(first))[inverse.reshape(-1)], dtype=np.int64)

    def with_tokens(self, **columns: torch.Tensor) -> Ragged:
        """Return the view with flat token columns [T, ...] added or replaced."""
        return self.with_rows(**{name: nested_tensor(values, self.offsets) for name, values in columns.items()})

    def with_rows(self, **columns: Any) -> Ragged:
        """Return the view with row columns [N, ...] added or replaced; a value that is not a tensor is batch-wide."""
        # A shallow copy with shared columns, so the old view does not change.
        out: TensorDict = self.batch.copy()
        for name, column in columns.items():
            out.set(name, column if isinstance(column, torch.Tensor) else wide(column, len(self)))
        return Ragged(out, self.offsets, self.lengths)


nested_tensor = torch.nested.nested_tensor_from_jagged
"""(values [T, ...], offsets int64 [N + 1]) -> nested tensor [N, ragged, ...], without a copy."""


def is_ragged(value: Any) -> bool:
    """Return True for a jagged nested tensor."""
    return isinstance(value, torch.Tensor) and value.is_nested


def offsets_of(column: torch.Tensor) -> torch.Tensor:
    """Return the row boundaries int64 [N + 1] of a jagged nested tensor."""
    nested: Any = column
    offsets: torch.Tensor = nested.offsets()
    return offsets


def token_runs(rows: np.ndarray, offsets: np.ndarray) -> list[tuple[int, int]]:
    """Return the token spans [start, stop) of `rows` in order, adjacent rows merged; one empty span without rows."""
    if len(rows) == 0:
        return [(0, 0)]
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    first = np.concatenate(([0], breaks))
    last = np.concatenate((breaks, [len(rows)])) - 1
    return list(zip(offsets[rows[first]].tolist(), offsets[rows[last] + 1].tolist(), strict=True))


def select(batch: TensorDict, rows: Rows) -> TensorDict:
    """Select rows of a batch (any order, repeats allowed), in new storage.

    Zero rows are legal and keep all columns with their dtypes. Raises IndexError for a row out of range.
    """
    index = np.asarray(rows, dtype=np.int64)
    if len(index) and (index.min() < 0 or index.max() >= len(batch)):
        raise IndexError(f"rows {int(index.min())}..{int(index.max())} requested from a batch of {len(batch)} rows")
    return deserialize(serialize(batch), index)


def items_column(items: Sequence[Any]) -> Any:
    """Create a non-tensor column with one item per row."""
    from tensordict import NonTensorData, NonTensorStack

    return NonTensorStack(*[NonTensorData(item) for item in items], stack_dim=0)


def wide(value: Any, rows: int) -> NonTensorData:
    """Create a batch-wide non-tensor value."""
    from tensordict import NonTensorData

    return NonTensorData(value, batch_size=[rows])


def is_batch(value: Any) -> TypeGuard[TensorDict]:
    """Return True for a TensorDict, without importing the package."""
    return isinstance(value, getattr(sys.modules.get("tensordict"), "TensorDict", ()))


def build(columns: Mapping[str, Any], rows: int | None) -> TensorDict:
    """Build a batch of `rows` rows, or without a batch size; jagged columns must share their offsets."""
    from tensordict import TensorDict  # not at the top: it loads torch's compiler, which rollout workers do not need

    return TensorDict(dict(columns), batch_size=[] if rows is None else [rows])


def concat(batches: Sequence[TensorDict]) -> TensorDict:
    """Concatenate the rows of batches, in new storage.

    Raises ValueError for an empty list, KeyError if the batches differ in their columns.
    """
    from tensordict import NonTensorData

    if not batches:
        raise ValueError("concat needs at least one batch")
    keys = list(batches[0].keys())
    for other in batches[1:]:
        if set(other.keys()) != set(keys):
            raise KeyError(f"batches differ in columns: {sorted(keys)} and {sorted(other.keys())}")
    counts = np.concatenate([Ragged.of(batch).lengths for batch in batches])
    rows, offsets = len(counts), torch.from_numpy(np.concatenate(([0], np.cumsum(counts))))
    out: dict[str, Any] = {}
    for key in keys:
        values = [batch.get(key) for batch in batches]
        if is_ragged(values[0]):
            out[key] = nested_tensor(torch.cat([value.values() for value in values]), offsets)
        elif isinstance(values[0], torch.Tensor):
            out[key] = torch.cat(values)
        elif isinstance(values[0], NonTensorData):
            out[key] = wide(values[0].data, rows)  # batch-wide values are equal in all pieces of a batch
        else:
            out[key] = items_column([item for value in values for item in value.tolist()])
    return build(out, rows)


def pack(view: Ragged, rows: Rows) -> TensorDict:
    """Pack rows of a batch end to end: T tokens in N sequences. `batch_size` is [].

    Every ragged column becomes [T], every dense row column [N]. Added: `position_ids` int64 [T] (from 0 in each sequence) and
    `cu_seqlens` int32 [N + 1]. Non-tensor columns are dropped.

    Without rows the result is a dummy: T = N = 1, `sampled` False, all else 0. A model cannot take zero tokens, and all ranks
    must run the same number of micro-batches. Raises ValueError for a batch without a ragged column.
    """
    index = np.asarray(rows, dtype=np.int64)
    if not any(map(is_ragged, view.batch.values())):
        raise ValueError("pack needs a batch with at least one ragged column")
    counts = torch.from_numpy(view.lengths[index]) if len(index) else torch.ones(1, dtype=torch.int64)
    ends = torch.cumsum(counts, 0)
    runs = token_runs(index, view.offsets.numpy())
    out: dict[str, Any] = {}
    for key, value in view.batch.items():
        if isinstance(value, torch.Tensor):
            flat = value.values() if is_ragged(value) else value
            if len(index) == 0:
                out[key] = torch.zeros(1, *flat.shape[1:], dtype=flat.dtype)
            elif is_ragged(value):
                out[key] = torch.cat([flat[start:stop] for start, stop in runs])
            else:
                out[key] = flat[torch.from_numpy(index)]
    out["position_ids"] = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - counts, counts)
    # The attention kernels take int32.
    out["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32)
    return build(out, None)


# Device transfer


def on_device(tensor: Tensor, device: Device) -> Tensor:
    """Move a tensor to `device`; to a GPU by pinned memory, queued in order with the kernels that read it.

    A copy from pageable memory would block until all kernels queued before it have run."""
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor.to(device)
    # torch's allocator does not reuse pinned memory before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


# Serialized batches are flat numpy arrays and shared offsets, which Ray's object store ships without copies.
#
# They arrive in shared memory that other workers read too, so `deserialize` copies its rows.


@dataclass(slots=True)
class SerializedBatch:
    """Columns of a batch of `rows` rows, without tensors.

    Ragged values [T, ...] over one `offsets` [N + 1], dense values [N, ...], items per row, batch-wide values. `dtypes`: torch's,
    as numpy has no bfloat16."""

    rows: int
    offsets: np.ndarray | None
    ragged: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]
    items: dict[str, list[Any]]
    wide: dict[str, Any]
    dtypes: dict[str, torch.dtype]


def serialize(batch: TensorDict) -> SerializedBatch:
    """Serialize a CPU batch without copying its tensors.

    Raises ValueError if ragged columns have different row lengths, TypeError for a column of another kind.
    """
    from tensordict import NonTensorData, NonTensorStack

    serialized, offsets = SerializedBatch(len(batch), None, {}, {}, {}, {}, {}), None
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            serialized.dtypes[key] = value.dtype
            flat = (value.values() if value.is_nested else value).detach()
            if value.is_nested:
                # Only one offsets array is sent; a column with others would arrive silently cut in the wrong places.
                offsets = offsets_of(value) if offsets is None else offsets
                if not torch.equal(offsets_of(value), offsets):
                    raise ValueError(f"ragged column {key!r} has other row lengths than the first one")
                serialized.offsets = offsets.cpu().numpy()
            if value.dtype == torch.bfloat16:  # numpy has no bfloat16: send its bits as int16
                flat = flat.contiguous().view(torch.int16)
            (serialized.ragged if value.is_nested else serialized.dense)[key] = flat.cpu().numpy()
        elif isinstance(value, NonTensorStack):
            serialized.items[key] = value.tolist()
        elif isinstance(value, NonTensorData):
            serialized.wide[key] = value.data
        else:
            raise TypeError(f"column {key!r}: a batch holds tensors or non-tensors, not {type(value).__name__}")
    return serialized


def deserialize(serialized: SerializedBatch, rows: Any = None) -> TensorDict:
    """Deserialize rows (default: all) to a batch in new storage."""
    index = np.arange(serialized.rows) if rows is None else np.asarray(rows, dtype=np.int64)
    out: dict[str, Any] = {}
    if serialized.offsets is not None:
        runs = token_runs(index, serialized.offsets)
        fresh = torch.zeros(len(index) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(np.diff(serialized.offsets)[index]), 0, out=fresh[1:])
    for key, array in (serialized.ragged | serialized.dense).items():
        with warnings.catch_warnings():  # the array may be read-only; its rows are copied below
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(array)
        if serialized.dtypes[key] == torch.bfloat16:
            tensor = tensor.view(torch.bfloat16)
        if key in serialized.ragged:
            out[key] = nested_tensor(torch.cat([tensor[start:stop] for start, stop in runs]), fresh)
        else:
            out[key] = tensor[torch.from_numpy(index)]
    for key, items in serialized.items.items():
        out[key] = items_column([items[i] for i in index.tolist()])
    for key, value in serialized.wide.items():
        out[key] = wide(value, len(index))
    return build(out, len(index))


# Ragged columns


def row_ids(offsets: Tensor, tokens: int | None = None) -> Tensor:
    """Return the row of each token, int64 [T]. `tokens`: T, to avoid a synchronization with the GPU."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=tokens)


def row_sum(column: Tensor, offsets: Tensor) -> Tensor:
    """Sum each row: [T] -> [N]; 0 for an empty row."""
    zeros = torch.zeros(len(offsets) - 1, dtype=column.dtype, device=column.device)
    return zeros.index_add(0, row_ids(offsets, len(column)), column)


def row_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """Count the True tokens of each row: bool [T] on the host -> int64 [N]. Allocates nothing of the column's size."""
    flags, bounds = mask.numpy(), offsets.tolist()
    per_row = (np.count_nonzero(flags[start:stop]) for start, stop in itertools.pairwise(bounds))
    counts = np.fromiter(per_row, np.int64, len(bounds) - 1)  # np.add.reduceat would cast the whole column first
    return torch.from_numpy(counts)


def row_mean(column: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Average the masked tokens of each row: [T] -> [N]; 0 for a row without any."""
    kept = torch.where(mask, column, torch.zeros_like(column))
    return row_sum(kept, offsets) / row_sum(mask.to(column.dtype), offsets).clamp(min=1)


def spread(rows: Tensor, offsets: Tensor, tokens: int | None = None) -> Tensor:
    """Spread row values over the rows' tokens: [N] -> [T]; `tokens` as in `row_ids`."""
    return rows[row_ids(offsets, tokens)]


def on_mask(rows: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Spread row values over the rows' masked tokens, 0 elsewhere: [N] -> [T], without gradient, on the host."""
    values, flags, bounds = rows.detach().numpy(), mask.numpy(), offsets.tolist()
    # Not np.empty, which requests huge pages: a virtual machine may have to get each of them from its host.
    out = torch.empty(len(flags), dtype=rows.dtype)
    tokens = out.numpy()
    for value, (start, stop) in zip(values, itertools.pairwise(bounds), strict=True):
        # Row by row: a single np.repeat over all rows would hold the GIL, and thus block the event loop.
        np.multiply(flags[start:stop], value, out=tokens[start:stop])
    return out


def zscores(values: Tensor) -> Tensor:
    """Compute (x - mean) / sqrt(unbiased variance + 1e-8), float64 [M]; exactly 0 for equal values or a single one."""
    values = values.double()
    if len(values) < 2:
        return torch.zeros_like(values)
    above = values - values[0]  # exactly 0 for equal values, whose mean can differ from them by rounding
    apart = above - above.mean()
    return apart * torch.rsqrt(apart.square().sum() / (len(values) - 1) + 1e-8)


def whiten_masked(column: Tensor, mask: Tensor) -> Tensor:
    """Compute `zscores` of the masked tokens, 0 elsewhere: [T] -> [T]."""
    out = torch.zeros_like(column)
    out[mask] = zscores(column[mask]).to(column.dtype)
    return out


def sampled_offsets(mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the row offsets of the masked tokens alone, int64 [N + 1]."""
    counts = row_sum(mask.to(torch.int64), offsets)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def credit(token_rewards: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Move every reward to the sampled token that earned it: [T] -> [M] masked tokens.

    A reward on a token that was not sampled goes to the last sampled token before it in its row (to the row's first one if no
    sampled token precedes it). The rewards of a row without sampled tokens are dropped.
    """
    compact = sampled_offsets(mask, offsets)
    rows = row_ids(offsets)
    position = mask.to(torch.int64).cumsum(0) - 1
    position = torch.maximum(position, compact[:-1][rows])
    trained = compact.diff()[rows] > 0
    earned = torch.zeros(int(compact[-1]), dtype=token_rewards.dtype, device=token_rewards.device)
    return earned.index_add(0, position[trained], token_rewards[trained])


def discounted_sums(column: Tensor, offsets: Tensor, factor: float) -> Tensor:
    """Compute y[t] = x[t] + factor * y[t + 1] within each row: [M] -> [M]."""
    counts = offsets.diff()
    width = int(counts.max()) if len(counts) else 0
    if width == 0:
        return column.clone()
    rows = row_ids(offsets)
    place = torch.arange(len(column), device=column.device) - offsets[:-1][rows]
    # Padded, so that the recursion runs over all rows at once: as many steps as tokens of the longest row, not T.
    padded = column.new_zeros(len(counts), width)
    padded[rows, place] = column
    out = torch.empty_like(padded)
    carry = column.new_zeros(len(counts))
    for step in range(width - 1, -1, -1):
        carry = padded[:, step] + factor * carry
        out[:, step] = carry
    return out[rows, place]


def following(column: Tensor, offsets: Tensor) -> Tensor:
    """Shift values: y[t] = x[t + 1] within each row, 0 at a row's last token: [M] -> [M]."""
    after = torch.cat([column[1:], column.new_zeros(1)]) if len(column) else column.clone()
    last = offsets[1:][offsets.diff() > 0] - 1
    after[last] = 0.0
    return after


# Rows of episodes


def collate(
    trajectories: Sequence[Trajectory], groups: Sequence[int] | None = None, *, allow_unscored: bool = False
) -> TensorDict:
    """Collate trajectories to a batch of N rows, one per non-empty ledger.

    Ragged columns [N, T_i], T_i tokens in row i: `token_ids` int32, `sampled` bool, `logprobs` float32, `versions` int32, `turns`
    int16, as in the ledgers, and `rewards` float32 (see `reward_spots`; over a trajectory's rows they sum to its reward). If a
    ledger has `experts`: `experts` [N, T_i, routers, k], free (data/expert_routing.py) for tokens without any. If a ledger has
    images: `images` of each row, in order. Row columns [N]: `group`, `member`, `trajectory` int64 (index into `trajectories`),
    `reward` float32 and `truncated` bool (of the trajectory, on all of its rows).

    `groups[i]`: group number of `trajectories[i]`; by default trajectories of one task form a group, numbered by first appearance
    (a repeated member begins a new one). Raises ValueError for an unscored trajectory: an infrastructure failure is never a
    reward and must be dropped before. With `allow_unscored` its rewards are NaN instead.
    """
    numbers = list(groups) if groups is not None else number_groups(trajectories)
    if len(numbers) != len(trajectories):
        raise ValueError(f"{len(numbers)} group numbers for {len(trajectories)} trajectories")
    ledgers: list[TokenLedger] = []
    rewards: list[tuple[int, float]] = []
    rows: list[tuple[int, int, int, float, bool]] = []
    total = 0
    for index, trajectory in enumerate(trajectories):
        if trajectory.reward is None and not allow_unscored:
            raise ValueError(f"trajectory {index} (task {trajectory.task.id!r}) is unscored; drop it before collating")
        reward = float("nan") if trajectory.reward is None else trajectory.reward
        # Rewards as (ledger, token, amount), placed by `reward_spots`. Without sampled turns (transcripts) the whole reward is on
        # the last sampled token; without such a token, nowhere.
        spots: list[Spot] = []
        if any(turn.ledger >= 0 and turn.end >= 0 for turn in trajectory.turns):
            turns = {turn.index: turn.reward for turn in trajectory.turns if turn.reward is not None}
            spots = reward_spots(trajectory, terminal_reward(reward, turns), turns)
        elif spoken := [at for at, ledger in enumerate(trajectory.ledgers) if ledger.sampled_tokens]:
            last = int(np.flatnonzero(trajectory.ledgers[spoken[-1]].sampled)[-1])
            spots = [(spoken[-1], last, reward)]
        starts = list(itertools.accumulate(map(len, trajectory.ledgers), initial=total))
        rewards += [(starts[at] + token, amount) for at, token, amount in spots]
        played = list(filter(len, trajectory.ledgers))
        ledgers += played
        rows += [(numbers[index], trajectory.member, index, reward, trajectory.truncated)] * len(played)
        total = starts[-1]
    return _batch(ledgers, rewards, rows)


def number_groups(trajectories: Sequence[Trajectory]) -> list[int]:
    """Number groups by task in order of first appearance; a repeated (task, member) begins a new group."""
    current: dict[tuple[str, str, int], int] = {}
    seen: set[tuple[int, int]] = set()
    numbers: list[int] = []
    fresh = itertools.count()
    for trajectory in trajectories:
        task = (trajectory.env or trajectory.env_id, trajectory.task.id, trajectory.task.seed)
        # A task can be drawn twice in a batch, and member numbers are unique in a group: a repeated one begins the next group.
        if task not in current or (current[task], trajectory.member) in seen:
            current[task] = next(fresh)
        seen.add((current[task], trajectory.member))
        numbers.append(current[task])
    return numbers


def _batch(
    ledgers: Sequence[TokenLedger], rewards: Sequence[tuple[int, float]], rows: Sequence[tuple[int, int, int, float, bool]]
) -> TensorDict:
    offsets = torch.zeros(len(ledgers) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(ledger) for ledger in ledgers], dtype=torch.int64), 0, out=offsets[1:])
    starts, total = offsets[:-1].tolist(), int(offsets[-1])

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        """Join a column of all ledgers in place, without a second array of its size."""
        values = torch.empty(total, dtype=dtype)
        flat = values.numpy()
        for start, ledger in zip(starts, ledgers, strict=True):
            flat[start : start + len(ledger)] = getattr(ledger, name)
        return nested_tensor(values, offsets)

    placed = torch.zeros(total)
    flat_rewards = placed.numpy()
    with np.errstate(over="ignore"):  # a reward beyond float32 becomes infinite; the learner then names its row
        for token, amount in rewards:
            flat_rewards[token] = np.float64(amount)
    # Experts, [T, routers, k], if a ledger has any.
    kinds = {(ledger.experts.shape[1:], ledger.experts.dtype.name) for ledger in ledgers if ledger.experts is not None}
    if len(kinds) > 1:
        raise ValueError(f"ledgers with experts of several models in one batch: {sorted(kinds)}")
    routed: dict[str, torch.Tensor] = {}
    for shape, kind in kinds:
        out = free(torch.empty(0, *shape, dtype=getattr(torch, kind)), total)
        chosen = out.numpy()
        for start, ledger in zip(starts, ledgers, strict=True):
            if ledger.experts is not None:
                chosen[start : start + len(ledger.experts)] = ledger.experts
        routed["experts"] = nested_tensor(out, offsets)
    pictured = any(ledger.images for ledger in ledgers)
    group, member, trajectory, reward, truncated = list(zip(*rows, strict=True)) or [()] * 5
    return build(
        {
            **routed,
            **({IMAGES: items_column([ledger.images for ledger in ledgers])} if pictured else {}),
            "token_ids": column("token_ids", torch.int32),
            "sampled": column("sampled", torch.bool),
            "logprobs": column("logprobs", torch.float32),
            "versions": column("versions", torch.int32),
            "turns": column("turns", torch.int16),
            "rewards": nested_tensor(placed, offsets),
            "group": torch.tensor(group, dtype=torch.int64),
            "member": torch.tensor(member, dtype=torch.int64),
            "trajectory": torch.tensor(trajectory, dtype=torch.int64),
            "reward": torch.tensor(reward, dtype=torch.float32),
            TRUNCATED: torch.tensor(truncated, dtype=torch.bool),
        },
        len(ledgers),
    )
