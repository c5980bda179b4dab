"""Parallelism within a model: the layout of a pass's rows, Ulysses, and the registry of tensor and expert parallelism."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
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
from agentrl.utils.threads import setting

# The layout of rows

_LAYOUT: ContextVar[Any] = ContextVar("layout", default=None)
layout: Callable[[], Any] = _LAYOUT.get
"""`layout()` -> PackedSequences of this thread's current pass; None outside of `use_layout`."""


use_layout: Callable[[Any], AbstractContextManager[None]] = partial(setting, _LAYOUT)
"""`use_layout(packed)` makes `layout` return `packed` within its context."""


def recompute_layout() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of forward pass and recomputation, as `context_fn` of torch.utils.checkpoint.

    The recomputation has the layout of the forward pass, even in another thread (GPU backward passes have their own)."""
    return nullcontext(), use_layout(layout())


@cache
def parameters_of(kind: Any) -> tuple[frozenset[str], bool]:
    """Return the parameter names of a class's forward, and True if it also takes **kwargs."""
    found = inspect.signature(kind.forward).parameters
    return frozenset(found), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


# Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509): the ranks of a group split the tokens
# of a micro-batch; around attention, an all-to-all turns a split over tokens into a split over heads and back.
#
# Every rank of the group gets the whole micro-batch, computes its slice of the tokens, and receives the logprobs
# of all tokens: the loss is equal on all ranks, and its gradient flows to each slice.


class _AllToAll(torch.autograd.Function):
    """[parts, ...] -> [parts, ...]: part i goes to rank i. The exchange is its own inverse and its own backward pass."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        out = torch.empty_like(given)  # contiguous too: the collective fills memory in order and ignores strides
        dist.all_to_all_single(out, given, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


_all_to_all: Callable[..., Tensor] = _AllToAll.apply


class Ulysses:
    """One rank's view of the group that shares its tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def slice_of(self, tokens: int) -> slice:
        """Return this rank's slice of `tokens` tokens (a multiple of the group size)."""
        share = tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def to_heads(self, local: Tensor) -> Tensor:
        """Exchange tokens [T / size, H, D] for heads [T, H / size, D]. Raises ModelError if size does not divide H."""
        tokens, heads, width = local.shape
        if heads % self.size:
            raise ModelError(f"{heads} attention heads cannot be shared by sequence_parallel={self.size} ranks")
        # A rank gets consecutive heads of queries and of keys: with grouped-query attention these belong together.
        parts = local.reshape(tokens, self.size, heads // self.size, width).transpose(0, 1).contiguous()
        return _all_to_all(parts, self.group).reshape(self.size * tokens, heads // self.size, width)

    def to_tokens(self, local: Tensor) -> Tensor:
        """Exchange this rank's heads for its tokens, the inverse of `to_heads`."""
        tokens, heads, width = local.shape
        parts = local.reshape(self.size, tokens // self.size, heads, width)
        return _all_to_all(parts, self.group).transpose(0, 1).reshape(tokens // self.size, self.size * heads, width)

    def gather(self, own: Tensor, counts: list[int]) -> Tensor:
        """Gather the values of all ranks in rank order, `counts[i]` from rank i; only this rank's have a gradient."""
        # Padded to equal lengths, as all_gather requires, and to at least 1, as a rank may have no value.
        padded = own.new_zeros(max(*counts, 1))
        padded[: len(own)] = own.detach()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.group)
        found = [part[:count] for part, count in zip(parts, counts, strict=True)]
        # Every rank computes the same loss from all values; the gradient of its own part must not be summed over ranks.
        found[self.rank] = own
        return torch.cat(found)

    def sum_gradient(self, whole: Tensor) -> Tensor:
        """Sum the gradient of a full tensor over ranks that use parts of it. A DTensor is gathered first."""
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
    compute: Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]], hidden: Tensor, head: Any, targets: Tensor, group: Ulysses
) -> tuple[Tensor, Tensor]:
    """Run `compute(hidden [M, E], head, targets [M])` with the tokens divided over a group: two results [M].

    All ranks have `hidden` and `targets`. `head`: an output embedding (`weight` [V, E] and `bias`), which each rank gathers, as
    FSDP2 does anyway. Splitting the vocabulary instead would need sums over ranks for each chunk of tokens, and a separate
    implementation for each kind of logits."""
    counts = [len(part) for part in torch.arange(len(targets)).tensor_split(group.size)]
    part = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
    bias = None if head.bias is None else group.sum_gradient(head.bias)
    whole = SimpleNamespace(weight=group.sum_gradient(head.weight), bias=bias)
    own = compute(group.sum_gradient(hidden)[part], whole, targets[part])
    return group.gather(own[0], counts), group.gather(own[1], counts)


# Tensor and expert parallelism


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a parameter: `shape` after tensor and expert parallelism, sharded by FSDP2.

    FSDP2 shards dimension `along` over `shards` ranks."""

    shape: tuple[int, ...]
    along: int
    shards: int

    @property
    def gathered_numel(self) -> int:
        """Return the number of elements after FSDP2's gather."""
        return math.prod(self.shape)

    @property
    def max_numel(self) -> int:
        """Return the number of elements on the rank with the most: equal pieces, the last ones shorter."""
        length = self.shape[self.along] if self.shape else 1
        return math.ceil(length / self.shards) * (self.gathered_numel // max(length, 1))


@dataclass(frozen=True, slots=True)
class SplitCode:
    """Implementation of tensor and expert parallelism for transformers models."""

    check: Callable[[ModelConfig, Any, int], None]
    """(config, model on the meta device, ranks): raises ConfigError if the model cannot be split as configured."""
    split: Callable[[Any, DeviceMesh | None, DeviceMesh | None], list[nn.Module]]
    """Splits a model on the meta device over the meshes "tp" and "ep"; returns the expert modules that differ by rank."""
    shares: Callable[[Any, ModelConfig, int], dict[str, Share]]
    """(model on the meta device, config, ranks) -> a rank's share of each parameter, by name, including adapters."""
    expert_dimension: Callable[[tuple[int, ...], int, int], int | None]
    """(shape, expert parallelism, shards) -> dimension that FSDP2 shards for experts; None if no dimension divides."""


SPLITS: Registry[Callable[[], SplitCode]] = Registry("model.tensor_parallel", "SPLITS", "agentrl.trainer")
PLANS = "plans"
"""Registered name of the implementation that uses transformers' plans."""


def split_code() -> SplitCode:
    """Return the implementation of tensor and expert parallelism. Raises ConfigError if agentrl.contrib.split is missing."""
    if PLANS not in SPLITS:
        keys = "model.tensor_parallel, model.expert_parallel"
        raise ConfigError(f"{keys}: agentrl.contrib.split is missing. Install it, or set the keys to 1")
    return SPLITS.entry(PLANS).make()
