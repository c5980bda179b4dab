"""Advantage estimators and policy losses: pure functions on flat ragged columns, registered by name."""

from __future__ import annotations

from agentrl.trainer.algorithms.advantages import ADVANTAGES
from agentrl.trainer.algorithms.base import AdvantageInput, AdvantageOutput, LossInput, LossOutput
from agentrl.trainer.algorithms.losses import POLICY_LOSSES

advantages = ADVANTAGES.bind
"""`advantages(name, args)` -> estimator with bound arguments. Raises ConfigError for an unknown name or argument."""
policy_loss = POLICY_LOSSES.bind
"""`policy_loss(name, args)` -> policy loss with bound arguments. Raises ConfigError like `advantages`."""

__all__ = [
    "ADVANTAGES", "POLICY_LOSSES", "AdvantageInput", "AdvantageOutput", "LossInput", "LossOutput", "advantages", "policy_loss",
]  # fmt: skip
