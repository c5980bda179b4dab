"""Clip-Cov and KL-Cov (Cui et al. 2025, arXiv:2505.22617): restrain the few tokens that drive entropy down.

These tokens have a high covariance of log-probability and advantage. They are selected over a whole minibatch
and all ranks before its first micro-batch (`Selection`), so the selection does not depend on packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field

from agentrl.algorithm.loss import POLICY_LOSSES
from agentrl.algorithm.loss.ppo_clip import Clip, DualClip, clipped_surrogate
from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.types import LossInput, LossOutput
from agentrl.errors import ConfigError

Share = Annotated[float, Field(gt=0, le=1)]
Coefficient = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tokens of a minibatch to pick: `share` of all tokens, at random among those whose covariance
    is in (low, high), or (if `low` is None) those with the largest covariance."""

    share: float
    low: float | None = None
    high: float | None = None


@POLICY_LOSSES.register("clip_cov", needs={"picked"})
def clip_cov(
    batch: LossInput,
    *,
    share: Share = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: Clip = 0.2,
    clip_high: Clip = 0.2,
    dual_clip: DualClip | None = 3.0,
) -> LossOutput:
    """PPO clip, without the loss of the picked tokens."""
    ratio = torch.exp(log_ratio(batch.logprobs, batch.old_logprobs))
    out = clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, dual_clip)
    picked = _picked(batch)
    # Their loss is dropped, not their place in the mean: the denominators were settled before anything was picked.
    loss = torch.where(picked, torch.zeros_like(out.loss), out.loss)
    return LossOutput(loss, {**out.metrics, "picked": picked.float()})


@POLICY_LOSSES.register("kl_cov", needs={"picked"}, traits={"moves_picked"})
def kl_cov(batch: LossInput, *, share: Share = 2e-3, coefficient: Coefficient = 1.0) -> LossOutput:
    """-A r, plus coefficient * |log r| on the picked tokens."""
    delta = log_ratio(batch.logprobs, batch.old_logprobs)
    ratio = torch.exp(delta)
    picked = _picked(batch)
    penalty = torch.where(picked, coefficient * delta.abs(), torch.zeros_like(delta))
    return LossOutput(-batch.advantages * ratio + penalty, {"ratio": ratio.detach(), "picked": picked.float()})


def selection_of(name: str, args: Mapping[str, Any]) -> Selection | None:
    """Which tokens the loss of that name and arguments needs picked, or None."""
    if "picked" not in POLICY_LOSSES.entry(name).needs:
        return None
    given = POLICY_LOSSES.arguments(name, args)
    return Selection(given["share"], given.get("low"), given.get("high"))


def _picked(batch: LossInput) -> torch.Tensor:
    if batch.picked is None:
        raise ConfigError("clip_cov and kl_cov need the picked tokens of the minibatch")
    return batch.picked
