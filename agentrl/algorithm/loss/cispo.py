"""CISPO (MiniMax-M1, 2025, arXiv:2506.13585): clip the importance weight, keep every token's gradient."""

from __future__ import annotations

import torch

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ppo_clip import Clip
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("cispo")
def cispo(batch: LossInput, *, clip_low: Clip = 1.0, clip_high: Clip = 0.28) -> LossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi. With low = 1 (the default) there is no lower bound."""
    ratio = torch.exp(log_ratio(batch.logprobs, batch.old_logprobs)).detach()
    weight = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio, "clip_fraction": (weight != ratio).float()}
    return LossOutput(-weight * batch.advantages * batch.logprobs, metrics)
