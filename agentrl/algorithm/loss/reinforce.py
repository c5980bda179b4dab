"""REINFORCE (Williams 1992): the plain policy gradient."""

from __future__ import annotations

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.types import LossInput, LossOutput


@POLICY_LOSSES.register("reinforce", traits={"own_samples"})
def reinforce(batch: LossInput) -> LossOutput:
    """-A log pi; exact if the tokens were sampled with the weights that are being trained."""
    return LossOutput(-batch.advantages * batch.logprobs)
