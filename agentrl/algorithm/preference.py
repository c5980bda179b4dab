"""Losses of pairs of which one is preferred. Scalars a pair, float tensors [P]; pure functions.

Each takes what a pair's episodes came to: sums of log probabilities over their sampled tokens, or a reward model's scores.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float) -> Tensor:
    """-log sigmoid(m) with m = beta ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)): Rafailov et al. 2023,
    arXiv:2305.18290, eq. 7."""
    return -logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(score(chosen) - score(rejected)): Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, eq. 1."""
    return -logsigmoid(chosen - rejected)
