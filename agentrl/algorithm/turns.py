"""Turns as units: the sampled tokens of one turn of one episode, and the reward that they earned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.groups import EpisodeTokens, centered, episode_tokens, standardized
from agentrl.algorithm.ragged import discounted, row_ids
from agentrl.algorithm.types import AdvantageInput
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Turns:
    """The S turns of the scored episodes, episode by episode.

    `group`, `index` (number of the turn), `reward` (float64) and `first` (position of the turn's first sampled token in the
    batch) are [S]; `offsets` int64 [E + 1] cut them by episode, `segment` int64 [M] maps each of the
    M sampled tokens of `tokens` to its turn.
    """

    group: Tensor
    index: Tensor
    reward: Tensor
    first: Tensor
    offsets: Tensor
    segment: Tensor
    tokens: EpisodeTokens

    def returns(self, gamma: float) -> Tensor:
        """Reward-to-go from turn to turn, over all ledgers of the episode, float64 [S]."""
        return discounted(self.reward, self.offsets, gamma)

    def put(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A turn's value on each of its sampled tokens: [S] -> [T], 0 elsewhere."""
        return self.tokens.put(values[self.segment], dtype)


def turns_of(batch: AdvantageInput) -> Turns:
    """The turns of a batch: consecutive sampled tokens of an episode with the same turn number.

    A turn may continue from one ledger into the next. A summary that the policy writes is at the end of the old ledger, under
    the number of the turn that it makes room for: the environment does not change between the two, so they are
    one turn, with one reward-to-go and no discount between them, taken in the state in which the
    summary was requested. Raises ConfigError if the batch has no turn numbers.
    """
    if batch.turns is None:
        raise ConfigError("turn-level advantages need the column `turns`")
    tokens = episode_tokens(batch)
    indices = tokens.indices
    episode, turns = row_ids(tokens.compact), batch.turns[indices].to(torch.int64)
    fresh = torch.ones(len(indices), dtype=torch.bool)
    fresh[1:] = (episode[1:] != episode[:-1]) | (turns[1:] != turns[:-1])
    segment = fresh.to(torch.int64).cumsum(0) - 1
    # A reward on a tool result belongs to the turn that called the tool, so it is moved to a sampled token first.
    earned = tokens.earned(batch.token_rewards)
    reward = earned.new_zeros(int(fresh.sum())).index_add(0, segment, earned)
    counts = torch.bincount(episode[fresh], minlength=len(tokens.compact) - 1)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    first = indices[fresh]
    group = batch.group.to(torch.int64)[torch.searchsorted(batch.offsets, first, right=True) - 1]
    return Turns(group, turns[fresh], reward, first, offsets, segment, tokens)


def normalized(values: Tensor, keys: Tensor, divide: bool, eps: float = 1e-6) -> Tensor:
    """Values [S] minus the mean of those with the same key, with `divide` in unbiased standard deviations, float64.

    `keys` int64 [S, K]. A value that is the only one of its key, or equal to all others, becomes exactly 0.
    """
    _, group = torch.unique(keys, dim=0, return_inverse=True)
    size = int(group.max()) + 1 if len(group) else 0
    return standardized(values, group, size, eps) if divide else centered(values, group, size)
