"""GRPO (Shao et al. 2024, arXiv:2402.03300): the reward against its group's mean, in standard deviations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("grpo", needs={"group"})
def grpo(batch: AdvantageInput, *, eps: Annotated[float, Field(ge=0)] = 1e-6) -> AdvantageOutput:
    """(R - mean) / (std + eps) on every sampled token; 0 in a group of one, or if all rewards are equal.

    std is unbiased and eps 1e-6; the paper specifies neither.
    """
    rows = row_advantages(batch, lambda e: e.standardized(eps))
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))
