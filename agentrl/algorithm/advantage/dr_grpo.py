"""Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): the reward minus its group's mean, not divided."""

from __future__ import annotations

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("dr_grpo", needs={"group"})
def dr_grpo(batch: AdvantageInput) -> AdvantageOutput:
    """R - mean on every sampled token. The paper's other change, a sum over tokens that is not divided by a length, is
    `algorithm.aggregate`."""
    rows = row_advantages(batch, Episodes.centered)
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))
