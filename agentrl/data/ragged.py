"""Arithmetic on ragged rows kept flat: a column [T] and offsets int64 [N + 1]."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor


def row_ids(offsets: Tensor, tokens: int | None = None) -> Tensor:
    """The row of each token, int64 [T]; `tokens` is T, which a GPU would otherwise be asked for."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=tokens)


def row_sum(column: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each row: [T] -> [N]; 0 for an empty row."""
    zeros = torch.zeros(len(offsets) - 1, dtype=column.dtype, device=column.device)
    return zeros.index_add(0, row_ids(offsets, len(column)), column)


def row_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    """True tokens of each row: bool [T] on the host -> int64 [N]. Allocates nothing of the column's size."""
    flags, bounds = mask.numpy(), offsets.tolist()
    per_row = (np.count_nonzero(flags[start:stop]) for start, stop in itertools.pairwise(bounds))
    counts = np.fromiter(per_row, np.int64, len(bounds) - 1)  # np.add.reduceat would cast the whole column first
    return torch.from_numpy(counts)


def row_mean(column: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Mean over the masked tokens of each row: [T] -> [N]; 0 for a row without one."""
    kept = torch.where(mask, column, torch.zeros_like(column))
    return row_sum(kept, offsets) / row_sum(mask.to(column.dtype), offsets).clamp(min=1)


def spread(rows: Tensor, offsets: Tensor, tokens: int | None = None) -> Tensor:
    """A row's value on each of its tokens: [N] -> [T]; `tokens` as in `row_ids`."""
    return rows[row_ids(offsets, tokens)]


def on_mask(rows: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """A row's value on its masked tokens, 0 elsewhere: [N] -> [T], without a gradient, on the host."""
    values, flags, bounds = rows.detach().numpy(), mask.numpy(), offsets.tolist()
    # Not np.empty: it requests huge pages, and a virtual machine may first have to get each of them from its host.
    out = torch.empty(len(flags), dtype=rows.dtype)
    tokens = out.numpy()
    for value, (start, stop) in zip(values, itertools.pairwise(bounds), strict=True):
        # Row by row: a single np.repeat over all rows would hold the GIL, and thus block the event loop.
        np.multiply(flags[start:stop], value, out=tokens[start:stop])
    return out


def zscores(values: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + eps), float64 [M]. Equal values, and so a single one, become exactly 0."""
    values = values.double()
    if len(values) < 2:
        return torch.zeros_like(values)
    above = values - values[0]  # exactly 0 if all values are equal: the mean of equal values can differ from them by rounding
    apart = above - above.mean()
    return apart * torch.rsqrt(apart.square().sum() / (len(values) - 1) + eps)


def whiten_masked(column: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """`zscores` over the masked tokens, 0 elsewhere: [T] -> [T]."""
    out = torch.zeros_like(column)
    out[mask] = zscores(column[mask], eps).to(column.dtype)
    return out


def sampled_offsets(mask: Tensor, offsets: Tensor) -> Tensor:
    """Offsets of the rows when only their masked tokens are kept, int64 [N + 1]."""
    counts = row_sum(mask.to(torch.int64), offsets)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def credit(token_rewards: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Move every reward to the sampled token that earned it: [T] -> [M], the masked tokens only.

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
    """y[t] = x[t] + factor * y[t + 1] within each row: [M] -> [M]."""
    counts = offsets.diff()
    width = int(counts.max()) if len(counts) else 0
    if width == 0:
        return column.clone()
    rows = row_ids(offsets)
    place = torch.arange(len(column), device=column.device) - offsets[:-1][rows]
    # Padded, so that the recursion runs over all rows at once: as many steps as the longest row has tokens, not T of them.
    padded = column.new_zeros(len(counts), width)
    padded[rows, place] = column
    out = torch.empty_like(padded)
    carry = column.new_zeros(len(counts))
    for step in range(width - 1, -1, -1):
        carry = padded[:, step] + factor * carry
        out[:, step] = carry
    return out[rows, place]


def following(column: Tensor, offsets: Tensor) -> Tensor:
    """y[t] = x[t + 1] within each row, 0 after a row's last: [M] -> [M]."""
    after = torch.cat([column[1:], column.new_zeros(1)]) if len(column) else column.clone()
    last = offsets[1:][offsets.diff() > 0] - 1
    after[last] = 0.0
    return after
