"""Turns as units: the sampled tokens of one turn of one row, with the reward that they earned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.ragged import credit, discounted, row_ids
from agentrl.algorithm.types import AdvantageInput
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turns:
    """The S turns of a batch, row by row: `row`, `index` (number of the turn), `reward` and `first` (a
    token of the turn) are [S], `offsets` int64 [N + 1] cut them by rows, and `segment` int64 [M] leads
    from a sampled token to its turn."""

    row: Tensor
    index: Tensor
    reward: Tensor
    first: Tensor
    offsets: Tensor
    segment: Tensor

    def returns(self, gamma: float) -> Tensor:
        """Reward-to-go from turn to turn, [S]."""
        return discounted(self.reward, self.offsets, gamma)


def turns_of(batch: AdvantageInput) -> Turns:
    """The turns of a batch. Raises ConfigError where the batch has no turn numbers."""
    if batch.turns is None:
        raise ConfigError("turn-level advantages need the column `turns`")
    places = batch.mask.nonzero().squeeze(1)
    rows, turns = row_ids(batch.offsets)[places], batch.turns[places].to(torch.int64)
    fresh = torch.ones(len(places), dtype=torch.bool)
    fresh[1:] = (rows[1:] != rows[:-1]) | (turns[1:] != turns[:-1])
    segment = fresh.to(torch.int64).cumsum(0) - 1
    row, index, first = rows[fresh], turns[fresh], places[fresh]
    earned = credit(batch.token_rewards, batch.mask, batch.offsets)
    reward = torch.zeros(len(row), dtype=earned.dtype).index_add(0, segment, earned)
    counts = torch.bincount(row, minlength=len(batch.group))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Turns(row, index, reward, first, offsets, segment)


def normalized(values: Tensor, keys: Tensor, divide: bool, eps: float = 1e-6) -> Tensor:
    """Values [S] against the mean (and in unbiased standard deviations) of those with the same key.

    `keys` int64 [S, K]. A value that stands alone is 0.
    """
    _, group = torch.unique(keys, dim=0, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0

    def total(column: Tensor) -> Tensor:
        return torch.zeros(size, dtype=column.dtype).index_add(0, group, column)

    count = total(torch.ones_like(values))
    centred = values - (total(values) / count)[group]
    if not divide:
        return centred
    std = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[group] + eps)
