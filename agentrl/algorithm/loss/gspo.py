"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio a sequence, its tokens' geometric mean."""

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

    The value of every token's ratio is s; its gradient runs through that token alone (the paper's
    GSPO-token form), which for one advantage a sequence is the gradient of s. A sequence is one ledger, what
    the model saw as one: the paper's bounds of 3e-4 belong to means over one context's length. What an episode of
    several weighs is the aggregate's matter.
    """
    mean = row_mean(batch.logprobs.detach() - batch.old_logprobs, batch.mask, batch.offsets)
    ratio = torch.exp(bounded(spread(mean, batch.offsets) + batch.logprobs - batch.logprobs.detach()))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, None)
