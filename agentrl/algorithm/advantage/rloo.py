"""RLOO (Ahmadian et al. 2024, arXiv:2402.14740): the reward minus the mean of the others in its group."""

from __future__ import annotations

from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("rloo", needs={"group"})
def rloo(batch: AdvantageInput) -> AdvantageOutput:
    """R - mean of the other rewards = n / (n - 1) (R - mean) on every sampled token; 0 in a group of one."""
    return AdvantageOutput(on_mask(row_advantages(batch, _leave_one_out), batch.mask, batch.offsets))


def _leave_one_out(e: Episodes) -> Tensor:
    n = e.size()
    return e.centered() * n / (n - 1).clamp(min=1)
