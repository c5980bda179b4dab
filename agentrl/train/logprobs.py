"""Log-probabilities and entropies of tokens without ever holding the logits of more than one chunk.

The logits of T tokens over a vocabulary of V are T x V numbers; here they exist for `CHUNK` tokens at a
time, in the forward pass and again in the backward pass, which recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# With a vocabulary of 150,000, the float32 logits of a chunk take 0.6 GB. Shorter chunks save memory and make the product
# slower.
CHUNK = 1024


def shaped(logits: Tensor, bias: Tensor | None, cap: float | None) -> Tensor:
    """cap tanh((logits + bias) / cap), in float32; without a cap logits + bias. Overwrites float32 logits."""
    z = logits.float()
    if bias is not None:
        z = z.add_(bias)
    return z if cap is None else z.div_(cap).tanh_().mul_(cap)


def summary(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool, bias: Tensor | None = None, cap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a chunk's products [M, V] at that temperature, float32 [M] each: logsumexp, the target's, and H, or 0 if not wanted.

    Overwrites float32 products, as `slope` does.
    """
    z = shaped(logits, bias, cap).div_(temperature)
    lse = torch.logsumexp(z, dim=-1)
    chosen = z.gather(1, targets[:, None]).squeeze(1)
    if not entropy:
        return lse, chosen, torch.zeros_like(lse)
    p = (z - lse[:, None]).exp_()
    return lse, chosen, lse - p.mul_(z).sum(-1)


def slope(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    spread: Tensor,
    grads: tuple[Tensor, Tensor | None],
    temperature: float,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The gradient for a chunk's products, [M, V] in their dtype; `grads` are those of log p and H."""
    of_logprob, of_entropy = grads
    z = shaped(logits, bias, cap)
    bend = None if cap is None else z.div(cap).square_().neg_().add_(1.0)  # the derivative of cap tanh(x / cap)
    log_p = z.div_(temperature).sub_(lse[:, None])
    scale = -of_logprob[:, None]
    # dz reuses the memory of p: arrays of the size of a chunk's logits are what the peak memory consists of.
    if of_entropy is None:
        dz = log_p.exp_().mul_(scale)
    else:
        dz = torch.exp(log_p).mul_(scale - of_entropy[:, None] * (log_p + spread[:, None]))
    dz.scatter_add_(1, targets[:, None], of_logprob[:, None])
    if bend is not None:
        dz.mul_(bend)
    return dz.div_(temperature).to(logits.dtype)


@dataclass(frozen=True, slots=True)
class HeadKernels:
    """`summary` and `slope`, or compiled forms of them. As they are, each operation reads and writes all of a chunk's float32
    logits: on a GPU that takes longer than the products."""

    summary: Callable[..., tuple[Tensor, Tensor, Tensor]] = summary
    slope: Callable[..., Tensor] = slope


PLAIN = HeadKernels()


class _ChunkedLogprobs(torch.autograd.Function):
    """With x = h W^T + b and z = x / temperature: log p(y) = z_y - lse(z), H = lse(z) - sum p z.

    d log p(y) / dz = onehot(y) - p;  dH / dz = -p (log p + H). With a cap c, z = c tanh(x / c) / temperature and
    dz / dx = (1 - tanh^2(x / c)) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy: bool,
        kernels: HeadKernels,
        bias: Tensor | None,
        cap: float | None,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        lse = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        chosen, spread = torch.empty_like(lse), torch.empty_like(lse)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            lse[part], chosen[part], spread[part] = kernels.summary(logits, targets[part], temperature, entropy, bias, cap)
        ctx.save_for_backward(hidden, weight, targets, lse, spread, bias)
        ctx.temperature, ctx.chunk, ctx.kernels, ctx.cap = temperature, chunk, kernels, cap
        ctx.set_materialize_grads(False)  # entropies that are only measured have no gradient, and cost nothing then
        return chosen - lse, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, spread, bias = ctx.saved_tensors
        grad_logprob = torch.zeros_like(lse) if grads[0] is None else grads[0]
        grad_entropy = grads[1]
        grad_hidden = torch.empty_like(hidden)
        train_weight = ctx.needs_input_grad[1]
        # float32, because it is summed over chunks: in bfloat16 the terms of late chunks would be lost to rounding.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[7] else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            asked = (grad_logprob[part], None if grad_entropy is None else grad_entropy[part])
            logits = hidden[part] @ weight.t()
            dz = ctx.kernels.slope(logits, targets[part], lse[part], spread[part], asked, ctx.temperature, bias, ctx.cap)
            grad_hidden[part] = dz @ weight
            if grad_weight is not None:
                grad_weight.add_(dz.t() @ hidden[part])
            if grad_bias is not None:
                grad_bias.add_(dz.sum(0, dtype=torch.float32))
        head = None if grad_weight is None else grad_weight.to(weight.dtype)
        offset = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, head, None, None, None, None, None, offset, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int = CHUNK,
    entropy: bool = True,
    kernels: HeadKernels = PLAIN,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(z / temperature) of the targets, and the entropies of those distributions; z = hidden W^T + bias, or with
    a cap c: z = c tanh((hidden W^T + bias) / c). A scale of the logits is one of the temperature, the bias and the cap (head.py).

    `hidden` [M, E], `weight` [V, E], `bias` [V], `targets` int64 [M] -> two float32 tensors [M], both with gradient;
    the entropies are zeros if `entropy` is False.
    """
    call: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    return call(hidden, weight, targets, temperature, chunk, entropy, kernels, bias, cap)
