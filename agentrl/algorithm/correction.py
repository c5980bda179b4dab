"""Off-policy correction: importance weights between the proximal policy and the policy that sampled the tokens.

d = log proximal - log behavior. The weights are fixed before the update starts (they do not depend on the
parameters that are being trained), so a rejected token is removed from the mask and thus from every global count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from agentrl.algorithm.loss.ratio import bounded, log_ratio
from agentrl.algorithm.ragged import row_mean, row_sum, spread
from agentrl.registry import Registry

Cap = Annotated[float, Field(gt=0)]
Correction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

CORRECTIONS: Registry[Callable[..., Tensor]] = Registry(
    "algorithm.correction",
    "CORRECTIONS",
    "agentrl.algorithm.correction",
    given=4,
    traits={"importance_weighted": "weights tokens by proximal / behavior instead of only rejecting some"},
)


@CORRECTIONS.register("truncated", traits={"importance_weighted"})
def truncated(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Cap = 2.0) -> Tensor:
    """Truncated importance sampling per token: min(exp(d), cap)."""
    return torch.exp(log_ratio(prox, behave)).clamp(max=cap)


@CORRECTIONS.register("truncated_sequence", traits={"importance_weighted"})
def truncated_sequence(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Cap = 2.0) -> Tensor:
    """Truncated importance sampling per row: min(exp(sum d), cap) on each of its tokens."""
    return torch.exp(_row_total(prox, behave, mask, offsets)).clamp(max=cap)


@CORRECTIONS.register("masked", traits={"importance_weighted"})
def masked(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Cap = 2.0) -> Tensor:
    """Masked importance sampling per token: exp(d) if it is at most cap, else the token is rejected."""
    return _within(torch.exp(log_ratio(prox, behave)), 0.0, cap)


@CORRECTIONS.register("masked_sequence", traits={"importance_weighted"})
def masked_sequence(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Cap = 2.0) -> Tensor:
    """Masked importance sampling per row: exp(sum d) if it is at most cap, else the row is rejected."""
    return _within(torch.exp(_row_total(prox, behave, mask, offsets)), 0.0, cap)


@CORRECTIONS.register("icepop", traits={"importance_weighted"})
def icepop(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, low: Cap = 0.5, high: Cap = 5.0) -> Tensor:
    """IcePop (Ling team 2025, arXiv:2510.18855): exp(d) if it is within [low, high], else the token is rejected."""
    return _within(torch.exp(log_ratio(prox, behave)), low, high)


@CORRECTIONS.register("reject_sequence")
def reject_sequence(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, low: Cap = 0.99, high: Cap = 1.01) -> Tensor:
    """Reject rows whose geometric mean ratio is outside [low, high]; the others keep weight 1."""
    mean = torch.exp(spread(bounded(row_mean(prox - behave, mask, offsets)), offsets))
    return ((mean >= low) & (mean <= high)).to(prox.dtype)


def correction(name: str, args: Mapping[str, Any]) -> Correction:
    """(proximal [T], behavior [T], mask [T], offsets [N + 1]) -> weights [T]; 0 rejects the token.

    Raises ConfigError for an unknown name or argument.
    """
    return CORRECTIONS.bind(name, args)


def _row_total(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    # Clamped once, as a sum: clamping each token first would change the product of a long row.
    delta = torch.where(mask, prox - behave, torch.zeros_like(prox))
    return spread(bounded(row_sum(delta, offsets)), offsets)


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
