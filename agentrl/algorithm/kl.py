"""Estimators of KL(pi || ref) from one sample per token (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.algorithm.loss.ratio import log_ratio
from agentrl.registry import Registry

KL: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "kl",
    "KL",
    "agentrl.algorithm.kl",
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
    d = log_ratio(logprobs, reference)
    return torch.expm1(-d) + d


def kl_estimate(name: str, logprobs: Tensor, reference: Tensor, straight_through: bool = False) -> Tensor:
    """The estimator `name` on [T] columns; with `straight_through`, its value with the gradient of k2.

    Raises ConfigError for an unknown name.
    """
    value = KL.entry(name).make(logprobs, reference)
    if not straight_through:
        return value
    proxy = k2(logprobs, reference)
    return value.detach() + proxy - proxy.detach()  # the proxy cancels in the value, up to rounding, and leaves its gradient
