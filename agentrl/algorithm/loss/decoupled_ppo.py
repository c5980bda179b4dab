"""Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641; AReaL, arXiv:2505.24298): clip against the proximal
policy, correct for the policy that sampled."""

from __future__ import annotations

from dataclasses import replace

import torch

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ppo_clip import Clip, DualClip, clipped_surrogate
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("decoupled_ppo", needs={"proximal"}, traits={"importance_weighted"})
def decoupled_ppo(
    batch: LossInput,
    *,
    clip_low: Clip = 0.2,
    clip_high: Clip = 0.2,
    dual_clip: DualClip | None = 3.0,
    weight_cap: DualClip | None = None,
) -> LossOutput:
    """PPO clip on theta / proximal, times the detached weight proximal / behavior (at most `weight_cap`)."""
    ratio = torch.exp(log_ratio(batch.logprobs, batch.old_logprobs))
    out = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, dual_clip)
    weight = torch.exp(log_ratio(batch.old_logprobs, batch.behaviour_logprobs)).detach()
    if weight_cap is not None:
        weight = weight.clamp(max=weight_cap)
    return replace(out, loss=out.loss * weight, metrics={**out.metrics, "behaviour_weight": weight})
