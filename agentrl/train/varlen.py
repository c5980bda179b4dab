"""FlashAttention over packed rows, by torch's varlen kernel: half precision on a GPU, without padding and without blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from agentrl.backends.attention_form import AttentionForm
from agentrl.batch.prefix_attention import same_width


def varlen_takes(width: int) -> bool:
    """Whether the varlen kernel, FlashAttention's, takes heads of that dimension. It pads no others, as the kernels for blocks
    do."""
    return width % 8 == 0 and width <= 256


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, form: AttentionForm) -> Tensor:
    """[T, H, D], [T, G, D], [T, G, E] -> [T, H, E] within the rows that `cu` int32 [N + 1] delimits, of at most `longest` tokens.
    The form has no cap."""
    from torch.nn.attention.varlen import varlen_attn

    wide = v.shape[2]
    q, k, v = same_width(q, k, v)
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if varlen_takes_groups():
            grouped = {"enable_gqa": True}
        else:
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    # The kernel counts how far back a query looks, itself not included; -1: any distance. None ahead, which is causal.
    back = -1 if form.window is None or form.window >= longest else form.window - 1
    if form.sinks is None:
        out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=form.scale, window_size=(back, 0), **grouped)
        assert isinstance(out, Tensor)
        return out[..., :wide]
    call: Callable[..., Tensor] = WithSinks.apply
    return call(q, k, v, form.sinks, _kernel(cu, longest, form.scale, back, grouped))[..., :wide]


@cache
def varlen_takes_groups() -> bool:
    """Whether this torch's kernel takes fewer key heads than query heads; torch 2.11's does not say that it does."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's two passes: (q, k, v) -> out [T, H, D] and the lse of the scores, float32 [H, T]; and (gradient of out, q, k, v,
    out, lse) -> the gradients of q, k and v."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class WithSinks(torch.autograd.Function):
    """Attention whose softmax has a sink s a head: out' = out e^(lse - lse'), lse' = log(e^lse + e^s).

    A kernel's backward pass takes p = e^(score - lse) and do . o from what it is given, so that with out' and lse' in their
    place it computes the gradients of attention with sinks. Those of the sinks are - sum of e^(s - lse') (do . o').
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        plain, lse = kernel.forward(q, k, v)
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = (plain * torch.exp(lse - total).t().unsqueeze(-1)).to(plain.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, total = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = ctx.kernel.backward(grad, q, k, v, out, total)
        drop = (grad.float() * out.float()).sum(-1).t()
        d_sinks = -(torch.exp(sinks.float()[:, None] - total) * drop).sum(1)
        return dq, dk, dv, d_sinks.to(sinks.dtype), None


def _kernel(cu: Tensor, longest: int, scale: float, back: int, grouped: dict[str, Any]) -> Kernel:
    """The two passes of torch's kernel as the operators that `varlen_attn` is made of, which alone give and take lse."""
    rows: dict[str, Any] = {"cu_seq_q": cu, "cu_seq_k": cu, "max_q": longest, "max_k": longest}
    seen: dict[str, Any] = {"is_causal": back == -1, "scale": scale, "window_size": [back, 0]}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.ops.torch_attn._varlen_attn(q, k, v, **rows, **seen, **grouped)
        return found[0], found[1]

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is not
        op = torch.ops.torch_attn._varlen_attn_backward
        found: tuple[Tensor, Tensor, Tensor] = op(grad, q, k, v, out, lse, **rows, **seen, rng_state=state)
        return found

    return Kernel(forward, backward)
