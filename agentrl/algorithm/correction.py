"""Off-policy correction: weights between the proximal policy and the one that sampled the tokens.

The weights are fixed before the update starts (nothing in them depends on the weights that move), so a
rejected token leaves the mask, and with it every global count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.registry import bind

Cap = Annotated[float, Field(gt=0)]


def truncated(
    proximal: Tensor, behaviour: Tensor, mask: Tensor, offsets: Tensor, *, cap: Cap = 2.0
) -> Tensor:
    """Truncated importance sampling a token: min(exp(d), cap), d = log proximal - log behaviour."""
    return torch.exp(log_ratio(proximal, behaviour)).clamp(max=cap)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {"truncated": truncated}


def correction(name: str, args: Mapping[str, Any]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """(proximal [T], behaviour [T], mask [T], offsets [N + 1]) -> weights [T]; 0 rejects the token.

    Raises ConfigError for an unknown name or argument.
    """
    return bind("algorithm.correction", CORRECTIONS, name, args)
