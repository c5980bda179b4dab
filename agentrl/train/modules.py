"""The modules that an engine shards: a language model that answers with logprobs, never with logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.train.attention import Packed, packed_rows
from agentrl.train.logprobs import token_logprobs
from agentrl.train.ulysses import Ulysses


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
        places, group = micro.places, micro.packed.ulysses
        hidden, first = backbone_states(self.hf.base_model, micro)
        counts = [len(places)]
        if group is not None:
            share = len(hidden)
            owner = (places - 1) // share
            counts = torch.bincount(owner, minlength=group.size).tolist()
            places = places[owner == group.rank]
        before = hidden.index_select(0, places - 1 - first)
        weight = self.hf.get_output_embeddings().weight.to(before.dtype)
        targets = micro.input_ids.index_select(0, places)
        own = token_logprobs(before, weight, targets, temperature, entropy=entropy)
        if group is None:
            return own
        return group.gather(own[0], counts), group.gather(own[1], counts)


class ValueModule(nn.Module):
    """A transformer with a linear value head; its forward gives the value before each chosen token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: Micro) -> Tensor:
        """Values of the states in which the tokens at `micro.places` were chosen: float32 [M]."""
        if micro.packed.ulysses is not None:
            raise ModelError("a critic does not work with model.sequence_parallel above 1")
        hidden, _ = backbone_states(self.hf, micro)
        before = hidden.index_select(0, micro.places - 1)
        values: Tensor = self.head(before).squeeze(1).float()
        return values


class ScoreModule(nn.Module):
    """A sequence classifier with one label; its forward gives the score of each row, read at its last token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        if not isinstance(getattr(model, "score", None), nn.Linear) or model.score.out_features != 1:
            raise ModelError(
                "a reward model is a sequence classifier with a linear head `score` of one label"
            )

    def forward(self, micro: Micro) -> Tensor:
        """Scores float32 [N]."""
        hidden, _ = backbone_states(self.hf.base_model, micro)
        last: Tensor = self.hf.score(hidden.index_select(0, micro.offsets[1:] - 1))
        return last.squeeze(1).float()


def backbone_states(backbone: Any, micro: Micro) -> tuple[Tensor, int]:
    """Last hidden states of packed rows [T, E] and 0; or of this rank's share of the tokens, padding of the
    last one included, and the number of its first token."""
    ids, places, first = micro.input_ids, micro.position_ids, 0
    if micro.packed.ulysses is not None:
        mine = micro.packed.ulysses.slice_of(len(ids))
        ids, places, first = ids[mine], places[mine], mine.start
    out = backbone(
        input_ids=ids[None],
        position_ids=places[None],
        attention_mask=None,
        use_cache=False,
        packed=micro.packed,
    )
    return out.last_hidden_state[0], first


def shared(micro: Micro, group: Ulysses) -> Micro:
    """The micro-batch for a group that shares its tokens: padded to a multiple of the group's size by a
    row of its own, which no other row sees."""
    missing = -len(micro.input_ids) % group.size
    offsets = micro.offsets
    if missing:
        offsets = torch.cat([offsets, offsets[-1:] + missing])
    pad = micro.input_ids.new_zeros(missing)
    packed = replace(packed_rows(offsets), ulysses=group)
    return Micro(
        torch.cat([micro.input_ids, pad]),
        torch.cat([micro.position_ids, torch.arange(missing, device=pad.device)]),
        micro.offsets,
        packed,
        micro.places,
    )


def positions(offsets: Tensor) -> Tensor:
    """Position of each token in its row: int64 [T]."""
    total = int(offsets[-1])
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(total, device=offsets.device) - starts
