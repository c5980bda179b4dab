"""Log-probabilities and entropies of tokens without ever holding the logits of more than one chunk.

The logits of T tokens over a vocabulary of V are T x V numbers; here they exist for `CHUNK` tokens at a
time, in the forward pass and again in the backward pass, which recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# With a vocabulary of 150,000, the float32 logits of a chunk take 0.6 GB. Shorter chunks save memory and make the product
# slower.
CHUNK = 1024


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = h W^T / temperature: log p(y) = z_y - lse(z), H = lse(z) - sum p z.

    d log p(y) / dz = onehot(y) - p;  dH / dz = -p (log p + H).
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
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        lse = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        chosen, spread = torch.empty_like(lse), torch.zeros_like(lse)
        for start in range(0, tokens, chunk):
            part = slice(start, start + chunk)
            z = (hidden[part] @ weight.t()).float().div_(temperature)
            lse[part] = torch.logsumexp(z, dim=-1)
            chosen[part] = z.gather(1, targets[part, None]).squeeze(1)
            if entropy:
                p = torch.exp(z - lse[part, None])
                spread[part] = lse[part] - p.mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, lse, spread)
        ctx.temperature, ctx.chunk, ctx.entropy = temperature, chunk, entropy
        return chosen - lse, spread

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, targets, lse, spread = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        train_weight = ctx.needs_input_grad[1]
        # float32, because it is summed over chunks: in bfloat16 the terms of late chunks would be lost to rounding.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if train_weight else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z = (hidden[part] @ weight.t()).float().div_(ctx.temperature)
            log_p = z.sub_(lse[part, None])
            p = torch.exp(log_p)
            # dz reuses the memory of `p`: arrays of the size of a chunk's logits are what the peak memory consists of.
            scale = -grad_logprob[part, None]
            if ctx.entropy:
                scale = scale - grad_entropy[part, None] * (log_p + spread[part, None])
            dz = p.mul_(scale)
            dz.scatter_add_(1, targets[part, None], grad_logprob[part, None])
            dz = dz.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = dz @ weight
            if grad_weight is not None:
                grad_weight.add_(dz.t() @ hidden[part])
        head = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, head, None, None, None, None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    chunk: int = CHUNK,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden W^T / temperature) of the targets, and the entropies of those distributions.

    `hidden` [M, E], `weight` [V, E], `targets` int64 [M] -> two float32 tensors [M], both with gradient;
    the entropies are zeros if `entropy` is False.
    """
    call: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    return call(hidden, weight, targets, temperature, chunk, entropy)
