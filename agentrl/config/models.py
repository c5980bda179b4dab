"""The models that a config names besides the policy's."""

from __future__ import annotations

from agentrl.config.schema import TrainConfig


def judge_models(config: TrainConfig) -> dict[str, str]:
    """By key, the models of the judges on the run's own engines, each with a tokenizer of its own."""
    return {f"reward.judge.engines.{name}.path": one.path for name, one in config.reward.judge.engines.items()}


def other_models(config: TrainConfig) -> dict[str, str]:
    """By the key that names them, the folders or hub names of the models of other roles than the policy's. A critic that starts
    from the policy's model has none."""
    taught = config.algorithm.distillation
    named = {
        "critic.path": None if config.critic is None else config.critic.path,
        "reward_model.path": None if config.reward_model is None else config.reward_model.path,
        "algorithm.distillation.path": None if taught is None else taught.path,
    }
    return {key: path for key, path in named.items() if path is not None}
