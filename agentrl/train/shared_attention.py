"""Attention of rows that share prefixes, on a CPU: each span over itself, and over its prefix, joined by their scores' sums.

Softmax over [prefix; itself] is the mean of the two parts' results, weighted by the sums of their exponentials:

    lse = log(exp(lse_1) + exp(lse_2)),   out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

(Rabe and Staats, 2021, "Self-attention does not need O(n^2) memory"). So no keys are copied for the rows that share them, no mask
is made, and what causality hides is not computed. In the backward pass each part's probabilities are exp(scores - lse) with the
joined lse, and the joined `out` gives the term that all keys of a query share: the kernel's own backward does both, given these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length, computed in one call: `gather` [n * width] maps a cell of the padded block to its token
    (a cell past a row's end repeats the row's last token), `cells` [tokens] are the cells that are not padding,
    `tokens` [tokens] the positions of their results, and `exact` says that no cell is padding."""

    rows: int
    width: int
    gather: Tensor
    cells: Tensor
    tokens: Tensor
    exact: bool


@dataclass(frozen=True, slots=True)
class Spans:
    """`blocks`: all spans, prefixes among them, each causal over itself. `after`: (first, last, start, stop); the tokens
    [start, stop) also see all of the prefix [first, last)."""

    blocks: tuple[Block, ...]
    after: tuple[tuple[int, int, int, int], ...]


def runs_after(spans: Tensor) -> tuple[tuple[int, int, int, int], ...]:
    """Of `spans` int64 [S, 4] (SharedPack), the suffixes, those that follow each other behind one prefix as one run."""
    runs: list[tuple[int, int, int, int]] = []
    for first, last, start, stop in spans.tolist():
        if first == last:
            continue
        if runs and runs[-1][:2] == (first, last) and runs[-1][3] == start:
            runs[-1] = (first, last, runs[-1][2], stop)
        else:
            runs.append((first, last, start, stop))
    return tuple(runs)


def shared_attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float | None) -> Tensor:
    """[T, H, D], [T, H, D], [T, H, D] -> [T, H, D], on a CPU."""
    out: Tensor = _Shared.apply(q, k, v, spans, scale)  # type: ignore[no-untyped-call]
    return out


class _Shared(torch.autograd.Function):
    """See the module."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float | None) -> Tensor:
        sums_in = torch.float64 if q.dtype == torch.float64 else torch.float32  # as the kernel has them
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=sums_in)
        for block in spans.blocks:
            found, sums = _FORWARD(*(_cells(tensor, block) for tensor in (q, k, v)), 0.0, True, scale=scale)
            out.index_copy_(0, block.tokens, _tokens(found.transpose(1, 2), block))
            lse.index_copy_(0, block.tokens, _tokens(sums.transpose(1, 2), block))
        for first, last, start, stop in spans.after:
            rest, sums = _FORWARD(_one(q[start:stop]), _one(k[first:last]), _one(v[first:last]), 0.0, False, scale=scale)
            before = lse[start:stop]
            joined = torch.logaddexp(before, sums[0].transpose(0, 1))
            part = out[start:stop]
            share = (before - joined).exp().unsqueeze(-1).to(out.dtype)
            # Shares add up to one: out + (rest - out) * share of the rest.
            part.lerp_(rest[0].transpose(0, 1), 1 - share)
            before.copy_(joined)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        found = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        for block in ctx.spans.blocks:
            given = [_cells(tensor, block) for tensor in (grad, q, k, v, out)]
            if not block.exact:  # the padding repeats a token, whose gradient must count once
                keep = torch.zeros(block.rows * block.width, dtype=given[0].dtype).index_fill_(0, block.cells, 1)
                given[0] = given[0] * keep.view(block.rows, 1, block.width, 1)
            parts = _BACKWARD(*given, _cells(lse, block), 0.0, True, scale=ctx.scale)
            for whole, part in zip(found, parts, strict=True):
                whole.index_copy_(0, block.tokens, _tokens(part.transpose(1, 2), block))
        for first, last, start, stop in ctx.spans.after:
            prefix = [_one(tensor[first:last]) for tensor in (k, v)]
            own = [_one(tensor[start:stop]) for tensor in (grad, q, out, lse)]
            parts = _BACKWARD(own[0], own[1], *prefix, own[2], own[3], 0.0, False, scale=ctx.scale)
            where: Sequence[slice] = (slice(start, stop), slice(first, last), slice(first, last))
            for whole, at, part in zip(found, where, parts, strict=True):
                whole[at] += part[0].transpose(0, 1)
        return (*found, None, None)  # type: ignore[return-value]


def _cells(tensor: Tensor, block: Block) -> Tensor:
    """[T, H, ...] -> [rows, H, width, ...]: the block's tokens, each row's last one repeated up to the width."""
    cells = tensor.index_select(0, block.gather)
    return cells.view(block.rows, block.width, *tensor.shape[1:]).transpose(1, 2)


def _tokens(cells: Tensor, block: Block) -> Tensor:
    """[rows, width, H, ...] -> [tokens, H, ...]: without padding."""
    flat = cells.flatten(0, 1)
    return flat if block.exact else flat.index_select(0, block.cells)


def _one(tensor: Tensor) -> Tensor:
    """[n, H, ...] -> [1, H, n, ...]."""
    return tensor.transpose(0, 1)[None]
