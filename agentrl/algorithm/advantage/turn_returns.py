"""Turn-level credit: each turn's tokens get the turn's own reward-to-go, compared with the same turn of the group.

The form is this project's own. Related: GRPO's process supervision (arXiv:2402.03300, section 4.1.3), which normalizes step
rewards over the group before they are summed, and GTPO (Ding et al. 2025, arXiv:2511.14846), whose
advantages are normalized discounted returns of turns.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.turns import normalized, turns_of
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


@ADVANTAGES.register("turn_returns", needs={"group"})
def turn_returns(
    batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0, divide: bool = True
) -> AdvantageOutput:
    """(G - mean) / (std + 1e-6), G = discounted sum of the turn rewards from this turn on, over all ledgers of
    the episode; mean and unbiased std over the turns with the same index in the group. A turn that no other
    member reached gets 0."""
    turns = turns_of(batch)
    returns = turns.returns(gamma)
    advantages = normalized(returns, torch.stack([turns.group, turns.index], dim=1), divide)
    dtype = batch.reward.dtype
    return AdvantageOutput(turns.put(advantages, dtype), turns.put(returns, dtype))
