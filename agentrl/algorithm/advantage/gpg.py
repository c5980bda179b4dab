"""GPG (Chu et al. 2025, arXiv:2504.02546): centered rewards, scaled up to make up for the groups that teach nothing."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("gpg", needs={"group"})
def gpg(batch: AdvantageInput, *, f_norm: Annotated[float, Field(gt=0)] = 1.0) -> AdvantageOutput:
    """alpha (R - mean) / f_norm, alpha = B / (B - M): of B scored episodes, M are in groups whose rewards are all equal.

    alpha makes up for the M in the denominators of the loss, which therefore must count them. The paper's
    F_norm is 1 or the group's standard deviation; here it is a constant (for the standard deviation see `grpo`).
    The paper's threshold, below which groups are sampled again, is `rollout.filter_zero_variance`.
    """

    def scaled(e: Episodes) -> Tensor:
        teaching = max(int((e.std() > 0).sum()), 1)  # B - M
        return e.centered() * len(e.reward) / teaching / f_norm

    return AdvantageOutput(on_mask(row_advantages(batch, scaled), batch.mask, batch.offsets))
