"""OPO (Hao et al. 2025, arXiv:2505.23585): the variance-optimal baseline, a length-weighted mean reward."""

from __future__ import annotations

from torch import Tensor

from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def opo(batch: AdvantageInput) -> AdvantageOutput:
    """R - sum(l R) / sum(l) over the group, l = sampled tokens of an episode."""
    return AdvantageOutput(on_mask(row_advantages(batch, _weighted), batch.mask, batch.offsets))


def _weighted(e: Episodes) -> Tensor:
    baseline = e.total(e.tokens * e.reward) / e.total(e.tokens).clamp(min=1)
    return e.reward - baseline[e.group]
