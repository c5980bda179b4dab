"""What belongs together in a batch: the episodes of a group, the ledgers of an episode.

An episode is scored if its reward is not NaN. An unscored one takes part in no statistic and no recursion.
Statistics are taken in float64, on values minus the smallest of their group: if all are equal, every
deviation is exactly 0.0, whatever the reward (0.1 and 1/3 are not exact in binary, and neither are their means).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithm.ragged import credit, row_counts, sampled_offsets, spread
from agentrl.algorithm.types import AdvantageInput


def group_total(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Sum over each group: [S], int64 [S] -> [G]."""
    return values.new_zeros(groups).index_add(0, group, values)


def centered(values: Tensor, group: Tensor, groups: int, weights: Tensor | None = None) -> Tensor:
    """Values minus the (weighted) mean of their group, float64 [S]; exactly 0 if all values of the group are equal."""
    values = values.double()
    least = values.new_full((groups,), torch.inf).scatter_reduce(0, group, values, "amin")
    above = values - least[group]
    scale = torch.ones_like(above) if weights is None else weights.double()
    total = group_total(scale, group, groups)
    mean = group_total(scale * above, group, groups) / torch.where(total > 0, total, 1.0)
    return above - mean[group]


def deviation(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Unbiased standard deviation of the group of each value, float64 [S]; 0 in a group of one."""
    count = group_total(torch.ones_like(values, dtype=torch.float64), group, groups)
    squares = group_total(centered(values, group, groups).square(), group, groups)
    return (squares / (count - 1).clamp(min=1)).sqrt()[group]


def standardized(values: Tensor, group: Tensor, groups: int, eps: float) -> Tensor:
    """(value - mean) / (std + eps) within each group, float64 [S]; exactly 0 if all are equal, even with eps = 0."""
    scale = deviation(values, group, groups) + eps
    return centered(values, group, groups) / torch.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, slots=True)
class Episodes:
    """The U scored episodes of a batch in G groups, in order of (group, member).

    `reward` (float64), `group` (0..G-1), `tokens` (sampled tokens over all ledgers, float64) and `first` (a
    row of the episode) are [U]; `episode` [N] maps a row to its episode, -1 if that is unscored.
    """

    reward: Tensor
    group: Tensor
    groups: int
    tokens: Tensor
    first: Tensor
    episode: Tensor

    def centered(self, weights: Tensor | None = None) -> Tensor:
        """Rewards minus their group's (weighted) mean, [U]."""
        return centered(self.reward, self.group, self.groups, weights)

    def standardized(self, eps: float) -> Tensor:
        """(reward - mean) / (std + eps) within each group, [U]."""
        return standardized(self.reward, self.group, self.groups, eps)

    def std(self) -> Tensor:
        """Unbiased standard deviation of the rewards in the group of each episode, [U]; 0 in a group of one."""
        return deviation(self.reward, self.group, self.groups)

    def size(self) -> Tensor:
        """Scored episodes in the group of each episode, float64 [U]."""
        return group_total(torch.ones_like(self.reward), self.group, self.groups)[self.group]


def episodes(batch: AdvantageInput) -> Episodes:
    """The scored episodes of a batch."""
    rows = len(batch.group)
    scored = ~torch.isnan(batch.reward)
    # Keys are unique over (group, member), so an episode of several ledgers counts once in its group's mean.
    unique, index = torch.unique(_keys(batch)[scored], dim=0, return_inverse=True)
    scored_rows = torch.arange(rows)[scored]
    first = torch.full((len(unique),), rows).scatter_reduce(0, index, scored_rows, reduce="amin")
    sampled = row_counts(batch.mask, batch.offsets)[scored]
    tokens = torch.zeros(len(unique), dtype=torch.int64).index_add(0, index, sampled)
    names, group = torch.unique(unique[:, 0], return_inverse=True)
    episode = torch.full((rows,), -1)
    episode[scored] = index
    return Episodes(batch.reward[first].double(), group, len(names), tokens.double(), first, episode)


def row_advantages(batch: AdvantageInput, rule: Callable[[Episodes], Tensor]) -> Tensor:
    """A rule's value per episode, on that episode's rows: [N]; 0 on unscored rows."""
    units = episodes(batch)
    per_row = torch.zeros_like(batch.reward)
    scored = units.episode >= 0
    if units.groups:
        per_row[scored] = rule(units)[units.episode[scored]].to(per_row.dtype)
    return per_row


@dataclass(frozen=True, slots=True)
class EpisodeTokens:
    """The tokens of a batch, episode by episode: the rows of an episode are joined in their batch order (ledger order).

    `order` int64 [T] is the position of each token in the batch; `mask` [T], in that order, is true on the
    sampled tokens of scored episodes (M of them); `offsets` int64 [E + 1] cut all tokens by episode,
    `compact` int64 [E + 1] cut the M sampled ones.
    """

    order: Tensor
    mask: Tensor
    offsets: Tensor
    compact: Tensor

    @property
    def indices(self) -> Tensor:
        """Positions of the M tokens in the batch, int64 [M]."""
        return self.order[self.mask]

    def earned(self, token_rewards: Tensor) -> Tensor:
        """The reward of each of the M tokens, float64 [M]; none is lost (see `ragged.credit`)."""
        return credit(token_rewards[self.order].double(), self.mask, self.offsets)

    def put(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """[M] -> [T] in the batch's own order, 0 elsewhere."""
        full = torch.zeros(len(self.order), dtype=dtype, device=values.device)
        full[self.indices] = values.to(dtype)
        return full


def episode_tokens(batch: AdvantageInput) -> EpisodeTokens:
    """The tokens of a batch in the order of its episodes; rows of one episode need not be adjacent in the batch."""
    _, episode = torch.unique(_keys(batch), dim=0, return_inverse=True)
    rows = torch.argsort(episode, stable=True)  # stable: the rows of an episode keep their ledger order
    lengths = batch.offsets.diff()[rows]
    ends = lengths.cumsum(0)
    shift = torch.repeat_interleave(batch.offsets[:-1][rows] - (ends - lengths), lengths)
    order = shift + torch.arange(len(shift))
    # bincount sums in floating point: float64 is exact up to 2^53 tokens.
    stops = torch.bincount(episode, weights=batch.offsets.diff().double()).to(torch.int64).cumsum(0)
    offsets = torch.cat([stops.new_zeros(1), stops])
    mask = scored_mask(batch)[order]
    return EpisodeTokens(order, mask, offsets, sampled_offsets(mask, offsets))


def scored_mask(batch: AdvantageInput) -> Tensor:
    """True on the sampled tokens of scored episodes, bool [T]."""
    return batch.mask & spread(~torch.isnan(batch.reward), batch.offsets)


def _keys(batch: AdvantageInput) -> Tensor:
    """(group, member) of each row, int64 [N, 2]."""
    member = batch.member if batch.member is not None else torch.arange(len(batch.group))
    return torch.stack([batch.group.to(torch.int64), member.to(torch.int64)], dim=1)
