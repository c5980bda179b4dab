"""The critic's loss, clipped around the values that the advantages were computed with (PPO2)."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """1/2 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) per token, [T]."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum(plain, (near - returns).square())
