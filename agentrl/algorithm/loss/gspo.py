"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per sequence, the geometric mean of its tokens' ratios."""

from __future__ import annotations

import torch

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ppo_clip import Clip, clipped_surrogate
from agentrl.algorithm.loss.ratio import bounded
from agentrl.algorithm.ragged import row_mean, spread
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("gspo")
def gspo(batch: LossInput, *, clip_low: Clip = 3e-4, clip_high: Clip = 4e-4) -> LossOutput:
    """PPO clip on s = exp(mean log-ratio of the sequence); use with `aggregate = "seq_mean_token_mean"`.

    The value of every token's ratio is s; its gradient flows through that token alone (the paper's GSPO-token
    form), which equals the gradient of s if the sequence has one advantage. A sequence is one ledger, which is what
    the model saw as one context: the paper's bounds of 3e-4 are meant for means over the length of one context. How
    much an episode of several ledgers counts is up to the aggregate.
    """
    mean = row_mean(batch.logprobs.detach() - batch.old_logprobs, batch.mask, batch.offsets)
    # The detached mean gives the value; the difference, 0 up to rounding, gives the gradient.
    ratio = torch.exp(bounded(spread(mean, batch.offsets, len(batch.mask)) + batch.logprobs - batch.logprobs.detach()))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, None)
