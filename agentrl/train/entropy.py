"""The coefficient of the entropy bonus, controlled so that the policy's entropy does not fall below a target."""

from __future__ import annotations

from agentrl.config.schema import AlgorithmConfig
from agentrl.config.unread import check_unread
from agentrl.errors import ConfigError


def check_entropy(algorithm: AlgorithmConfig) -> None:
    """Raise ConfigError for a target that no coefficient could be steered to, and for how it is reached without one."""
    if algorithm.entropy_target is None:
        check_unread("algorithm", algorithm, ("entropy_step", "entropy_max"), "algorithm.entropy_target")
    elif algorithm.entropy_max <= algorithm.entropy_bonus:
        raise ConfigError(
            f"algorithm.entropy_target: the coefficient moves between algorithm.entropy_bonus = {algorithm.entropy_bonus:g} and "
            f"algorithm.entropy_max = {algorithm.entropy_max:g}, between which there is nothing; raise entropy_max"
        )


def with_coefficient(algorithm: AlgorithmConfig, coef: float) -> AlgorithmConfig:
    """The section with which an update is made: under a target its `entropy_bonus` is the controlled coefficient."""
    return algorithm if algorithm.entropy_target is None else algorithm.model_copy(update={"entropy_bonus": coef})


def adapted_entropy_coef(coef: float, measured: float, algorithm: AlgorithmConfig) -> float:
    """The next coefficient: `entropy_step` more after an update whose entropy (nats per token) was below the target, as much less
    otherwise, within `entropy_bonus` and `entropy_max`.

    The steps are those of Skywork-OR1 (He et al. 2025, arXiv:2505.22312). Departure: theirs is 0 in an update above the target;
    here it falls back step by step.
    """
    if algorithm.entropy_target is None:
        return coef
    moved = coef + algorithm.entropy_step if measured < algorithm.entropy_target else coef - algorithm.entropy_step
    return min(max(moved, algorithm.entropy_bonus), algorithm.entropy_max)
