"""Attention over blocks: rows of similar length, padded to one width, and the suffixes of a shared prefix behind it.

Prefixes are computed as plain causal rows; all suffixes of one prefix in one call, each over [prefix; itself], without a mask
over all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from agentrl.data.rows import on_device
from agentrl.engines.exact_attention import AttentionForm, exact_attention

WASTE = 1.25
"""The most cells of a block of rows, padding included, as a multiple of its tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length, computed in one call: `gather` [n * width] maps a cell of the padded block to its token
    (a cell past a row's end repeats the row's last token), `cells` [tokens] are the cells that are not padding,
    `tokens` [tokens] the positions of their results, and `exact` says that no cell is padding.

    Of suffixes, `prefix` [first, last) are the tokens that each of them also sees, and `mask` bool [width, prefix + width] is the
    causal mask after them."""

    rows: int
    width: int
    gather: Tensor
    cells: Tensor
    tokens: Tensor
    exact: bool
    prefix: tuple[int, int] = (0, 0)
    mask: Tensor | None = None

    def pad(self, tensor: Tensor) -> Tensor:
        """[T, ...] -> [rows, width, ...]: the block's tokens, each row's last one repeated up to the width."""
        return tensor.index_select(0, self.gather).view(self.rows, self.width, *tensor.shape[1:])

    def unpad(self, cells: Tensor) -> Tensor:
        """[rows, width, ...] -> [tokens, ...]."""
        flat = cells.flatten(0, 1)
        return flat if self.exact else flat.index_select(0, self.cells)


def row_block(starts: Tensor, stops: Tensor, device: torch.device, prefix: tuple[int, int] = (0, 0)) -> Block:
    """The block of the rows [start, stop), or of the suffixes of a prefix."""
    width, before = int((stops - starts).max()), prefix[1] - prefix[0]
    positions = starts[:, None] + torch.arange(width)
    valid = (positions < stops[:, None]).reshape(-1)
    # Padding cells repeat the row's last token, so that they hold finite values; their results are dropped.
    gather = torch.minimum(positions, stops[:, None] - 1).reshape(-1)
    cells = valid.nonzero().squeeze(1)
    at, used, tokens = (on_device(part, device) for part in (gather, cells, gather[cells]))
    # Query i sees the whole prefix and the first i + 1 tokens of its own suffix; padding comes after those, so is never seen.
    mask = on_device(torch.ones(width, before + width, dtype=torch.bool).tril(before), device) if before else None
    return Block(len(starts), width, at, used, tokens, bool(valid.all()), prefix, mask)


def row_blocks(starts: Tensor, stops: Tensor, device: torch.device) -> tuple[Block, ...]:
    """The rows [start, stop) in blocks with little padding."""
    # On the host, because block sizes become shapes: reading them from a GPU would synchronize with it for each block.
    starts, stops = starts.cpu(), stops.cpu()
    return tuple(row_block(starts[rows], stops[rows], device) for rows in similar((stops - starts).tolist()))


def suffix_blocks(spans: Tensor, device: torch.device | None = None) -> list[Block]:
    """The spans of a SharedPack grouped by prefix: a span without a prefix is a block of its own."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, last, start, stop in spans.tolist():
        groups.setdefault((first, last) if last > first else (start, start), []).append((start, stop))
    place = device or torch.device("cpu")
    found = []
    for prefix, suffixes in groups.items():
        starts, stops = torch.tensor(suffixes).unbind(1)
        found.append(row_block(starts, stops, place, prefix))
    return found


def similar(lengths: list[int]) -> list[list[int]]:
    """Rows grouped, in order of length, into blocks with little padding."""
    # Longest first: a block is then as wide as its first row, so each further row's padding is known when it is considered.
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    used = 0
    for row in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= WASTE * (used + lengths[row]):
            groups[-1].append(row)
            used += lengths[row]
        else:
            groups.append([row])
            used = lengths[row]
    return [sorted(group) for group in groups]


def attend(q: Tensor, k: Tensor, v: Tensor, block: Block, form: AttentionForm) -> Tensor:
    """[T, H, D], [T, G, D], [T, G, E] -> [tokens of the block, H, E]."""
    first, last = block.prefix
    # Of a prefix longer than the window no suffix sees the beginning.
    seen = first if form.window is None else max(first, last - form.window + 1)
    # An exact block of all tokens has them in their order.
    whole = block.exact and len(q) == len(block.gather)

    def cells(tensor: Tensor) -> Tensor:
        own = tensor.view(block.rows, block.width, *tensor.shape[1:]) if whole else block.pad(tensor)
        return own.transpose(1, 2)

    def with_prefix(tensor: Tensor) -> Tensor:
        prefix = tensor[seen:last].transpose(0, 1)[None].expand(block.rows, -1, -1, -1)
        return torch.cat([prefix, cells(tensor)], dim=2) if first < last else cells(tensor)

    query, key, value = cells(q), with_prefix(k), with_prefix(v)
    if form.plain_up_to(last - first + block.width):
        out = fused_attention(query, key, value, scale=form.scale, attn_mask=block.mask, is_causal=block.mask is None)
    else:
        out = exact_attention(query, key, value, form)
    return block.unpad(out.transpose(1, 2))


def attend_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[Block], form: AttentionForm) -> Tensor:
    """A copy of `out` [T, H, E] with the attention of these blocks' tokens written in their places."""
    parts = [attend(q, k, v, block, form) for block in blocks]
    # One index_copy for all blocks: each call allocates a whole new `out`.
    return out.index_copy(0, torch.cat([block.tokens for block in blocks]), torch.cat(parts))


def fused_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch's attention of `query` [n, H, W, D], `key` [n, G, K, D] and `value` [n, G, K, E]: [n, H, W, E]."""
    heads, wide = query.shape[1], value.shape[-1]
    # Of the kernels behind this call only the one for half precision on GPUs, and that without a mask, reads each key head once
    # for its whole group of query heads; all others would fall back to the slow one that keeps every score.
    grouped = query.is_cuda and query.dtype != torch.float32 and options.get("attn_mask") is None and heads != key.shape[1]
    if heads != key.shape[1] and not grouped:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
    query, key, value = same_width(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, **options)[..., :wide]


def same_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The heads with zeros after their features, so that those of keys and values are equally wide, as kernels want them
    (latent attention has wider keys): neither scores nor the first features of a result change."""
    more = query.shape[-1] - value.shape[-1]
    if not more:  # a pad by nothing copies
        return query, key, value
    return F.pad(query, (0, max(0, -more))), F.pad(key, (0, max(0, -more))), F.pad(value, (0, max(0, more)))
