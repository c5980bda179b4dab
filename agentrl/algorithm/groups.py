"""Group statistics over episodes: each scored episode counts once, however many ledgers it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.ragged import row_sum
from agentrl.algorithm.types import AdvantageInput


@dataclass(frozen=True, slots=True)
class Episodes:
    """The U scored episodes of a batch in G groups.

    `reward`, `group` (0..G-1), `tokens` (sampled tokens over all ledgers) and `first` (a row of the
    episode) are [U]; `episode` [N] leads from a row to its episode, -1 where it is unscored.
    """

    reward: Tensor
    group: Tensor
    groups: int
    tokens: Tensor
    first: Tensor
    episode: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group of each episode, [U]."""
        return (self.total(values) / self.count())[self.group]

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation over the group of each episode, [U]; 0 in a group of one."""
        centred = values - self.mean(values)
        return (self.total(centred * centred) / (self.count() - 1).clamp(min=1)).sqrt()[self.group]

    def total(self, values: Tensor) -> Tensor:
        """Sum over each group, [G]."""
        return values.new_zeros(self.groups).index_add(0, self.group, values)

    def count(self) -> Tensor:
        """Scored episodes of each group, [G]."""
        return self.total(torch.ones_like(self.reward))

    def size(self) -> Tensor:
        """Scored episodes in the group of each episode, [U]."""
        return self.count()[self.group]


def episodes(batch: AdvantageInput) -> Episodes:
    """The scored episodes of a batch, in order of (group, member)."""
    rows = len(batch.group)
    member = batch.member if batch.member is not None else torch.arange(rows)
    scored = ~torch.isnan(batch.reward)
    keys = torch.stack([batch.group.to(torch.int64), member.to(torch.int64)], dim=1)[scored]
    unique, index = torch.unique(keys, dim=0, return_inverse=True)
    where = torch.arange(rows)[scored]
    first = torch.full((len(unique),), rows).scatter_reduce(0, index, where, reduce="amin")
    sampled = row_sum(batch.mask.to(torch.float32), batch.offsets)[scored]
    tokens = torch.zeros(len(unique)).index_add(0, index, sampled)
    names, group = torch.unique(unique[:, 0], return_inverse=True)
    episode = torch.full((rows,), -1)
    episode[scored] = index
    return Episodes(batch.reward[first].to(torch.float32), group, len(names), tokens, first, episode)


def row_advantages(batch: AdvantageInput, rule: Callable[[Episodes], Tensor]) -> Tensor:
    """A rule's value per episode, on that episode's rows: [N]; 0 on unscored rows."""
    found = episodes(batch)
    per_row = torch.zeros(len(batch.group))
    scored = found.episode >= 0
    if found.groups:
        per_row[scored] = rule(found)[found.episode[scored]]
    return per_row
