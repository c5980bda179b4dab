"""REINFORCE++ with a group baseline (Hu et al. 2025, arXiv:2501.03262, section on several samples a prompt)."""

from __future__ import annotations

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages, scored_mask
from agentrl.algorithm.ragged import on_mask, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("reinforce_pp_baseline", needs={"group"})
def reinforce_pp_baseline(batch: AdvantageInput) -> AdvantageOutput:
    """R - group mean, then (A - mean) / std over the sampled tokens of all scored episodes.

    A group without a difference is exactly 0 before the whitening, and after it as far from 0 as the mean over tokens was.
    """
    rows = row_advantages(batch, Episodes.centred)
    return AdvantageOutput(whiten(on_mask(rows, batch.mask, batch.offsets), scored_mask(batch)))
