"""Parallelism within a model: sequence parallelism (Ulysses), the door to others, and the layout of a pass's rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from agentrl.config.schema import ModelConfig
from agentrl.utils.errors import ConfigError, ModelError
from agentrl.utils.registry import Registry

# The layout of rows

_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)
layout: Callable[[], Any] = _LAYOUT.get
"""The layout (PackedSequences) of the pass that is under way in this thread; None outside of `laid_out`."""


@contextmanager
def laid_out(packed: Any) -> Iterator[None]:
    """In this context `layout` returns `packed`."""
    token = _LAYOUT.set(packed)
    try:
        yield
    finally:
        _LAYOUT.reset(token)


def same_when_recomputed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of torch.utils.checkpoint, called in the forward pass: what it computes again has that pass's layout, also in
    another thread (the backward passes of GPUs have threads of their own)."""
    return nullcontext(), laid_out(layout())


@cache
def parameters_of(kind: Any) -> tuple[frozenset[str], bool]:
    """The names of a forward's parameters, and whether it takes others too."""
    found = inspect.signature(kind.forward).parameters
    return frozenset(found), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


# Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): the ranks of a group split the tokens
# of a micro-batch; around attention, an all-to-all turns a split over tokens into a split over heads and back.
#
# Every rank of the group gets the whole micro-batch as input, computes its slice of the tokens, and receives the
# logprobs of all tokens; so the loss is the same on every rank, and its gradient flows back to each rank's slice.


class _AllToAll(torch.autograd.Function):
    """[parts, ...] -> [parts, ...]: part i goes to rank i. It is its own inverse, so its backward pass is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        out = torch.empty_like(given)  # like the contiguous copy: the collective fills memory in order, whatever the strides
        dist.all_to_all_single(out, given, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


_all_to_all: Callable[..., Tensor] = _AllToAll.apply


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
        return _all_to_all(parts, self.group).reshape(self.size * tokens, heads // self.size, width)

    def to_tokens(self, local: Tensor) -> Tensor:
        """Inverse of `to_heads`."""
        tokens, heads, width = local.shape
        parts = local.reshape(self.size, tokens // self.size, heads, width)
        return _all_to_all(parts, self.group).transpose(0, 1).reshape(tokens // self.size, self.size * heads, width)

    def gather(self, own: Tensor, counts: list[int]) -> Tensor:
        """The values of all ranks in rank order, `counts[i]` of them from rank i."""
        # Padded to equal lengths, which all_gather requires; and never empty, since a rank may have no chosen token.
        padded = own.new_zeros(max(*counts, 1))
        padded[: len(own)] = own.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        found = [part[:count] for part, count in zip(parts, counts, strict=True)]
        # Every rank computes the same loss from all of them, so its own part alone has a gradient, which is no sum over ranks.
        found[self.rank] = own
        return torch.cat(found)

    def sum_gradient(self, whole: Tensor) -> Tensor:
        """A tensor that all ranks hold whole and use in part: its gradient is the sum of theirs. One that the ranks
        hold in parts (a DTensor) is gathered."""
        if isinstance(whole, DTensor):
            return whole.full_tensor(grad_placements=[Partial()])

        def add_up(gradient: Tensor) -> Tensor:
            total = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            return total

        found = whole.view_as(whole)
        if found.requires_grad:
            found.register_hook(add_up)  # type: ignore[no-untyped-call]
        return found


def compute_divided(
    compute: Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    group: Ulysses,
) -> tuple[Tensor, Tensor]:
    """`compute(hidden [M, E], head, targets [M])`, two results [M], with the tokens divided over a group whose ranks all have
    `hidden` and `targets`; `head`: an output embedding (`weight` [V, E] and `bias`). Each rank gathers it, as FSDP2 does
    anyway, and computes its part of the tokens. The alternative, to split the vocabulary, needs sums over the ranks for each
    chunk of tokens, and a form of its own for each kind of logits."""
    counts = [len(part) for part in torch.arange(len(targets)).tensor_split(group.size)]
    part = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
    bias = None if head.bias is None else group.sum_gradient(head.bias)
    whole = SimpleNamespace(weight=group.sum_gradient(head.weight), bias=bias)
    own = compute(group.sum_gradient(hidden)[part], whole, targets[part])
    return group.gather(own[0], counts), group.gather(own[1], counts)


# Tensor and expert parallelism


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a parameter: `shape` after tensor and expert parallelism; FSDP2 shards its dimension `along` over
    `shards` ranks."""

    shape: tuple[int, ...]
    along: int
    shards: int

    @property
    def whole(self) -> int:
        """Numbers of it while FSDP2 has gathered it."""
        return math.prod(self.shape)

    @property
    def most(self) -> int:
        """Numbers on the rank that holds the most: equal pieces, the last ones shorter."""
        length = self.shape[self.along] if self.shape else 1
        return math.ceil(length / self.shards) * (self.whole // max(length, 1))


@dataclass(frozen=True, slots=True)
class SplitCode:
    """Code that splits transformers' models over ranks by matrices and by experts."""

    check: Callable[[ModelConfig, Any, int], None]
    """Raises ConfigError if a model on the meta device cannot be split over that many ranks as the config says."""
    split: Callable[[Any, DeviceMesh | None, DeviceMesh | None], list[nn.Module]]
    """Splits a model on the meta device over the meshes of "tp" and "ep"; returns the experts that each rank has others of."""
    shares: Callable[[Any, ModelConfig, int], dict[str, Share]]
    """Each rank's share of each parameter, by name, of a model on the meta device, adapters included."""
    expert_dimension: Callable[[tuple[int, ...], int, int], int | None]
    """(shape, expert parallelism, shards) -> dimension along which FSDP2 shards experts; None if no dimension divides."""


SPLITS: Registry[Callable[[], SplitCode]] = Registry("model.tensor_parallel", "SPLITS", "agentrl.trainer")
PLANS = "plans"
"""Name of the code that splits models by transformers' plans."""


def split_code() -> SplitCode:
    """The code that splits models. Raises ConfigError if agentrl.contrib.split is missing."""
    if PLANS not in SPLITS:
        keys = "model.tensor_parallel, model.expert_parallel"
        raise ConfigError(f"{keys}: agentrl.contrib.split is missing. Install it, or set the keys to 1")
    return SPLITS.entry(PLANS).make()
