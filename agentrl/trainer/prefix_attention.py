"""Attention over a shared-prefix layout (`prefix.SharedPack`), without a U x U mask.

Prefixes are computed as plain causal rows; all suffixes of one tree in one call, each over [prefix; itself].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from agentrl.data.rows import on_device
from agentrl.engines.exact_attention import AttentionForm, exact_attention


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
    form: AttentionForm,
) -> torch.Tensor:
    """A copy of `out` [U, H, E] with the attention of these blocks' tokens written in their places."""
    parts = [_attend(query, key, value, block, form) for block in layout]
    # One index_copy for all blocks: each call allocates a whole new `out`.
    tokens = torch.cat([block.tokens for block in layout])
    return out.index_copy(0, tokens, torch.cat(parts))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: SuffixBlock, form: AttentionForm) -> torch.Tensor:
    """Attention of one tree's suffixes: [tokens of the suffixes, H, E]."""
    # Of a prefix longer than the window no suffix sees the beginning.
    first = block.first if form.window is None else max(block.first, block.last - form.window + 1)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        cells = tensor.index_select(0, block.gather)
        return cells.view(block.count, block.width, *tensor.shape[1:]).transpose(1, 2)

    def with_prefix(tensor: torch.Tensor) -> torch.Tensor:
        prefix = tensor[first : block.last].transpose(0, 1)[None]
        return torch.cat([prefix.expand(block.count, -1, -1, -1), padded(tensor)], dim=2)

    q, k, v = padded(query), with_prefix(key), with_prefix(value)
    if form.plain_up_to(block.last - block.first + block.width):
        alone = block.last == block.first
        mask = None if alone else block.mask
        out = fused_attention(q, k, v, scale=form.scale, attn_mask=mask, is_causal=alone)
    else:
        out = exact_attention(q, k, v, form)
    cells = out.transpose(1, 2).flatten(0, 1)
    return cells if len(block.cells) == len(cells) else cells.index_select(0, block.cells)


def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's attention of `query` [n, H, W, D], `key` [n, G, K, D] and `value` [n, G, K, E]: [n, H, W, E]."""
    heads, wide = query.shape[1], value.shape[-1]
    # Of the kernels behind this call only the one for half precision on GPUs, and that without a mask, reads each key head once
    # for its whole group of query heads; all others would fall back to the slow one that keeps every score.
    grouped = query.is_cuda and query.dtype != torch.float32 and options.get("attn_mask") is None and heads != key.shape[1]
    if heads != key.shape[1] and not grouped:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    query, key, value = same_width(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)[..., :wide]


def same_width(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads with zeros after their features, so that those of keys and values are equally wide, as kernels want them
    (latent attention has wider keys): neither scores nor the first features of a result change."""
    more = query.shape[-1] - value.shape[-1]
    if not more:  # a pad by nothing copies
        return query, key, value
    return F.pad(query, (0, max(0, -more))), F.pad(key, (0, max(0, -more))), F.pad(value, (0, max(0, more)))
