"""Advantage estimators and policy losses: pure functions on flat ragged columns, registered by name."""

from __future__ import annotations

from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import (
    AdvantageInput,
    AdvantageOutput,
    Denominators,
    LossInput,
    LossOutput,
    Mode,
    aggregate,
)
from agentrl.trainer.algorithms.losses import POLICY_LOSSES, kl_estimate, value_loss

advantages = ADVANTAGES.bind
"""`advantages(name, args)`: the estimator with its arguments bound. Raises ConfigError for an unknown name or argument."""
policy_loss = POLICY_LOSSES.bind
"""`policy_loss(name, args)`: the same of a policy loss."""

__all__ = [
    "ADVANTAGES",
    "POLICY_LOSSES",
    "AdvantageInput",
    "AdvantageOutput",
    "Denominators",
    "LossInput",
    "LossOutput",
    "Mode",
    "advantages",
    "aggregate",
    "kl_estimate",
    "policy_loss",
    "value_loss",
]
