"""GiGPO (Feng et al. 2025, arXiv:2505.10978): group advantages of episodes plus those of turns that were
taken in the same state."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.groups import Episodes, row_advantages
from agentrl.algorithm.ragged import expand, on_mask
from agentrl.algorithm.turns import normalized, turns_of
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


def gigpo(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.95,
    weight: Annotated[float, Field(ge=0)] = 1.0,
    divide: bool = True,
) -> AdvantageOutput:
    """A(episode) + weight * A(turn). Turns of a group with equal `anchors` are compared by their
    reward-to-go; a turn whose state no other turn shares has A(turn) = 0.

    Raises ConfigError without anchors.
    """
    if batch.anchors is None:
        raise ConfigError('algorithm.advantage "gigpo" needs the states of turns (column `anchors`)')
    turns = turns_of(batch)
    keys = torch.stack(
        [batch.group[turns.row].to(torch.int64), batch.anchors[turns.first].to(torch.int64)], 1
    )
    step = normalized(turns.returns(gamma), keys, divide)
    eps = 1e-6

    def episode_rule(e: Episodes) -> Tensor:
        centred = e.reward - e.mean(e.reward)
        return centred / (e.std(e.reward) + eps) if divide else centred

    rows = row_advantages(batch, episode_rule)
    total = on_mask(rows, batch.mask, batch.offsets) + weight * expand(step[turns.segment], batch.mask)
    return AdvantageOutput(total)
