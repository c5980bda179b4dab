"""Policy losses, value loss, off-policy corrections and KL estimators on sampled tokens: pure functions.

Each registration declares the inputs that its loss needs in addition to log probabilities and advantages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from agentrl.data.rows import row_mean, row_sum, spread
from agentrl.trainer.algorithms.base import LossInput, LossOutput
from agentrl.utils.errors import ConfigError
from agentrl.utils.registry import Registry

# Importance ratios

LIMIT = 20.0


def clamp_exponent(log_ratio: Tensor) -> Tensor:
    """Clamp log(pi_new / pi_old), or its sum or mean over a row, to +-20: its exponential stays finite in float32.

    Clamp a sum or mean after taking it, not token by token. No paper has this bound; beyond it the gradient is 0.
    """
    return torch.clamp(log_ratio, -LIMIT, LIMIT)


# Policy losses

POLICY_LOSSES: Registry[Callable[..., LossOutput]] = Registry(
    "algorithm.loss",
    "POLICY_LOSSES",
    "agentrl.trainer.algorithms.losses",
    given=1,
    needs={
        "picked": "tokens of the minibatch chosen by covariance (arguments share, low, high)",
        "proximal": "recomputed logprobs of the proximal policy",
    },
    traits={
        "sequence_ratio": "has one ratio per row, clipped by its arguments clip_low and clip_high",
        "clips_tokens": "with a sequence ratio: clips each token's log ratio before averaging",
        "moves_picked": "has a gradient on picked tokens even if their advantage is 0",
        "importance_weighted": "weights tokens by proximal / behavior, like an off-policy correction",
        "own_samples": "has no ratio of policies: right only for tokens sampled by the weights that are trained",
    },
)


@POLICY_LOSSES.register("reinforce", traits={"own_samples"})
def reinforce(batch: LossInput) -> LossOutput:
    """-A log pi; exact if the tokens were sampled with the weights that are being trained."""
    return LossOutput(-batch.advantages * batch.logprobs)


Clip = Annotated[float, Field(ge=0)]
DualClip = Annotated[float, Field(gt=1)]
Positive = Annotated[float, Field(gt=0)]


@POLICY_LOSSES.register("ppo_clip")
def ppo_clip(batch: LossInput, *, clip_low: Clip = 0.2, clip_high: Clip = 0.2, dual_clip: DualClip | None = 3.0) -> LossOutput:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and at most -dual_clip * A if A < 0; r = theta / old."""
    ratio = torch.exp(clamp_exponent(batch.logprobs - batch.old_logprobs))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, dual_clip)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossOutput:
    """Compute the clipped surrogate of a ratio [T]; metrics: the ratio and the fraction of tokens clipped by each bound."""
    plain = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    # The larger of the two losses: clipping removes the gain of moving further, and keeps the loss of having moved too far.
    loss = torch.maximum(plain, clipped)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clipped > plain).float()}
    if dual_clip is not None:
        # With A < 0 nothing above bounds r, and one token with a large ratio would outweigh the whole batch.
        floor = -advantages * dual_clip
        bounded = (advantages < 0) & (floor < loss)
        metrics["dual_clip_fraction"] = bounded.float()
        loss = torch.where(bounded, floor, loss)
    return LossOutput(loss, metrics)


@POLICY_LOSSES.register("decoupled_ppo", needs={"proximal"}, traits={"importance_weighted"})
def decoupled_ppo(
    batch: LossInput,
    *,
    clip_low: Clip = 0.2,
    clip_high: Clip = 0.2,
    dual_clip: DualClip | None = 3.0,
    weight_cap: DualClip | None = None,
) -> LossOutput:
    """PPO clip on theta / proximal, times the detached weight proximal / behavior (at most `weight_cap`)."""
    out = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = torch.exp(clamp_exponent(batch.old_logprobs - batch.behaviour_logprobs)).detach()
    if weight_cap is not None:
        weight = weight.clamp(max=weight_cap)
    return replace(out, loss=out.loss * weight, metrics={**out.metrics, "behaviour_weight": weight})


