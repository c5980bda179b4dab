"""Attention over a shared-prefix layout (`prefix.SharedPack`), without a U x U mask.

Prefixes are computed as plain causal rows; all rests of one tree in one call, each over [prefix; itself].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Branch:
    """The rests of one tree: prefix [first, last), rests [start, stop) of `spans`, padded to `width`.

    `gather` [n * width] leads from a cell to its token, `cells` are the cells that count, `tokens` where
    their results go, and `mask` bool [width, prefix + width] is the causal mask behind a visible prefix.
    """

    first: int
    last: int
    count: int
    width: int
    gather: torch.Tensor
    cells: torch.Tensor
    tokens: torch.Tensor
    mask: torch.Tensor


def branches(spans: torch.Tensor) -> list[Branch]:
    """The spans of a SharedPack by prefix: a span without a prefix is a branch of its own."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, last, start, stop in spans.tolist():
        key = (first, last) if last > first else (start, start)
        groups.setdefault(key, []).append((start, stop))
    return [_branch(first, last, rests) for (first, last), rests in groups.items()]


def _branch(first: int, last: int, rests: Sequence[tuple[int, int]]) -> Branch:
    starts = torch.tensor([start for start, _ in rests])
    stops = torch.tensor([stop for _, stop in rests])
    width, prefix = int((stops - starts).max()), last - first
    places = starts[:, None] + torch.arange(width)
    gather = torch.minimum(places, stops[:, None] - 1).reshape(-1)
    cells = (places < stops[:, None]).reshape(-1).nonzero().squeeze(1)
    mask = torch.ones(width, prefix + width, dtype=torch.bool).tril(prefix)
    return Branch(first, last, len(rests), width, gather, cells, gather[cells], mask)


def shared_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Sequence[Branch],
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention of U tokens: query [U, H, D], key and value [U, H or fewer, D] -> [U, H, D].

    Rests are right-padded to the longest of their tree; a real token never sees the padding behind it.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    outputs: list[torch.Tensor] = []
    for branch in layout:
        cells = _attend(query, key, value, branch, scaling)
        outputs.append(cells if len(branch.cells) == len(cells) else cells.index_select(0, branch.cells))
    tokens = torch.cat([branch.tokens for branch in layout])
    return torch.zeros_like(query).index_copy(0, tokens, torch.cat(outputs))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, branch: Branch, scaling: float | None
) -> torch.Tensor:
    heads, depth = query.shape[1], query.shape[2]

    def rests(tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.index_select(0, branch.gather)
            .view(branch.count, branch.width, heads, depth)
            .transpose(1, 2)
        )

    def with_prefix(tensor: torch.Tensor) -> torch.Tensor:
        prefix = tensor[branch.first : branch.last].transpose(0, 1)[None]
        return torch.cat([prefix.expand(branch.count, -1, -1, -1), rests(tensor)], dim=2)

    if branch.last == branch.first:
        out = F.scaled_dot_product_attention(
            rests(query), rests(key), rests(value), is_causal=True, scale=scaling
        )
    else:
        out = F.scaled_dot_product_attention(
            rests(query), with_prefix(key), with_prefix(value), attn_mask=branch.mask, scale=scaling
        )
    return out.transpose(1, 2).reshape(-1, heads, depth)
