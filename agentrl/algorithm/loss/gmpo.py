"""GMPO (Zhao et al. 2025, arXiv:2507.20673): geometric mean of token ratios, clipped in log space."""

from __future__ import annotations

import torch

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ppo_clip import Clip
from agentrl.algorithm.loss.ratio import bounded
from agentrl.algorithm.ragged import row_mean, spread
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("gmpo")
def gmpo(batch: LossInput, *, clip_low: Clip = 0.4, clip_high: Clip = 0.4) -> LossOutput:
    """-A (product of the row's clipped token ratios)^(1 / length) on every token of the row; use with
    `aggregate = "seq_mean_token_mean"`.

    A token's log-ratio is clipped to [-low, high] on the side that PPO clips for the sign of A. A is the row's
    advantage; if its tokens differ (turn-level estimators, which the paper does not have), A is their
    mean. A row is one ledger, as in `gspo`. The paper's 0.4 is the exponent of its bounds exp(-0.4) and exp(0.4).
    """
    delta = batch.logprobs - batch.old_logprobs
    tokens = len(batch.mask)
    advantage = spread(row_mean(batch.advantages, batch.mask, batch.offsets), batch.offsets, tokens)
    clamped = torch.clamp(delta, -clip_low, clip_high)
    # One side only, as PPO's minimum does it: a token that moved the wrong way must keep its gradient.
    chosen = torch.where(advantage > 0, torch.minimum(delta, clamped), torch.maximum(delta, clamped))
    ratio = torch.exp(bounded(spread(row_mean(chosen, batch.mask, batch.offsets), batch.offsets, tokens)))
    metrics = {"ratio": ratio.detach(), "clip_fraction": (chosen != delta).float()}
    return LossOutput(-advantage * ratio, metrics)
