"""REINFORCE++ (Hu 2025, arXiv:2501.03262): discounted returns, whitened over the whole batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from agentrl.algorithm.ragged import credit, discounted, expand, sampled_offsets, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput


def reinforce_pp(
    batch: AdvantageInput, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
) -> AdvantageOutput:
    """Returns discounted from sampled token to sampled token, then whitened over all sampled tokens."""
    earned = credit(batch.token_rewards, batch.mask, batch.offsets)
    returns = expand(discounted(earned, sampled_offsets(batch.mask, batch.offsets), gamma), batch.mask)
    return AdvantageOutput(whiten(returns, batch.mask), returns)
