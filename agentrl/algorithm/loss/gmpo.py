"""GMPO (Zhao et al. 2025, arXiv:2507.20673): geometric mean of token ratios, clipped in log space."""

from __future__ import annotations

import torch

from agentrl.algorithm.loss.ppo_clip import Clip
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.ragged import row_mean, spread
from agentrl.algorithm.types import LossInput, LossOutput


def gmpo(batch: LossInput, *, clip_low: Clip = 0.4, clip_high: Clip = 0.4) -> LossOutput:
    """-A exp(mean over the row of the pessimistic log-ratio clipped to [-low, high]) on every token of the
    row, A the row's mean advantage; use with `aggregate = "seq_mean_token_mean"`."""
    delta = log_ratio(batch.logprobs, batch.old_logprobs)
    sign = torch.sign(batch.advantages)
    clamped = torch.clamp(delta, -clip_low, clip_high)
    chosen = sign * torch.minimum(sign * delta, sign * clamped)
    chosen = torch.where(sign == 0, delta.detach(), chosen)
    ratio = torch.exp(spread(row_mean(chosen, batch.mask, batch.offsets), batch.offsets))
    advantage = spread(row_mean(batch.advantages, batch.mask, batch.offsets), batch.offsets)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (chosen != delta).float()}
    return LossOutput(-advantage * ratio, metrics)
