"""Pass@k training (Chen et al. 2025, arXiv:2508.10751), for rewards of any value.

The reward of a set of k episodes is the largest of theirs. An episode's advantage is the mean reward of
the k-subsets of its group that hold it, against the mean over all k-subsets, in standard deviations of
the latter. For 0 / 1 rewards this is the paper's closed form.
"""

from __future__ import annotations

from math import comb
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def pass_at_k(
    batch: AdvantageInput,
    *,
    k: Annotated[int, Field(ge=1)] = 4,
    eps: Annotated[float, Field(ge=0)] = 1e-6,
) -> AdvantageOutput:
    """Advantages of the pass@k objective; in a group of fewer than k episodes k is the group's size."""

    def rule(e: Episodes) -> Tensor:
        out = torch.zeros_like(e.reward)
        for group in range(e.groups):
            members = (e.group == group).nonzero().squeeze(1)
            out[members] = subset_advantages(e.reward[members], k, eps)
        return out

    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets))


def subset_advantages(rewards: Tensor, k: int, eps: float) -> Tensor:
    """Advantages [n] of one group's rewards [n]."""
    n = len(rewards)
    k = min(k, n)
    ordered, order = torch.sort(rewards.double(), stable=True)
    largest = torch.tensor([comb(j, k - 1) / comb(n, k) for j in range(n)], dtype=torch.float64)
    mean = (largest * ordered).sum()
    std = (largest * (ordered - mean).square()).sum().sqrt()
    # With i in the subset, the others are a (k-1)-subset of the n-1 rest, and the larger of both counts.
    inside = torch.empty_like(ordered)
    for i in range(n):
        if k == 1:
            inside[i] = ordered[i]
            continue
        rest = torch.cat([ordered[:i], ordered[i + 1 :]])
        chance = torch.tensor(
            [comb(j, k - 2) / comb(n - 1, k - 1) for j in range(n - 1)], dtype=torch.float64
        )
        inside[i] = (chance * torch.clamp(rest, min=float(ordered[i]))).sum()
    out = torch.empty_like(rewards)
    out[order] = ((inside - mean) / (std + eps)).to(rewards.dtype)
    return out
