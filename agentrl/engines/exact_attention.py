"""Exact attention for trainer and embedded engine, in one form for all of transformers' layers.

The form of a layer's attention (window, soft cap, sinks), and causal attention with all of them, which no fused kernel supports
together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.utils.errors import ModelError

# The form of a layer's attention

_ROWS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Boundaries of packed rows, which the attention functions here get in other ways."""
_RETURNS = ("output_attentions", "output_hidden_states", "output_router_logits", "use_cache", "cache_position")
"""Requests for outputs and caches."""
HARMLESS = frozenset({*_ROWS, *_RETURNS, "num_items_in_batch", "deterministic"})  # for a loss and a kernel that are not used
"""Arguments of attention functions that change no result."""


class NotGiven:
    """Type of the default of an argument that a layer may omit, as distinct from None."""


NOT_GIVEN = NotGiven()


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """Softmax over visible keys of cap tanh(scale q k / cap), or of scale q k without a cap.

    Keys up to the query's position are visible: with a `window` w the last w of them, with a `chunk` c those in the query's
    block of c positions. `sinks` [H]: one extra score per head in the softmax, without a value. `tuning`: see `at_positions`.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    tuning: tuple[float, float] | None = None

    def at_positions(self, query: Tensor, positions: Tensor) -> Tensor:
        """Correct the temperature tuning of `query` [T, H, D] for the tokens' true positions.

        Llama 4 scales the queries of layers without rotary embeddings by s(i) = 1 + a log(1 + floor((i + 1) / f)), with i the
        token's index in the flat input, which is its position in the first of several rows only."""
        if self.tuning is None:
            return query
        floor, factor = self.tuning
        places = torch.arange(len(query), device=query.device)
        right, given = (1 + factor * torch.log1p(torch.floor((at.double() + 1) / floor)) for at in (positions, places))
        return query * (right / given).to(query.dtype)[:, None, None]

    def plain_up_to(self, length: int) -> bool:
        """Return True if this is plain causal attention, up to the scale, for rows of at most `length` tokens."""
        # A window that no row exceeds hides no key.
        return self.cap is None and self.sinks is None and (self.window is None or self.window >= length)


def attention_form(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | NotGiven | None,
    others: Mapping[str, Any],
) -> AttentionForm:
    """Derive the form of a layer's attention `module` from the arguments of a transformers attention function.

    `query` [1, H, T, D]. Raises ModelError, naming the layer's class and the argument, for anything that the form lacks.
    """
    asked = {name: value for name, value in others.items() if value is not None and name not in HARMLESS}
    layer, sinks, cap = type(module).__name__, asked.pop("s_aux", None), asked.pop("softcap", None)
    if dropout:
        raise ModelError(f"{layer}: dropout in attention is not supported; set attention_dropout to 0 in its config.json")
    if mask is not None:
        raise ModelError(f"{layer}: its model makes an attention mask of its own, which is not supported")
    if not asked.pop("is_causal", True) or not getattr(module, "is_causal", True):
        raise ModelError(f"{layer}: its attention is not causal, which is not supported")
    if asked:
        raise ModelError(f"{layer}: attention with {', '.join(sorted(asked))} is not supported")
    config: Any = getattr(module, "config", None)
    at, kinds = getattr(module, "layer_idx", None), getattr(config, "layer_types", None) or ()
    kind = kinds[at] if at is not None and at < len(kinds) else None
    if isinstance(sliding_window, NotGiven):
        # Some families (Phi-3.5-MoE, Doge, Qwen2-MoE) pass the window only to transformers' mask function.
        of_config = getattr(config, "sliding_window", None)
        sliding_window = getattr(module, "sliding_window", of_config if kind in (None, "sliding_attention") else None)
    tuning = None
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        tuning = float(module.floor_scale), float(module.attn_scale)  # type: ignore[arg-type]
    return AttentionForm(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=int(sliding_window) if sliding_window else None,
        chunk=int(config.attention_chunk_size) if kind == "chunked_attention" else None,  # Llama 4 sets only the type
        cap=cap,
        sinks=sinks,
        tuning=tuning,
    )


CELLS, GPU_CELLS = 1 << 22, 1 << 25
"""Maximum number of scores computed at a time on a CPU (16 MiB) and on a GPU (128 MiB), unless one query has more."""


