"""Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): the ranks of a group split the tokens
of a micro-batch; around attention, an all-to-all turns a split over tokens into a split over heads and back.

Every rank of the group gets the whole micro-batch as input, computes its slice of the tokens, and receives the
logprobs of all tokens; so the loss is the same on every rank, and its gradient flows back to each rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from agentrl.errors import ModelError


class _AllToAll(torch.autograd.Function):
    """[parts, ...] -> [parts, ...]: part i goes to rank i. It is its own inverse, so its backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grads[0], ctx.group), None


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    given = parts.contiguous()
    out = torch.empty_like(given)  # like the contiguous copy: the collective fills memory in order, whatever the strides
    dist.all_to_all_single(out, given, group=group)
    return out


class _Gather(torch.autograd.Function):
    """[m] -> the ranks' [m_i], one after the other. Every rank computes the same loss from the result, so
    the gradient of a rank's own part is that part of its gradient, not a sum over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        # Padded to equal lengths, which all_gather requires; and never empty, since a rank may have no chosen token.
        rank, width = dist.get_rank(group), max(max(counts), 1)
        padded = own.new_zeros(width)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        ctx.part = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.part], None, None


class _Sum(torch.autograd.Function):
    """The same tensor; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Ulysses:
    """One rank's view of its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def slice_of(self, tokens: int) -> slice:
        """This rank's slice of `tokens` tokens (a multiple of the group's size)."""
        share = tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def to_heads(self, local: Tensor) -> Tensor:
        """[T / size, H, D] of this rank's tokens -> [T, H / size, D] of this rank's heads."""
        tokens, heads, width = local.shape
        if heads % self.size:
            raise ModelError(f"{heads} attention heads cannot be shared by sequence_parallel={self.size} ranks")
        # A rank gets heads that follow one another, of keys as of queries: with grouped-query attention its query heads then
        # find their own key heads.
        parts = local.reshape(tokens, self.size, heads // self.size, width).transpose(0, 1).contiguous()
        out = self._exchange(parts)
        return out.reshape(self.size * tokens, heads // self.size, width)

    def to_tokens(self, local: Tensor) -> Tensor:
        """Inverse of `to_heads`."""
        tokens, heads, width = local.shape
        parts = local.reshape(self.size, tokens // self.size, heads, width)
        out = self._exchange(parts)
        return out.transpose(0, 1).reshape(tokens // self.size, self.size * heads, width)

    def gather(self, own: Tensor, counts: list[int]) -> Tensor:
        """The values of all ranks in rank order, `counts[i]` of them from rank i."""
        call: Callable[..., Tensor] = _Gather.apply
        return call(own, counts, self.group)

    def _exchange(self, parts: Tensor) -> Tensor:
        call: Callable[..., Tensor] = _AllToAll.apply
        return call(parts, self.group)

    def summed(self, whole: Tensor) -> Tensor:
        """A tensor that all ranks hold whole, of which each uses a part: its gradient is the sum of theirs. One that the ranks
        hold in parts (a DTensor) is gathered."""
        if isinstance(whole, DTensor):
            return whole.full_tensor(grad_placements=[Partial()])
        call: Callable[..., Tensor] = _Sum.apply
        return call(whole, self.group)


@dataclass(frozen=True, slots=True)
class _WholeHead:
    """An output embedding, gathered."""

    weight: Tensor
    bias: Tensor | None


def divided(
    compute: Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    group: Ulysses | None,
) -> tuple[Tensor, Tensor]:
    """`compute(hidden [M, E], head, targets [M])`, two results [M], with the tokens divided over a group whose ranks all have
    `hidden` and `targets`; `head`: an output embedding (`weight` [V, E] and `bias`). Each rank gathers it, as FSDP2 does
    anyway, and computes its part of the tokens. The alternative, to split the vocabulary, needs sums over the ranks for each
    chunk of tokens, and a form of its own for each kind of logits."""
    if group is None:
        return compute(hidden, head, targets)
    counts = [len(part) for part in torch.arange(len(targets)).tensor_split(group.size)]
    part = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
    whole = _WholeHead(group.summed(head.weight), None if head.bias is None else group.summed(head.bias))
    own = compute(group.summed(hidden)[part], whole, targets[part])
    return group.gather(own[0], counts), group.gather(own[1], counts)
