"""Policy losses, one file each. What a loss needs besides logprobs and advantages is declared where it is registered."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.algorithm.types import LossOutput
from agentrl.registry import Registry

POLICY_LOSSES: Registry[Callable[..., LossOutput]] = Registry(
    "algorithm.loss",
    "POLICY_LOSSES",
    "agentrl.algorithm.loss",
    given=1,
    needs={
        "picked": "tokens of the minibatch chosen by covariance, as its arguments share, low and high say",
        "proximal": "recomputed logprobs of the proximal policy",
    },
    traits={
        "moves_picked": "its gradient on a picked token is not 0 even if the advantage is",
        "importance_weighted": "weights tokens by proximal / behavior, as an off-policy correction does",
        "own_samples": "has no ratio of policies: right only for tokens of the weights that are trained",
    },
)
