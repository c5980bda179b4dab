"""The temperature of training: one number, or one for each update on lines between points (`rollout.temperature`)."""

from __future__ import annotations

from agentrl.config.envs import weight_at
from agentrl.config.schema import RolloutConfig, TrainConfig
from agentrl.errors import ConfigError

LEAST_TEMPERATURE = 0.01


def temperature_at(rollout: RolloutConfig, version: int) -> float:
    """The temperature at which the episodes of the update after `version` others are sampled, and at which it is computed."""
    return weight_at(rollout.temperature, version)


def scheduled(rollout: RolloutConfig, version: int) -> float | None:
    """`temperature_at`, or None if it is one number for the whole run."""
    return temperature_at(rollout, version) if isinstance(rollout.temperature, list) else None


def one_temperature(rollout: RolloutConfig, what: str) -> float:
    """The only temperature. Raises ConfigError for points: `what` has no updates that they could be told by."""
    if isinstance(rollout.temperature, list):
        raise ConfigError(
            f"rollout.temperature: points [step, temperature] are followed by the updates of `agentrl train`, and {what} has no "
            f"number of updates; give one number, such as rollout.temperature={rollout.temperature[-1][1]:g}"
        )
    return rollout.temperature


def check_temperatures(config: TrainConfig) -> None:
    """Raise ConfigError for temperatures that cannot be sampled at, and for points beside what trains tokens of other updates.

    Reads: rollout.temperature, rollout.max_staleness, eval.temperature, algorithm.experience.
    """
    given = config.rollout.temperature
    points = given if isinstance(given, list) else [(0, given)]
    for section, value in (*(("rollout", value) for _, value in points), ("eval", config.eval.temperature)):
        if 0 < value < LEAST_TEMPERATURE:
            raise ConfigError(
                f"{section}.temperature = {value:g}: expected 0 (greedy) or at least {LEAST_TEMPERATURE:g}; "
                "vLLM raises lower values to 0.01"
            )
    if not isinstance(given, list):
        return
    steps = [step for step, _ in given]
    if not steps or steps != sorted(set(steps)):
        raise ConfigError(f"rollout.temperature: expected points [step, temperature] with ascending steps, got {steps}")
    # What is trained is softmax(logits / T) with the T of the update; every token must have been sampled at it.
    other = None
    if config.rollout.max_staleness > 0:
        other = f"rollout.max_staleness = {config.rollout.max_staleness} trains tokens that earlier updates' episodes sampled"
    elif config.algorithm.experience is not None:
        other = "algorithm.experience trains episodes of earlier updates"
    if other is not None:
        raise ConfigError(
            f"rollout.temperature: with points each update has a temperature of its own, and {other}, at another one; give one "
            "number, or leave that out"
        )
