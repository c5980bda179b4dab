"""Turn-level credit: each turn's tokens get its own reward-to-go, against the same turn of the group."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from agentrl.algorithm.ragged import expand
from agentrl.algorithm.turns import normalized, turns_of
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def turn_returns(
    batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0, divide: bool = True
) -> AdvantageOutput:
    """(G - mean) / (std + 1e-6), G = discounted sum of the turn rewards from this turn on; mean and std
    over the turns of the same number in the group. A turn that no other member reached gets 0."""
    turns = turns_of(batch)
    returns = turns.returns(gamma)
    keys = torch.stack([batch.group[turns.row].to(torch.int64), turns.index], dim=1)
    advantages = normalized(returns, keys, divide)
    return AdvantageOutput(
        expand(advantages[turns.segment], batch.mask), expand(returns[turns.segment], batch.mask)
    )
