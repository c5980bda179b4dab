"""Importance ratios of tokens, kept finite."""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 20.0


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """log(pi_new / pi_old) of each token, clamped to +-20 so that its exponential stays finite in float32.

    No paper has this bound; beyond it the gradient is 0.
    """
    return bounded(new - old)


def bounded(exponent: Tensor) -> Tensor:
    """An exponent clamped to +-20. Sums and means over a row are clamped after they are taken, not token by token."""
    return torch.clamp(exponent, -LIMIT, LIMIT)
