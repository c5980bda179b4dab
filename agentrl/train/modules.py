"""The modules that an engine shards: a language model that answers with logprobs, never with logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.train.attention import Packed
from agentrl.train.logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class Micro:
    """The model's input for one micro-batch of T tokens in N rows.

    `input_ids`, `position_ids` int64 [T]; `offsets` int64 [N + 1]; `packed` the layout for attention;
    `places` int64 [M]: positions of the tokens whose logprobs are wanted (never the first of a row).
    """

    input_ids: Tensor
    position_ids: Tensor
    offsets: Tensor
    packed: Packed
    places: Tensor


class PolicyModule(nn.Module):
    """A causal language model; its forward gives log pi and entropy of chosen tokens.

    The head is applied inside this module's forward, where a sharded weight is whole.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        head = model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ModelError("the model needs an output embedding without a bias")
        text = model.config.get_text_config()
        if getattr(text, "final_logit_softcapping", None):
            raise ModelError("models that cap their logits (final_logit_softcapping) are not supported")

    def forward(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """log pi and entropies of the tokens at `micro.places`: two float32 [M]."""
        hidden = backbone_states(self.hf.base_model, micro)
        before = hidden.index_select(0, micro.places - 1)
        targets = micro.input_ids.index_select(0, micro.places)
        weight = self.hf.get_output_embeddings().weight
        return token_logprobs(before, weight.to(before.dtype), targets, temperature, entropy=entropy)


class ValueModule(nn.Module):
    """A transformer with a linear value head; its forward gives the value before each chosen token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: Micro) -> Tensor:
        """Values of the states in which the tokens at `micro.places` were chosen: float32 [M]."""
        before = backbone_states(self.hf, micro).index_select(0, micro.places - 1)
        values: Tensor = self.head(before).squeeze(1).float()
        return values


def backbone_states(backbone: Any, micro: Micro) -> Tensor:
    """Last hidden states [T, E] of packed rows."""
    out = backbone(
        input_ids=micro.input_ids[None],
        position_ids=micro.position_ids[None],
        attention_mask=None,
        use_cache=False,
        packed=micro.packed,
    )
    states: Tensor = out.last_hidden_state[0]
    return states


def positions(offsets: Tensor) -> Tensor:
    """Position of each token in its row: int64 [T]."""
    total = int(offsets[-1])
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(total, device=offsets.device) - starts
