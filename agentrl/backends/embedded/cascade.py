"""Decode attention over a prompt that several sequences begin with: its keys and values are read once for all of them.

The scores of the prompt are one product for all members of a group and those of each row's own tokens another; one softmax goes
over both, as without sharing, and the results of the two are added ("cascade attention", Ye et al. 2024; here without the
merging of two softmaxes). On a CPU a decode step waits for memory, and the prompt of a group of 8 would be read 8 times.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.backends.embedded.kv_cache import KvShape, Sequence
from agentrl.backends.embedded.prefix_cache import BLOCK

WORTH = 6 << 20
"""Bytes of keys and values of a layer that sharing must save in a step: below, arranging queries and scores by group takes longer
than the reading does (`python benchmarks/cascade.py`)."""


@dataclass(frozen=True, slots=True)
class Cascade:
    """The first `length` tokens of the rows of a decode step, in groups that have the same.

    `leaders`: a slot of each group that holds them. `members` [groups x size]: the rows of each group, the last of which is
    repeated where a group is smaller; None if that is their order anyway. `place` [rows]: where each row stands in `members`; of
    a row that takes no part, 0.
    """

    length: int
    leaders: list[int]
    members: Tensor | None
    place: Tensor

    def leading(self, kv: Tensor) -> Tensor:
        """[2, groups, heads, length, dim] of a layer's [2, slots, heads, capacity, dim]."""
        # By slices: `index_select` would first make a copy of all slots, whose memory is not in one piece.
        return torch.stack([kv[:, slot, :, : self.length] for slot in self.leaders], 1)

    def attend(self, query: Tensor, shared: Tensor, own: Tensor, mask: Tensor, scale: float) -> Tensor:
        """`query` [rows, kv heads, queries, dim]; `shared` as of `leading`; `own` [2, rows, kv heads, keys, dim]: of the tokens
        after these, which `mask` [rows, 1, 1, keys] is for. Returns the shape of `query`."""
        rows, heads, queries, dim = query.shape
        length, keys = self.length, own.shape[3]
        key, value = (part.reshape(-1, length, dim) for part in shared)
        own_key, own_value = (part.reshape(-1, keys, dim) for part in own)
        bias = mask.expand(-1, heads, -1, -1).reshape(-1, 1, keys)
        scores = query.new_empty(rows, heads, queries, length + keys)
        by_group = torch.bmm(self._together(query * scale), key.transpose(1, 2))
        scores[..., :length] = self._apart(by_group, query.shape)
        scores[..., length:] = torch.baddbmm(bias, query.reshape(-1, queries, dim), own_key.transpose(1, 2), alpha=scale).view(
            rows, heads, queries, keys
        )
        weights = torch.softmax(scores, dim=-1)
        out = torch.bmm(weights.view(-1, queries, length + keys)[..., length:], own_value).view(query.shape)
        return out.add_(self._apart(torch.bmm(self._together(weights[..., :length]), value), query.shape))

    def _together(self, rows: Tensor) -> Tensor:
        """[rows, heads, queries, n] -> [groups x heads, members x queries, n]."""
        heads, queries, n = rows.shape[1:]
        by_group = rows if self.members is None else rows[self.members]
        apart = by_group.view(len(self.leaders), -1, heads, queries, n)
        return apart.transpose(1, 2).reshape(len(self.leaders) * heads, -1, n)

    def _apart(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of `_together`."""
        heads, queries = shape[1:3]
        by_head = groups.view(len(self.leaders), heads, -1, queries, groups.shape[-1]).transpose(1, 2)
        if self.members is None:
            return by_head.reshape(shape[0], heads, queries, groups.shape[-1])
        return by_head.reshape(-1, heads, queries, groups.shape[-1])[self.place]


def cascade_of(sequences: Seq[Sequence], rows: Seq[int], count: int, shape: KvShape) -> Cascade | None:
    """How to share the prompts of `sequences`, which are the `rows` of `count`; None if too few bytes would be saved, and where
    keys and values are not read by plain products."""
    if shape.device.type != "cpu" or shape.dtype != torch.float32:
        return None
    blocks = _depth(sequences)
    if not blocks:
        return None
    groups: dict[int, list[int]] = {}
    for at, sequence in enumerate(sequences):
        groups.setdefault(sequence.blocks[blocks - 1], []).append(at)
    length = blocks * BLOCK
    if (len(sequences) - len(groups)) * length * shape.token_bytes // shape.layers < WORTH:
        return None
    for members in groups.values():
        first = sequences[members[0]].tokens[:length]
        # Hashes may collide, and an episode's history may have been rewritten since its prompt was hashed.
        if any(len(sequences[at].tokens) <= length or sequences[at].tokens[:length] != first for at in members):
            return None
    return _laid_out([[rows[at] for at in members] for members in groups.values()], sequences, groups, length, count, shape)


def _depth(sequences: Seq[Sequence]) -> int:
    """The number of blocks in which most tokens are shared, counted once for each row but the first of its group."""
    deepest = min(len(sequence.blocks) for sequence in sequences)
    best, depth = 0, 0
    for number in range(1, deepest + 1):
        saved = (len(sequences) - len({sequence.blocks[number - 1] for sequence in sequences})) * number
        if saved > best:
            best, depth = saved, number
    return depth


def _laid_out(
    placed: list[list[int]], sequences: Seq[Sequence], groups: dict[int, list[int]], length: int, count: int, shape: KvShape
) -> Cascade:
    size = max(len(members) for members in placed)
    place = [0] * count
    for number, members in enumerate(placed):
        for at, row in enumerate(members):
            place[row] = number * size + at
    padded = [row for members in placed for row in (*members, *[members[-1]] * (size - len(members)))]
    leaders = [sequences[members[0]].slot for members in groups.values()]
    order = None if padded == list(range(count)) else torch.tensor(padded, device=shape.device)
    return Cascade(length, leaders, order, torch.tensor(place, device=shape.device))
