"""REINFORCE (Williams 1992): the plain policy gradient."""

from __future__ import annotations

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("reinforce")
def reinforce(batch: LossInput) -> LossOutput:
    """-A log pi; exact where the weights that sampled are the weights that train."""
    return LossOutput(-batch.advantages * batch.logprobs)
