"""Estimators of KL(pi || ref) from one sample a token (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.algorithm.registry import lookup


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d = log pi - log ref: unbiased in value."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: biased in value, and its gradient is that of the KL."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """exp(-d) - 1 + d: unbiased in value and never negative; d is clamped to +-20.

    By expm1: in float32 exp(-d) - 1 keeps nothing of a d^2 / 2 below 1e-7, and can be negative.
    """
    d = log_ratio(logprobs, reference)
    return torch.expm1(-d) + d


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimate(name: str, logprobs: Tensor, reference: Tensor, straight_through: bool = False) -> Tensor:
    """The estimator `name` on [T] columns; with `straight_through` its value, but the gradient of k2.

    Raises ConfigError for an unknown name.
    """
    value = lookup("kl", KL, name)(logprobs, reference)
    if not straight_through:
        return value
    proxy = k2(logprobs, reference)
    return value.detach() + proxy - proxy.detach()
