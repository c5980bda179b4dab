"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio a sequence, its tokens' geometric mean."""

from __future__ import annotations

import torch

from agentrl.algorithm.loss.ppo_clip import Clip, clipped_surrogate
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.ragged import row_mean, spread
from agentrl.algorithm.types import LossInput, LossOutput


def gspo(batch: LossInput, *, clip_low: Clip = 3e-4, clip_high: Clip = 4e-4) -> LossOutput:
    """PPO clip on s = exp(mean log-ratio of the sequence); use with `aggregate = "seq_mean_token_mean"`.

    The value of every token's ratio is s; its gradient runs through that token alone (the paper's
    GSPO-token form), which for one advantage a sequence is the gradient of s.
    """
    delta = log_ratio(batch.logprobs, batch.old_logprobs)
    sequence = spread(row_mean(delta, batch.mask, batch.offsets), batch.offsets).detach()
    ratio = torch.exp(sequence + batch.logprobs - batch.logprobs.detach())
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, None)
