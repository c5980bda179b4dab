"""GiGPO (Feng et al. 2025, arXiv:2505.10978): group advantages of episodes, plus group advantages of the turns that were
taken in the same state."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.advantage import ADVANTAGES
from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import on_mask
from agentrl.algorithm.turns import normalized, turns_of
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError

EPS = 1e-6


@ADVANTAGES.register("gigpo", needs={"group", "anchors"})
def gigpo(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    weight: Annotated[float, Field(ge=0)] = 1.0,
    divide: bool = True,
) -> AdvantageOutput:
    """A(episode) + weight * A(turn), each (value - mean) / F; weight is the paper's omega.

    A(episode) compares the rewards of the group. A(turn) compares the discounted rewards-to-go of all turns
    of the group that were taken in the same state (equal `anchors`), including several turns of one episode;
    a turn whose state no other turn shares has A(turn) = 0. F is the unbiased std + 1e-6, or 1 without `divide`:
    the paper's two choices of F_norm. Raises ConfigError without anchors.
    """
    if batch.anchors is None:
        raise ConfigError('algorithm.advantage "gigpo" needs the states of turns (column `anchors`)')
    turns = turns_of(batch)
    keys = torch.stack([turns.group, batch.anchors[turns.first].to(torch.int64)], 1)
    steps = turns.put(normalized(turns.returns(gamma), keys, divide, EPS), batch.reward.dtype)

    def rule(e: Episodes) -> Tensor:
        return e.standardized(EPS) if divide else e.centered()

    return AdvantageOutput(on_mask(row_advantages(batch, rule), batch.mask, batch.offsets) + weight * steps)
