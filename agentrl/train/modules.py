"""The modules that an engine shards: a language model whose outputs are logprobs, never logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.experts import free
from agentrl.images import Image
from agentrl.train.attention import PackedSequences, padded
from agentrl.train.families.layout import laid_out, taken
from agentrl.train.head import backbone, head_rule
from agentrl.train.logprobs import PLAIN
from agentrl.train.ulysses import Ulysses, divided
from agentrl.vision import PackedImages, Vision, embedded, features_of, seen_of


@dataclass(frozen=True, slots=True)
class Micro:
    """The model's input for one micro-batch of N rows, of which T tokens are computed.

    `input_ids`, `position_ids` int64 [T]; `packed` is the layout for attention. For the M tokens whose logprobs
    are wanted (never the first of a row), `targets` int64 [M] are the ids and `before` int64 [M] the positions
    of the tokens that predict them; `last` int64 [N] are the positions of the rows' last tokens. Rows that
    share a prefix share its positions. `experts` [T, routers, k]: the experts that the tokens are to go to (experts.py), None:
    all are sent by the routers. `row_counts` int64 [T]: of how many rows each token is, None: of one. `images`: where each row
    begins and ends, and its images; `seen`: the same for a model that takes images (`with_images`), whose `position_ids` are
    int64 [3, T].
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSequences
    before: Tensor
    targets: Tensor
    last: Tensor
    experts: Tensor | None = None
    row_counts: Tensor | None = None
    images: tuple[tuple[int, int, tuple[Image, ...]], ...] = ()
    seen: PackedImages | None = None


class PolicyModule(nn.Module):
    """A causal language model; its forward returns log pi and entropy of chosen tokens.

    The head is applied inside this module's forward, because only there a sharded weight is gathered.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        self.kernels = PLAIN
        self.rule = head_rule(model)
        self.tensor: Ulysses | None = None  # the ranks of tensor parallelism, which share the tokens of the head

    def forward(self, micro: Micro, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
        """log pi and entropies of the tokens `micro.targets`: two float32 [M]."""
        indices, targets, group = micro.before, micro.targets, micro.packed.ulysses
        hidden, first = backbone_states(backbone(self.hf), micro)
        if group is not None:
            local, counts, back = shares(indices, len(hidden), group)
            indices, targets = indices[local], targets[local]
        before = hidden.index_select(0, indices - first)
        compute = partial(self.rule.logprobs, temperature=temperature, entropy=entropy, kernels=self.kernels)
        own = divided(compute, before, self.hf.get_output_embeddings(), targets, self.tensor)
        if group is None:
            return own
        return group.gather(own[0], counts)[back], group.gather(own[1], counts)[back]


class ValueModule(nn.Module):
    """A transformer with a linear value head; its forward returns the value before each chosen token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = backbone(model)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        # Zeros, so that a new critic starts from value 0 instead of noise in the first advantages.
        nn.init.zeros_(self.head.weight)

    def forward(self, micro: Micro) -> Tensor:
        """Values of the states in which the tokens `micro.targets` were chosen: float32 [M]."""
        group = micro.packed.ulysses
        hidden, first = backbone_states(self.hf, micro)
        if group is None:
            return self._read(hidden, micro.before)
        local, counts, back = shares(micro.before, len(hidden), group)
        return group.gather(self._read(hidden, micro.before[local] - first), counts)[back]

    def _read(self, hidden: Tensor, indices: Tensor) -> Tensor:
        values: Tensor = self.head(hidden.index_select(0, indices)).squeeze(1).float()
        return values


