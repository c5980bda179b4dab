"""The parts of a torchtitan model that are agentrl's: attention over packed rows, rotary embeddings as transformers defines
them, and a head that returns logprobs. Import it after `library.require_torchtitan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.module import Module

from agentrl.train.attention import PackedSequences, packed_attention
from agentrl.train.logprobs import token_logprobs
from agentrl.train.modules import Micro, shares
from agentrl.train.ulysses import Ulysses, divided


class PackedAttention(Module):
    """Causal attention within each row of `attention_masks`, which is agentrl's layout of the rows here."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    # Named as torchtitan's sharding of attention names them: batch (1), tokens, heads, width.
    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: PackedSequences, scale: float | None, **_: Any
    ) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        return packed_attention(self, q, k, v, None, packed=attention_masks, scaling=scale)[0]


class Rotary(CosSinRoPE):
    """Rotary embeddings with the frequencies that transformers computes for a model's config, scaled or not.

    torchtitan keeps angles of all positions in every layer; here they are made from the positions, as a model's context of
    128k tokens would take 128 MiB a layer. The halves of a head are rotated as in transformers, so that no weight has to be
    permuted, neither on loading nor on publishing.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        frequencies: tuple[float, ...]  # one per pair of dimensions of a head
        scale: float = 1.0

    def _precompute_cache(self) -> Tensor:
        return torch.tensor(self.config.frequencies, dtype=torch.float32, device="cpu")

    def _reshape_cache(self, query: Tensor, positions: Tensor | None = None) -> Tensor:
        assert positions is not None
        angles = positions[..., None].float() * local(self.cache)  # [1, T, D / 2]
        both = torch.cat([angles, angles], dim=-1)
        found = (torch.cat([both.cos(), both.sin()], dim=-1) * self.config.scale)[:, :, None]
        return as_replicated(found, query)


class LogprobDecoder:
    """Mixed into a torchtitan decoder: its forward returns log pi and entropy of chosen tokens.

    The head is applied inside this forward, because only there a sharded weight is gathered.
    """

    _skip_lm_head = True  # torchtitan's switch: its own forward ends with the last norm

    def forward(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """Of the tokens `micro.targets`: two float32 [M]."""
        group = micro.packed.ulysses
        part = slice(0, None) if group is None else group.slice_of(len(micro.input_ids))
        packed = micro.packed if micro.experts is None else replace(micro.packed, experts=micro.experts[part])
        model: Any = super()
        hidden = local(model.forward(micro.input_ids[None, part], micro.position_ids[None, part], packed))[0]
        head: Callable[..., tuple[Tensor, Tensor]] = self.lm_head  # type: ignore[attr-defined]
        if group is None:
            return head(hidden.index_select(0, micro.before), micro.targets, temperature, entropy)
        mine, counts, back = shares(micro.before, len(hidden), group)
        own = head(hidden.index_select(0, micro.before[mine] - part.start), micro.targets[mine], temperature, entropy)
        return group.gather(own[0], counts)[back], group.gather(own[1], counts)[back]


class LogprobHead(Linear):
    """The output embedding; its forward returns log pi and entropy of given tokens, and never all logits at once."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    tensor: Ulysses | None = None
    """The ranks of tensor parallelism, which divide the tokens among them."""

    def forward(self, input: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """`input`: hidden states [M, E], which all tensor-parallel ranks have; `targets` int64 [M] -> two float32 [M]."""

        def compute(hidden: Tensor, head: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
            return token_logprobs(hidden, head.weight.to(hidden.dtype), targets, temperature, entropy=entropy)

        return divided(compute, input, self, targets, self.tensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that tensor-parallel ranks hold alike."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_replicated(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor that all tensor-parallel ranks hold alike, as a DTensor if `like` is one."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