@POLICY_LOSSES.register("cispo")
def cispo(batch: LossInput, *, clip_low: Clip = 1.0, clip_high: Clip = 5.0) -> LossOutput:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi. With low = 1 (the default) there is no lower bound."""
    ratio = torch.exp(clamp_exponent(batch.logprobs - batch.old_logprobs)).detach()
    weight = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio, "clip_fraction": (weight != ratio).float()}
    return LossOutput(-weight * batch.advantages * batch.logprobs, metrics)


@POLICY_LOSSES.register("dppo")
def dppo(batch: LossInput, *, divergence: Literal["tv", "kl"] = "tv", delta: Positive = 0.15) -> LossOutput:
    """-r A; 0 on a token that moved too far in the direction of A: (r - 1) A > 0 and divergence above `delta`.

    The divergence is of two outcomes, this token or any other: abs(p - p_old) ("tv"), or
    p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)) ("kl")."""
    log_r = clamp_exponent(batch.logprobs - batch.old_logprobs)
    p, old = batch.logprobs.detach().exp(), batch.old_logprobs.exp()
    if divergence == "tv":
        moved = (p - old).abs()
    else:
        moved = (
            old * (batch.old_logprobs - batch.logprobs.detach())
            + torch.special.xlogy(1 - old, 1 - old)
            - torch.special.xlogy(1 - old, 1 - p)
        )
    outside = (log_r.detach() * batch.advantages > 0) & (moved > delta)
    ratio = log_r.exp()
    loss = torch.where(outside, 0.0, -ratio * batch.advantages)
    return LossOutput(loss, {"ratio": ratio.detach(), "clip_fraction": outside.float()})


@POLICY_LOSSES.register("gspo", traits={"sequence_ratio"})
def gspo(batch: LossInput, *, clip_low: Clip = 3e-4, clip_high: Clip = 4e-4) -> LossOutput:
    """PPO clip on s = exp(mean log-ratio of the sequence); use with `aggregate = "seq_mean_token_mean"`.

    Every token's ratio has the value s and a gradient through that token alone (the paper's GSPO-token form), which equals the
    gradient of s if the sequence has one advantage. A sequence is one ledger, i.e. one context of the model: the paper's bounds
    of 3e-4 apply to means over one context. The aggregate decides the weight of an episode of several ledgers.
    """
    mean = row_mean(batch.logprobs.detach() - batch.old_logprobs, batch.mask, batch.offsets)
    # The detached mean gives the value; the difference, 0 up to rounding, gives the gradient.
    ratio = torch.exp(clamp_exponent(spread(mean, batch.offsets, len(batch.mask)) + batch.logprobs - batch.logprobs.detach()))
    return clipped_surrogate(ratio, batch.advantages, clip_low, clip_high, None)


@POLICY_LOSSES.register("gmpo", traits={"sequence_ratio", "clips_tokens"})
def gmpo(batch: LossInput, *, clip_low: Clip = 0.4, clip_high: Clip = 0.4) -> LossOutput:
    """-A (product of the row's clipped token ratios)^(1 / length) on each token; use `aggregate = "seq_mean_token_mean"`.

    A token's log-ratio is clipped to [-low, high] on the side that PPO clips for the sign of A. A is the mean advantage of the
    row (tokens differ only with turn-level estimators, which the paper does not have). A row is one ledger, as in `gspo`. The
    paper's 0.4 is the exponent of its bounds exp(-0.4) and exp(0.4).
    """
    delta = batch.logprobs - batch.old_logprobs
    tokens = len(batch.mask)
    advantage = spread(row_mean(batch.advantages, batch.mask, batch.offsets), batch.offsets, tokens)
    clamped = torch.clamp(delta, -clip_low, clip_high)
    # One side only, like the minimum in PPO: a token that moved the wrong way must keep its gradient.
    chosen = torch.where(advantage > 0, torch.minimum(delta, clamped), torch.maximum(delta, clamped))
    ratio = torch.exp(clamp_exponent(spread(row_mean(chosen, batch.mask, batch.offsets), batch.offsets, tokens)))
    return LossOutput(-advantage * ratio, {"ratio": ratio.detach(), "clip_fraction": (chosen != delta).float()})


@POLICY_LOSSES.register("sapo")
def sapo(batch: LossInput, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05) -> LossOutput:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with a separate tau for A <= 0; at r = 1 its gradient equals PPO's."""
    ratio = torch.exp(clamp_exponent(batch.logprobs - batch.old_logprobs))
    tau = torch.full_like(ratio, tau_negative).masked_fill(batch.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossOutput(-gate * batch.advantages, {"ratio": ratio.detach()})


Share = Annotated[float, Field(gt=0, le=1)]
Coefficient = Annotated[float, Field(ge=0)]


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
    """PPO clip with a loss of 0 on the picked tokens."""
    out = ppo_clip(batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    picked = _picked_mask(batch)
    # Picked tokens still count in the mean: the denominators were computed before the selection.
    loss = torch.where(picked, torch.zeros_like(out.loss), out.loss)
    return LossOutput(loss, {**out.metrics, "picked": picked.float()})


@POLICY_LOSSES.register("kl_cov", needs={"picked"}, traits={"moves_picked"})
def kl_cov(batch: LossInput, *, share: Share = 2e-3, coefficient: Coefficient = 1.0) -> LossOutput:
    """-A r, plus coefficient * |log r| on the picked tokens."""
    delta = clamp_exponent(batch.logprobs - batch.old_logprobs)
    ratio = torch.exp(delta)
    picked = _picked_mask(batch)
    penalty = torch.where(picked, coefficient * delta.abs(), torch.zeros_like(delta))
    return LossOutput(-batch.advantages * ratio + penalty, {"ratio": ratio.detach(), "picked": picked.float()})


def _picked_mask(batch: LossInput) -> torch.Tensor:
    if batch.picked is None:
        raise ConfigError("clip_cov and kl_cov need the picked tokens of the minibatch")
    return batch.picked


# The critic


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """1/2 max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) per token, [T]."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain
    near = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * torch.maximum(plain, (near - returns).square())


# Off-policy corrections


CORRECTIONS: Registry[Callable[..., Tensor]] = Registry(
    "algorithm.correction",
    "CORRECTIONS",
    "agentrl.trainer.algorithms.losses",
    given=4,
    traits={"importance_weighted": "weights tokens by proximal / behavior instead of only rejecting some"},
)
"""(proximal [T], behavior [T], mask [T], offsets [N + 1]) -> weights [T]; 0 rejects the token."""


@CORRECTIONS.register("truncated", traits={"importance_weighted"})
def truncate_ratios(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Positive = 2.0) -> Tensor:
    """Truncated importance sampling per token: min(exp(d), cap)."""
    return torch.exp(clamp_exponent(prox - behave)).clamp(max=cap)


@CORRECTIONS.register("truncated_sequence", traits={"importance_weighted"})
def truncated_sequence(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Positive = 2.0) -> Tensor:
    """Truncated importance sampling per row: min(exp(sum d), cap) on each of its tokens."""
    return torch.exp(_row_total(prox, behave, mask, offsets)).clamp(max=cap)


@CORRECTIONS.register("masked", traits={"importance_weighted"})
def mask_ratios(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Positive = 2.0) -> Tensor:
    """Masked importance sampling per token: exp(d) if it is at most cap, else the token is rejected."""
    return _within(torch.exp(clamp_exponent(prox - behave)), 0.0, cap)


@CORRECTIONS.register("masked_sequence", traits={"importance_weighted"})
def masked_sequence(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, cap: Positive = 2.0) -> Tensor:
    """Masked importance sampling per row: exp(sum d) if it is at most cap, else the row is rejected."""
    return _within(torch.exp(_row_total(prox, behave, mask, offsets)), 0.0, cap)


@CORRECTIONS.register("icepop", traits={"importance_weighted"})
def icepop(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, low: Positive = 0.5, high: Positive = 5.0) -> Tensor:
    """IcePop (Ling team 2025, arXiv:2510.18855): exp(d) if it is within [low, high], else the token is rejected."""
    return _within(torch.exp(clamp_exponent(prox - behave)), low, high)


@CORRECTIONS.register("kpop", traits={"importance_weighted"})
def kpop(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, phi: Positive = 0.1) -> Tensor:
    """KPop (Guo et al. 2026, ringtech.notion.site/kpop): exp(d) if the KL divergence of the choice between this token
    and any other is at most `phi` in both directions, else the token is rejected."""
    p, q = torch.stack([prox, behave]).double().exp()
    # Departure: 1 - p is at least 1e-6, as a probability rounded to 1 would have an infinite divergence.
    moved, other = prox - behave, torch.log((1 - p).clamp(min=1e-6) / (1 - q).clamp(min=1e-6))
    divergence = torch.maximum(p * moved + (1 - p) * other, -q * moved - (1 - q) * other)
    return torch.where(divergence <= phi, torch.exp(clamp_exponent(prox - behave)), 0.0)


@CORRECTIONS.register("reject_sequence")
def reject_sequence(
    prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor, *, low: Positive = 0.99, high: Positive = 1.01
) -> Tensor:
    """Reject rows with a geometric mean ratio outside of [low, high]; the others keep weight 1."""
    mean = torch.exp(spread(clamp_exponent(row_mean(prox - behave, mask, offsets)), offsets))
    return ((mean >= low) & (mean <= high)).to(prox.dtype)


def _row_total(prox: Tensor, behave: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    # Clamp the sum, not each token, which would change the product of a long row.
    delta = torch.where(mask, prox - behave, torch.zeros_like(prox))
    return spread(clamp_exponent(row_sum(delta, offsets)), offsets)


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


# KL estimators

KL: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "kl",
    "KL",
    "agentrl.trainer.algorithms.losses",
    given=2,
    traits={"idle_gradient": "its gradient has mean 0, so as a loss it does not restrain the policy"},
)


@KL.register("k1", traits={"idle_gradient"})
def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d = log pi - log ref: unbiased in value."""
    return logprobs - reference


@KL.register("k2")
def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: biased in value, and its gradient is that of the KL."""
    return 0.5 * (logprobs - reference).square()


@KL.register("k3")
def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased in value and never negative; d is clamped to +-20.

    Computed by expm1: in float32, exp(-d) - 1 + d loses a d^2 / 2 below 1e-7 to rounding, and can be negative.
    """
    d = clamp_exponent(logprobs - reference)
    return torch.expm1(-d) + d


def kl_estimate(name: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """Compute the KL estimator `name` on [T] columns; "NAME+" has its value and the gradient of k2.

    Raises ConfigError for an unknown name.
    """
    value = KL.entry(name.removesuffix("+")).make(logprobs, reference)
    if not name.endswith("+"):
        return value
    proxy = k2(logprobs, reference)
    return value.detach() + proxy - proxy.detach()  # the value of `value`, up to rounding, with the gradient of the proxy