_Piece = tuple[slice, slice, Tensor]
"""Queries, the range of their visible keys, and the mask [..., queries, keys] of the keys hidden from each query."""


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """Compute attention like `exact_attention`, without gradients; `mask` [n, 1, W, K] is -inf where a key is hidden."""
    rows, heads, width, _ = query.shape
    cells = GPU_CELLS if query.is_cuda else CELLS
    step = max(1, cells // (rows * heads * key.shape[2]))
    pieces = [slice(first, first + step) for first in range(0, width, step)]
    hidden = mask.isinf()[:, :, None]
    return _attend(query, key, value, form.sinks, form, ((piece, slice(None), hidden[..., piece, :]) for piece in pieces))[0]


def exact_attention(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """Compute causal attention: `query` [n, H, W, D], `key` [n, G, K, D], `value` [n, G, K, E] -> [n, H, W, E].

    The result has query's type. Query i has position K - W + i; H is a multiple of G. Callers must handle the form's chunk."""
    call: Callable[..., Tensor] = _Exact.apply
    return call(query, key, value, form.sinks, replace(form, sinks=None))


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, form: AttentionForm) -> Tensor:
        out, lse = _attend(query, key, value, sinks, form, _pieces(query, key, form.window))
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
            queries, keys, _ = piece
            q, do, norm, drop, dq = (tensor[:, :, :, queries] for tensor in parts)
            k, v = key[:, :, keys], value[:, :, keys]
            z, bend = _piece_scores(query, key, piece, form)
            p = z.sub_(norm.unsqueeze(-1)).exp_()
            d_value[:, :, keys] += _sum_products(p.to(do.dtype), do)
            dz = _times(do, v.transpose(-1, -2)).sub_(drop.unsqueeze(-1)).mul_(p).mul_(form.scale)
            if bend is not None:
                dz.mul_(bend)
            dz = dz.to(q.dtype)
            dq.copy_(_times(dz, k))
            d_key[:, :, keys] += _sum_products(dz, q)
        d_sinks = None
        if sinks is not None:
            d_sinks = -(torch.exp(sinks.float()[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, form: AttentionForm, pieces: Iterable[_Piece]
) -> tuple[Tensor, Tensor]:
    """Compute attention piece by piece; return it and the log of each query's sum, float32 [n, H, W]."""
    rows, heads, width, _ = query.shape
    out = query.new_empty(rows, heads, width, value.shape[-1])
    lse = query.new_empty(rows, heads, width, dtype=torch.float32)
    grouped = _by_key_head(out, key), _by_key_head(lse, key)
    for piece in pieces:
        z, _ = _piece_scores(query, key, piece, form)
        part = _sums(z, sinks, key)
        queries, keys, _ = piece
        grouped[1][:, :, :, queries] = part
        p = z.sub_(part.unsqueeze(-1)).exp_().to(value.dtype)
        grouped[0][:, :, :, queries] = _times(p, value[:, :, keys]).to(out.dtype)
    return out, lse


def _pieces(query: Tensor, key: Tensor, window: int | None) -> Iterator[_Piece]:
    rows, heads, width, _ = query.shape
    keys = key.shape[2]
    before = keys - width
    # With a window, pieces of its length: longer ones compute more hidden scores, shorter ones need more calls.
    # Small pieces stay in a core's cache; a GPU needs large ones, since each product is a kernel launch.
    cells = GPU_CELLS if query.is_cuda else CELLS
    most = max(1, cells // (rows * heads * min(keys, 2 * window if window else keys)))
    step = min(most, max(window, 64)) if window else most
    for first in range(0, width, step):
        last = min(first + step, width)
        low = max(0, before + first - window + 1) if window else 0
        high = before + last
        at = torch.arange(before + first, high, device=query.device)[:, None]
        seen = torch.arange(low, high, device=query.device)
        hidden = seen > at
        if window:
            hidden |= seen <= at - window  # like transformers' sliding_window_overlay: the query and w - 1 keys before it
        yield slice(first, last), slice(low, high), hidden


def _piece_scores(query: Tensor, key: Tensor, piece: _Piece, form: AttentionForm) -> tuple[Tensor, Tensor | None]:
    """Return the scores of a piece, float32 [n, G, H / G, queries, keys], and the derivative of the cap."""
    queries, keys, hidden = piece
    q = _by_key_head(query, key)[:, :, :, queries]
    z, bend = _cap_scores(_times(q, key[:, :, keys].transpose(-1, -2)).mul_(form.scale), form.cap)
    return z.masked_fill_(hidden, float("-inf")), bend


def _cap_scores(z: Tensor, cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Compute cap tanh(z / cap) in place, and its derivative."""
    if cap is None:
        return z, None
    z = z.div_(cap).tanh_()
    bend = z.square().neg_().add_(1.0)
    return z.mul_(cap), bend


def _sums(z: Tensor, sinks: Tensor | None, key: Tensor) -> Tensor:
    """Return log(sum of e^z over the keys, plus e^s of each head's sink): [n, G, H / G, queries]."""
    lse = torch.logsumexp(z, dim=-1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.float().view(1, key.shape[1], -1, 1))


def _by_key_head(tensor: Tensor, key: Tensor) -> Tensor:
    """View [n, H, ...] as [n, G, H / G, ...], by key head."""
    return tensor.view(len(tensor), key.shape[1], -1, *tensor.shape[2:])


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [n, G, r, a, b] by [n, G, b, c] in float32; the r query heads of a key head are rows of one product."""
    rows, groups, heads, steps, inner = left.shape
    flat = left.reshape(rows * groups, heads * steps, inner)
    return _product(flat, right.reshape(rows * groups, inner, -1)).view(rows, groups, heads, steps, -1)


def _sum_products(left: Tensor, right: Tensor) -> Tensor:
    """Sum the products of [n, G, r, a, b] and [n, G, r, a, c] over r and a: float32 [n, G, b, c]."""
    rows, groups, heads, steps, inner = left.shape
    flat = left.reshape(rows * groups, heads * steps, inner).transpose(1, 2)
    return _product(flat, right.reshape(rows * groups, heads * steps, -1)).view(rows, groups, inner, -1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    # In half precision a score of 50 would be rounded by 0.1 before exponentiation.
    if left.dtype == torch.float32:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
