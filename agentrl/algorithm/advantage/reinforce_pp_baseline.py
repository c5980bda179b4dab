"""REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262, section on multi-sample prompts)."""

from __future__ import annotations

from agentrl.algorithm.groups import row_advantages
from agentrl.algorithm.ragged import on_mask, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def reinforce_pp_baseline(batch: AdvantageInput) -> AdvantageOutput:
    """R - group mean on every sampled token, then whitened over all sampled tokens of the batch."""
    rows = row_advantages(batch, lambda e: e.reward - e.mean(e.reward))
    return AdvantageOutput(whiten(on_mask(rows, batch.mask, batch.offsets), batch.mask))
