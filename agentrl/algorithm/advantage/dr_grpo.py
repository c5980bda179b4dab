"""Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): the reward minus its group's mean, not divided."""

from __future__ import annotations

from agentrl.algorithm.groups import row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def dr_grpo(batch: AdvantageInput) -> AdvantageOutput:
    """R - mean on every sampled token. The paper's other half is `aggregate = "seq_mean_token_sum"`."""
    rows = row_advantages(batch, lambda e: e.reward - e.mean(e.reward))
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))
