"""REINFORCE++ with a group baseline (Hu et al. 2025, arXiv:2501.03262, section on several samples per prompt)."""

from __future__ import annotations

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages, scored_mask
from agentrl.algorithm.ragged import on_mask, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("reinforce_pp_baseline", needs={"group"})
def reinforce_pp_baseline(batch: AdvantageInput) -> AdvantageOutput:
    """R - group mean, then (A - mean) / std over the sampled tokens of all scored episodes.

    A group of equal rewards is exactly 0 before whitening; whitening then shifts it, like all tokens, by the mean over tokens.
    """
    rows = row_advantages(batch, Episodes.centered)
    return AdvantageOutput(whiten(on_mask(rows, batch.mask, batch.offsets), scored_mask(batch)))
