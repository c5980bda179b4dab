"""The routers of a policy that is trained: they repeat what the engine chose, and it is counted how evenly experts are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.experts import Load, Routers
from agentrl.train.families.layout import layout
from agentrl.train.modules import Micro
from agentrl.train.ulysses import Ulysses


class Routing:
    """One rank's routers. Make it of the transformers model before adapters and shards wrap its modules."""

    def __init__(self, model: nn.Module, group: Ulysses | None) -> None:
        """`group`: the ranks that share tokens."""
        self._routers, self._group = Routers(model, _asked), group
        self._load = Load(self._routers)

    @contextmanager
    def passing(self, micro: Micro) -> Iterator[None]:
        """Around a forward pass over `micro`, as the caller gave it. Passes with gradient are counted, unless nothing in them is
        trained, as in the dummy of a rank that has no more rows. Raises ModelError if choices to repeat do not fit the model."""
        if micro.experts is not None:
            if not len(self._routers):
                raise ModelError(
                    "choices of experts are to be repeated by a model without routers; set rollout.router_replay = false"
                )
            self._routers.check(micro.experts)
        if len(self._routers) and torch.is_grad_enabled() and len(micro.targets):
            # A shared prefix counts for each of its rows: how often it is computed hangs on ranks and micro-batches.
            own = own_tokens(len(micro.input_ids), self._group)
            times = None if micro.row_counts is None else micro.row_counts[own]
            with self._load.counting(own.stop - own.start, times):
                yield
        else:
            yield

    def take_load(self) -> Tensor | None:
        """How often each expert was chosen since the last call: float64 [routers, experts] on the host, over the ranks that share
        tokens; None for a dense model."""
        if not len(self._routers):
            return None
        counts, self._load.counts = self._load.counts, None
        if counts is None:
            counts = torch.zeros(len(self._routers), self._routers.experts, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(counts, group=self._group.group)
        return counts.cpu()


def _asked() -> Tensor | None:
    """What the pass that is under way, or computed again, asks of the routers."""
    packed = layout()
    return None if packed is None else packed.experts


def own_tokens(tokens: int, group: Ulysses | None) -> slice:
    """Which of a micro-batch's tokens are computed on this rank; what pads its share comes after them."""
    if group is None:
        return slice(0, tokens)
    local = group.slice_of(tokens + -tokens % group.size)
    return slice(min(tokens, int(local.start)), min(tokens, int(local.stop)))
