"""Attention over a shared-prefix layout (`prefix.SharedPack`), without a U x U mask.

Prefixes are computed as plain causal rows; all suffixes of one tree in one call, each over [prefix; itself].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from agentrl.batch.device import on_device


@dataclass(frozen=True, slots=True)
class SuffixBlock:
    """The suffixes of one tree: prefix [first, last), suffixes [start, stop) of `spans`, padded to `width`.

    `gather` [n * width] maps a cell of the padded block to its token, `cells` are the cells that are not padding,
    `tokens` where their results go, and `mask` bool [width, prefix + width] is the causal mask after a visible prefix.
    """

    first: int
    last: int
    count: int
    width: int
    gather: torch.Tensor
    cells: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor


def suffix_blocks(spans: torch.Tensor, device: torch.device | None = None) -> list[SuffixBlock]:
    """The spans of a SharedPack grouped by prefix: a span without a prefix is a block of its own."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, last, start, stop in spans.tolist():
        key = (first, last) if last > first else (start, start)
        groups.setdefault(key, []).append((start, stop))
    place = device or torch.device("cpu")
    return [_suffix_block(first, last, suffixes, place) for (first, last), suffixes in groups.items()]


def _suffix_block(first: int, last: int, suffixes: Sequence[tuple[int, int]], device: torch.device) -> SuffixBlock:
    starts = torch.tensor([start for start, _ in suffixes])
    stops = torch.tensor([stop for _, stop in suffixes])
    width, prefix = int((stops - starts).max()), last - first
    positions = starts[:, None] + torch.arange(width)
    # Padding cells repeat the suffix's last token, so that they hold finite values; their results are dropped.
    gather = torch.minimum(positions, stops[:, None] - 1).reshape(-1)
    cells = (positions < stops[:, None]).reshape(-1).nonzero().squeeze(1)
    # Query i sees the whole prefix and the first i + 1 tokens of its own suffix; padding comes after those, so is never seen.
    mask = torch.ones(width, prefix + width, dtype=torch.bool).tril(prefix)
    parts = (gather, cells, gather[cells], mask)
    return SuffixBlock(first, last, len(suffixes), width, *(on_device(part, device) for part in parts))


def attend_into(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Sequence[SuffixBlock],
    scaling: float | None = None,
) -> torch.Tensor:
    """A copy of `out` [U, H, D] with the attention of these blocks' tokens written in their places."""
    parts = [_attend(query, key, value, block, scaling) for block in layout]
    # One index_copy for all blocks: each call allocates a whole new `out`.
    tokens = torch.cat([block.tokens for block in layout])
    return out.index_copy(0, tokens, torch.cat(parts))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: SuffixBlock, scaling: float | None
) -> torch.Tensor:
    """Attention of one tree's suffixes: [tokens of the suffixes, H, D]."""
    heads, depth = query.shape[1], query.shape[2]

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        cells = tensor.index_select(0, block.gather)
        return cells.view(block.count, block.width, tensor.shape[1], depth).transpose(1, 2)

    def with_prefix(tensor: torch.Tensor) -> torch.Tensor:
        prefix = tensor[block.first : block.last].transpose(0, 1)[None]
        whole = torch.cat([prefix.expand(block.count, -1, -1, -1), padded(tensor)], dim=2)
        return whole.repeat_interleave(heads // tensor.shape[1], dim=1) if tensor.shape[1] != heads else whole

    alone = block.last == block.first
    out = F.scaled_dot_product_attention(
        padded(query),
        with_prefix(key),
        with_prefix(value),
        attn_mask=None if alone else block.mask,
        is_causal=alone,
        scale=scaling,
    )
    cells = out.transpose(1, 2).reshape(-1, heads, depth)
    return cells if len(block.cells) == len(cells) else cells.index_select(0, block.cells)
