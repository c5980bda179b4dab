"""Importance ratios of tokens, kept finite."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 20.0


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(pi_new / pi_old), clamped to +-20 so that its exponential stays finite in float32."""
    return torch.clamp(new - old, -LIMIT, LIMIT)