class ScoreModule(nn.Module):
    """A sequence classifier with one label; its forward returns the score of each row, read at its last token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf = model
        if not isinstance(getattr(model, "score", None), nn.Linear) or model.score.out_features != 1:
            raise ModelError("a reward model must be a sequence classifier with a linear head `score` for one label")

    def forward(self, micro: Micro) -> Tensor:
        """Scores float32 [N]."""
        hidden, _ = backbone_states(backbone(self.hf), micro)
        last: Tensor = self.hf.score(hidden.index_select(0, micro.last))
        return last.squeeze(1).float()


def backbone_states(model: Any, micro: Micro) -> tuple[Tensor, int]:
    """Last hidden states of packed rows [T, E], and 0; or with sequence parallelism those of this rank's share of the tokens,
    including the padding on the last rank, and the position of its first token."""
    ids, position_ids, first, experts = micro.input_ids, micro.position_ids, 0, micro.experts
    if micro.packed.ulysses is not None:
        local = micro.packed.ulysses.slice_of(len(ids))
        ids, position_ids, first = ids[local], position_ids[local], local.start
        experts = None if experts is None else experts[local]
    # Without a mask and a cache, transformers builds no mask of its own and leaves all masking to `packed`.
    packed = micro.packed if experts is None else replace(micro.packed, experts=experts)
    with laid_out(packed):
        if position_ids.dim() == 2:
            text = model.language_model
            given = taken(text, position_ids[:, None], packed)
            seen = () if micro.seen is None else (micro.seen.places, features_of(model, micro.seen))
            out = text(**embedded(model, ids, *seen), use_cache=False, **given)
        else:
            out = model(input_ids=ids[None], use_cache=False, **taken(model, position_ids[None], packed))
    return out.last_hidden_state[0], first


def with_images(micro: Micro, vision: Vision) -> Micro:
    """The micro-batch for a model that takes images: pixels in the places of placeholders, and three positions a token."""
    ids, device = micro.input_ids.cpu().numpy(), micro.input_ids.device
    found, positions = [], []
    for start, stop, images in micro.images:
        places = vision.places(ids[start:stop], images)
        positions.append(vision.positions(stop - start, places))
        found += [(start + at, pixels) for at, pixels in places]
    seen = seen_of(found).to(device) if found else None
    return replace(micro, position_ids=torch.cat(positions, 1).to(device), seen=seen)


def shares(indices: Tensor, share: int, group: Ulysses) -> tuple[Tensor, list[int], Tensor]:
    """Which of `indices` are among this rank's tokens (`share` per rank); how many are among each rank's; and the order that
    undoes the gathering by rank, because with shared prefixes the indices of a rank need not be consecutive."""
    owner = indices // share
    counts: list[int] = torch.bincount(owner, minlength=group.size).tolist()
    return owner == group.rank, counts, torch.argsort(torch.argsort(owner, stable=True))


def shared(micro: Micro, group: Ulysses) -> Micro:
    """The micro-batch for a group of ranks that share its tokens: padded to a multiple of the group's size by an
    additional row, which no other row sees."""
    missing = -len(micro.input_ids) % group.size
    pad = micro.input_ids.new_zeros(missing)
    return replace(
        micro,
        input_ids=torch.cat([micro.input_ids, pad]),
        position_ids=torch.cat([micro.position_ids, torch.arange(missing, device=pad.device)]),
        packed=replace(padded(micro.packed, missing), ulysses=group),
        experts=None if micro.experts is None else torch.cat([micro.experts, free(micro.experts, missing)]),
    )


def positions(offsets: Tensor) -> Tensor:
    """Position of each token in its row: int64 [T]."""
    total = int(offsets[-1])
    starts = torch.repeat_interleave(offsets[:-1], offsets.diff())
    return torch.arange(total, device=offsets.device) - starts


Role = Literal["policy", "value", "score"]
MODULES: dict[Role, Callable[[Any], nn.Module]] = {"policy": PolicyModule, "value": ValueModule, "score": ScoreModule}


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: its longest ModuleList. Raises ModelError if there is none."""
    named = backbone.named_modules()
    lists = [module for name, module in named if isinstance(module, nn.ModuleList) and "visual" not in name.split(".")]
    if not lists:
        raise ModelError(f"{type(backbone).__name__} has no list of layers to shard")
    return list(max(lists, key=lambda found: len(list(found))))
