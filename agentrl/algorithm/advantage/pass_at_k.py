"""Pass@k training (Chen et al. 2025, arXiv:2508.10751), for rewards of any value.

The reward of a set of k episodes is the largest of their rewards. An episode's advantage is the mean reward of
the k-subsets of its group that contain it, minus the mean over all k-subsets, in standard deviations of
the latter. For 0 / 1 rewards this is the paper's closed form; other rewards are this project's extension.
"""

from __future__ import annotations

from math import comb
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("pass_at_k", needs={"group", "group_over_k"})
def pass_at_k(
    batch: AdvantageInput,
    *,
    k: Annotated[int, Field(ge=1)] = 4,
    eps: Annotated[float, Field(ge=0)] = 1e-6,
) -> AdvantageOutput:
    """Advantages of the pass@k objective, (mean with it - mean) / (std + eps).

    A group of at most k episodes has only one subset, so its advantages are 0: groups must be larger than k.
    """

    def rule(e: Episodes) -> Tensor:
        out = torch.zeros_like(e.reward)
        for group in range(e.groups):
            members = (e.group == group).nonzero().squeeze(1)
            out[members] = subset_advantages(e.reward[members], k, eps)
        return out

    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets))


def subset_advantages(rewards: Tensor, k: int, eps: float) -> Tensor:
    """Advantages of one group's rewards, [n] -> float64 [n]; exactly 0 if all are equal, or n <= k."""
    n = len(rewards)
    if n <= k:
        return torch.zeros(n, dtype=torch.float64)
    ordered, order = torch.sort(rewards.double(), stable=True)
    # A shift cancels in exact arithmetic. Here it makes equal rewards exactly 0: the probabilities sum to 1 only up to rounding.
    above = ordered - ordered[0]
    mean = (_largest(n, k) * above).sum()
    std = (_largest(n, k) * (above - mean).square()).sum().sqrt()
    if std == 0:
        return torch.zeros(n, dtype=torch.float64)
    # If i is in the subset, its other members are a (k-1)-subset of the remaining n-1, and the larger of the two maxima counts.
    inside = torch.empty_like(above)
    for i in range(n):
        rest = torch.cat([above[:i], above[i + 1 :]])
        inside[i] = above[i] if k == 1 else (_largest(n - 1, k - 1) * torch.clamp(rest, min=float(above[i]))).sum()
    out = torch.empty_like(above)
    out[order] = (inside - mean) / (std + eps)
    return out


def _largest(n: int, k: int) -> Tensor:
    """The probability that item j of n, in ascending order, is the largest of a random k-subset, float64 [n]."""
    return torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=torch.float64)
