"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438) over sampled tokens."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.ragged import credit, discounted, expand, sampled_offsets, whiten
from agentrl.algorithm.types import AdvantageInput, AdvantageOutput
from agentrl.errors import ConfigError


def gae(
    batch: AdvantageInput,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0,
    whitened: bool = True,
) -> AdvantageOutput:
    """The recursion steps from sampled token to sampled token: tool results between them cost no discount.

    `returns` = advantage + value, taken before whitening. Raises ConfigError without a critic's values.
    """
    if batch.values is None:
        raise ConfigError('algorithm.advantage "gae" needs a critic: add a [critic] section to the config')
    compact = sampled_offsets(batch.mask, batch.offsets)
    values = batch.values[batch.mask]
    rewards = credit(batch.token_rewards, batch.mask, batch.offsets)
    delta = rewards + gamma * _following(values, compact) - values
    raw = discounted(delta, compact, gamma * lam)
    advantages = expand(raw, batch.mask)
    returns = expand(raw + values, batch.mask)
    return AdvantageOutput(whiten(advantages, batch.mask) if whitened else advantages, returns)


def _following(values: Tensor, compact: Tensor) -> Tensor:
    """The value of the next sampled token of the same row, 0 after the last."""
    after = torch.cat([values[1:], values.new_zeros(1)]) if len(values) else values.clone()
    last = compact[1:][compact.diff() > 0] - 1
    after[last] = 0.0
    return after
