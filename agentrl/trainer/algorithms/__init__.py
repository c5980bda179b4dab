"""Advantage estimators and policy losses: one small file each, pure functions on flat ragged columns.

Each file registers its functions by name, with what they need (agentrl/utils/registry.py), and is loaded when that name is
requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
from agentrl.trainer.algorithms.losses import POLICY_LOSSES, correction, kl_estimate, value_loss


def advantages(name: str, args: Mapping[str, Any]) -> Callable[[AdvantageInput], AdvantageOutput]:
    """The estimator `name` with its arguments bound. Raises ConfigError for an unknown name (with the nearest) or argument."""
    return ADVANTAGES.bind(name, args)


def policy_loss(name: str, args: Mapping[str, Any]) -> Callable[[LossInput], LossOutput]:
    """The policy loss `name` with its arguments bound. Raises ConfigError for an unknown name (with the nearest) or argument."""
    return POLICY_LOSSES.bind(name, args)


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
    "correction",
    "kl_estimate",
    "policy_loss",
    "value_loss",
]
