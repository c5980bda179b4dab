"""Causal attention with what no fused kernel has together: a sliding window, soft-capped scores, sinks.

Scores exist for a piece of the queries at a time, in float32, and only over the keys that the piece can see; the backward pass
makes them again (Dao 2023, arXiv:2307.08691, section 2). With a sink s, softmax has one more term: lse' = log(e^lse + e^s). The
gradients are those of plain attention with lse' in place of lse, and ds = - sum over queries of e^(s - lse') (do . o).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.backends.attention_form import AttentionForm

CELLS, GPU_CELLS = 1 << 22, 1 << 25
"""The most scores that exist at a time, on a host (16 MiB) and on a GPU (128 MiB), unless one query has more."""
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries [first, last) and the keys [low, high) that they see."""

    queries: slice
    keys: slice
    hidden: Tensor  # bool [queries, keys]: a query does not see that key


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """The same without gradients, with a mask for each row in place of positions: `mask` [n, 1, W, K] is added to scores."""
    rows, heads, width, _ = query.shape
    out = query.new_empty(rows, heads, width, value.shape[-1])
    parts = _by_key_head(query, key), _by_key_head(out, key)
    step = max(1, _cells(query) // (rows * heads * key.shape[2]))
    for first in range(0, width, step):
        piece = slice(first, first + step)
        z, _ = _capped(_times(parts[0][:, :, :, piece], key.transpose(-1, -2)).mul_(form.scale), form.cap)
        z = z.add_(mask[:, :, None, piece])
        p = z.sub_(_sums(z, form.sinks, key).unsqueeze(-1)).exp_().to(value.dtype)
        parts[1][:, :, :, piece] = _times(p, value).to(out.dtype)
    return out


def exact_attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """`query` [n, H, W, D], `key` [n, G, K, D], `value` [n, G, K, E] -> [n, H, W, E] in query's type; query i stands at the
    position K - W + i of the keys. H is a multiple of G. The form's chunk is the caller's to see to."""
    call: Callable[..., Tensor] = _Exact.apply
    return call(query, key, value, form.sinks, replace(form, sinks=None))


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, form: AttentionForm) -> Tensor:
        rows, heads, width, _ = query.shape
        out = query.new_empty(rows, heads, width, value.shape[-1])
        lse = query.new_empty(rows, heads, width, dtype=torch.float32)
        grouped = _by_key_head(out, key), _by_key_head(lse, key)
        for piece in _pieces(query, key, form.window):
            z, _ = _made(query, key, piece, form)
            part = _sums(z, sinks, key)
            grouped[1][:, :, :, piece.queries] = part
            p = z.sub_(part.unsqueeze(-1)).exp_().to(value.dtype)
            grouped[0][:, :, :, piece.queries] = _times(p, value[:, :, piece.keys]).to(out.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        form: AttentionForm = ctx.form
        grad = grads[0]
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
        delta = (grad.float() * out.float()).sum(-1)
        parts = [_by_key_head(tensor, key) for tensor in (query, grad, lse, delta, d_query)]
        for piece in _pieces(query, key, form.window):
            q, do, norm, drop, dq = (tensor[:, :, :, piece.queries] for tensor in parts)
            k, v = key[:, :, piece.keys], value[:, :, piece.keys]
            z, bend = _made(query, key, piece, form)
            p = z.sub_(norm.unsqueeze(-1)).exp_()
            d_value[:, :, piece.keys] += _summed(p.to(do.dtype), do)
            dz = _times(do, v.transpose(-1, -2)).sub_(drop.unsqueeze(-1)).mul_(p).mul_(form.scale)
            if bend is not None:
                dz.mul_(bend)
            dz = dz.to(q.dtype)
            dq.copy_(_times(dz, k))
            d_key[:, :, piece.keys] += _summed(dz, q)
        d_sinks = None
        if sinks is not None:
            d_sinks = -(torch.exp(sinks.float()[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


def _pieces(query: Tensor, key: Tensor, window: int | None) -> Iterator[_Piece]:
    rows, heads, width, _ = query.shape
    keys = key.shape[2]
    before = keys - width
    # With a window, as long as it: a longer piece has more scores that no query sees, a shorter one more calls.
    most = max(1, _cells(query) // (rows * heads * min(keys, 2 * window if window else keys)))
    step = min(most, max(window, 64)) if window else most
    for first in range(0, width, step):
        last = min(first + step, width)
        low = max(0, before + first - window + 1) if window else 0
        high = before + last
        at = torch.arange(before + first, high, device=query.device)[:, None]
        seen = torch.arange(low, high, device=query.device)
        hidden = seen > at
        if window:
            hidden |= seen <= at - window  # as transformers' sliding_window_overlay: the query itself and w - 1 keys before it
        yield _Piece(slice(first, last), slice(low, high), hidden)


def _cells(query: Tensor) -> int:
    # Small pieces stay in a core's cache; a GPU needs large ones, as each product of them is one more launch.
    return GPU_CELLS if query.is_cuda else CELLS


def _made(query: Tensor, key: Tensor, piece: _Piece, form: AttentionForm) -> tuple[Tensor, Tensor | None]:
    """Scores of a piece, float32 [n, G, H / G, queries, keys], and the derivative of the cap."""
    q = _by_key_head(query, key)[:, :, :, piece.queries]
    z, bend = _capped(_times(q, key[:, :, piece.keys].transpose(-1, -2)).mul_(form.scale), form.cap)
    return z.masked_fill_(piece.hidden, _NEVER), bend


def _capped(z: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """cap tanh(z / cap) in z's memory, and its derivative."""
    if cap is None:
        return z, None
    z = z.div_(cap).tanh_()
    bend = z.square().neg_().add_(1.0)
    return z.mul_(cap), bend


def _sums(z: Tensor, sinks: Tensor | None, key: Tensor) -> Tensor:
    """log of the sum of e^z over the keys, and of e^s for each head's sink: [n, G, H / G, queries]."""
    lse = torch.logsumexp(z, dim=-1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float().view(1, key.shape[1], -1, 1))


def _by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """[n, H, ...] -> [n, G, H / G, ...], a view: the query heads that share a key head."""
    return tensor.view(len(tensor), key.shape[1], -1, *tensor.shape[2:])


def _times(left: Tensor, right: Tensor) -> Tensor:
    """[n, G, r, a, b] times [n, G, b, c] in float32: the r queries of a key head are rows of one product."""
    rows, groups, heads, steps, inner = left.shape
    flat = left.reshape(rows * groups, heads * steps, inner)
    return _product(flat, right.reshape(rows * groups, inner, -1)).view(rows, groups, heads, steps, -1)


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """Of [n, G, r, a, b] and [n, G, r, a, c] the products over r and a: float32 [n, G, b, c]."""
    rows, groups, heads, steps, inner = left.shape
    flat = left.reshape(rows * groups, heads * steps, inner).transpose(1, 2)
    return _product(flat, right.reshape(rows * groups, heads * steps, -1)).view(rows, groups, inner, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    # In half precision a score of 50 would be rounded by 0.1, before it is an exponent.
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
