"""SAPO (Gao et al. 2025, arXiv:2511.20347): a soft gate on the ratio in place of a hard clip."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.types import LossInput, LossOutput

Sharpness = Annotated[float, Field(gt=0)]


@POLICY_LOSSES.register("sapo")
def sapo(batch: LossInput, *, tau_positive: Sharpness = 1.0, tau_negative: Sharpness = 1.05) -> LossOutput:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with a separate tau for A <= 0; at r = 1 its gradient equals PPO's."""
    ratio = torch.exp(log_ratio(batch.logprobs, batch.old_logprobs))
    tau = torch.full_like(ratio, tau_negative).masked_fill(batch.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossOutput(-gate * batch.advantages, {"ratio": ratio.detach()})
