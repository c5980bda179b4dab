"""What is refused of a config before a run because algorithm and roles would not do what it says."""

from __future__ import annotations

from agentrl.algorithm import ADVANTAGES, advantages
from agentrl.config.envs import alone, longest_sample, told, trained
from agentrl.config.schema import AlgorithmConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train.distillation import check_distillation
from agentrl.train.entropy import check_entropy
from agentrl.train.experience import check_experience
from agentrl.train.moving import check_moving
from agentrl.train.rates import check_optims
from agentrl.train.role_layout import check_offload, mesh_of
from agentrl.train.update import check_algorithm


def check_learner(config: TrainConfig) -> None:
    """Raise ConfigError for a combination of algorithm and roles that would not do what its settings say.

    Reads: algorithm, critic, data, reward_model, steps, model.replicas, model.sequence_parallel, model.tensor_parallel,
    cluster.actors, model.expert_parallel, rollout.max_turns, rollout.max_turn_tokens,
    rollout.max_episode_tokens; and as `check_offload`, `check_experience`, `check_distillation`, `check_moving` and
    `check_optims`.
    """
    check_optims(config)
    check_algorithm(fill_length_norm(config))
    check_entropy(config.algorithm)
    if config.algorithm.length_norm is not None and config.algorithm.aggregate != "seq_mean_token_sum_norm":
        raise ConfigError(
            f'algorithm.length_norm is the constant of aggregate = "seq_mean_token_sum_norm"; with '
            f'"{config.algorithm.aggregate}" it is not used'
        )
    check_experience(config)
    check_distillation(config)
    mesh_of(config)
    check_offload(config)
    check_moving(config)
    for env in trained(config):
        with told(config, env):
            _check_estimator(alone(config, env))
    names = {alone(config, env).algorithm.advantage.name for env in trained(config)}
    if config.critic is not None and not any("values" in ADVANTAGES.entry(name).needs for name in names):
        users, listed = ADVANTAGES.that_need("values"), ", ".join(f'"{name}"' for name in sorted(names))
        raise ConfigError(
            f"there is a [critic] section, but algorithm.advantage {listed} does not use a critic; use one of {users}"
        )
    if config.critic is not None and config.critic.warmup >= config.steps:
        raise ConfigError(
            f"critic.warmup = {config.critic.warmup}: during these steps only the critic learns, and the run has steps = "
            f"{config.steps}, so the policy would never learn"
        )


def _check_estimator(config: TrainConfig) -> None:
    """Raise ConfigError if the advantage estimator of a config with one environment lacks what it needs."""
    name, kl = config.algorithm.advantage.name, config.algorithm.kl
    advantages(name, config.algorithm.advantage.args)
    needs = ADVANTAGES.entry(name).needs
    if "values" in needs and config.critic is None:
        raise ConfigError(f'algorithm.advantage "{name}" needs a critic: add a [critic] section')
    if needs & {"baseline", "terms"} and config.reward_model is not None:
        raise ConfigError(
            f'algorithm.advantage "{name}" reads scores of the reward spec, and the score of a [reward_model] is not part of it'
        )
    if "terms" in needs and kl.coef > 0 and kl.where == "reward":
        raise ConfigError(
            f'algorithm.advantage "{name}" reads single reward terms, to which algorithm.kl.where = "reward" is '
            'not applied; use where = "loss"'
        )


def fill_length_norm(config: TrainConfig) -> AlgorithmConfig:
    """The algorithm section, with the constant length of `seq_mean_token_sum_norm` filled in."""
    algorithm = config.algorithm
    if algorithm.aggregate != "seq_mean_token_sum_norm" or algorithm.length_norm is not None:
        return algorithm
    return algorithm.model_copy(update={"length_norm": longest_sample(config)})
