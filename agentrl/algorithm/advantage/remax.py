"""ReMax (Li et al. 2023, arXiv:2310.10505): the baseline is the reward of a greedy rollout of the same task."""

from __future__ import annotations

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


@ADVANTAGES.register("remax", needs={"baseline"})
def remax(batch: AdvantageInput) -> AdvantageOutput:
    """R - R(greedy) on every sampled token. Raises ConfigError without greedy rewards (`baseline`)."""
    baseline = batch.baseline
    if baseline is None:
        raise ConfigError('algorithm.advantage "remax" needs the reward of a greedy rollout of each task')
    rows = row_advantages(batch, lambda e: e.reward - baseline[e.first].double())
    return AdvantageOutput(on_mask(rows, batch.mask, batch.offsets))
