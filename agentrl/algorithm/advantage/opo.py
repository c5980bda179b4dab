"""OPO (Hao et al. 2025, arXiv:2505.23585): the variance-optimal baseline, a length-weighted mean reward."""

from __future__ import annotations

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("opo", needs={"group"})
def opo(batch: AdvantageInput) -> AdvantageOutput:
    """R - sum(l R) / sum(l) over the group, l = sampled tokens of an episode over all its ledgers.

    The length stands for the squared norm of the score function, as in the paper's simplification.
    """
    rows = row_advantages(batch, lambda e: e.centered(weights=e.tokens))
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))
