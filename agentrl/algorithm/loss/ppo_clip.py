"""PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347), with an asymmetric upper bound (DAPO,
arXiv:2503.14476) and a floor for negative advantages (dual clip, Ye et al. 2020, arXiv:1912.09729)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.types import LossInput, LossOutput

Clip = Annotated[float, Field(ge=0)]
DualClip = Annotated[float, Field(gt=1)]


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(batch: LossInput, *, clip_low: Clip = 0.2, clip_high: Clip = 0.2, dual_clip: DualClip | None = 3.0) -> LossOutput:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and at most -dual_clip * A if A < 0; r = theta / old."""
    ratio = torch.exp(log_ratio(batch.logprobs, batch.old_logprobs))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    """The surrogate of a given ratio [T]; metrics: the ratio and the fraction of tokens that each bound clipped."""
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    # The larger of the two losses: clipping takes away the gain of moving on, and never hides the loss of having moved too far.
    loss = torch.maximum(plain, clipped)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clipped > plain).float()}
    if dual_clip is not None:
        # With A < 0 nothing above bounds r, and one token with a large ratio would outweigh the whole batch.
        floor = -advantages * dual_clip
        bounded = (advantages < 0) & (floor < loss)
        metrics["dual_clip_fraction"] = bounded.float()
        loss = torch.where(bounded, floor, loss)
    return LossOutput(loss, metrics)
