"""Checks of the rollout section of a config."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import the_env
from agentrl.config.temperature import check_temperatures
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import AgentrlError, ConfigError
from agentrl.rollout.accept import FILTERS
from agentrl.rollout.context.base import CONTEXTS, make_context_policy
from agentrl.rollout.engine_maker import ENGINES
from agentrl.rollout.sampler.base import make_sampler
from agentrl.rollout.sampler.source import TaskSource
from agentrl.run.engines import engine_of


def check_rollout(config: TrainConfig, env: EnvRef) -> None:
    """Raise ConfigError if the sampler, the environment parameters that it sets, or the context policy cannot work.

    Reads: rollout.temperature, rollout.sampler, rollout.accept, rollout.context, rollout.summary_model, rollout.colocate,
    rollout.max_staleness, rollout.filter_zero_variance, rollout.grow, rollout.group_size, rollout.oversample_members,
    eval.temperature, algorithm.experience, reward_model, weights.lora, engine, env, seed.
    """
    rollout = config.rollout
    check_temperatures(config)
    if rollout.accept is not None:
        FILTERS.bind(rollout.accept.name, rollout.accept.args)
    source = TaskSource(env, make_sampler(rollout.sampler), rollout.sampler.name, config.seed)
    for params in source.sampler.variants():
        try:
            env.with_params(params).build().close()
        except AgentrlError as problem:
            raise ConfigError(f"rollout.sampler: with env.params = {dict(params)!r}: {problem}") from problem
    if rollout.colocate:
        _check_colocated(config)
    if rollout.filter_zero_variance and config.reward_model is not None:
        raise ConfigError(
            "rollout.filter_zero_variance drops groups by the spec's rewards, before [reward_model] has scored "
            "them, so it would drop groups that the reward model tells apart; unset one of the two"
        )
    _check_grow(config)
    make_context_policy(rollout.context)
    traits = CONTEXTS.entry(rollout.context.name).traits
    if rollout.summary_model is not None and "summarizes" not in traits:
        names = CONTEXTS.that_are("summarizes")
        raise ConfigError(f"rollout.summary_model: only rollout.context.name = {names} uses summaries")


def _check_grow(config: TrainConfig) -> None:
    if config.rollout.grow == 1:
        return
    if config.rollout.oversample_members > 1:
        raise ConfigError(
            "rollout.grow looks at the scores of all members of a group, and rollout.oversample_members drops the slowest of "
            "them unseen; set one of the two to 1"
        )
    if config.reward_model is not None:
        raise ConfigError(
            "rollout.grow gives groups more members by the spec's rewards, before [reward_model] has scored them; unset one "
            "of the two"
        )
    if config.rollout.group_size == 1:
        raise ConfigError("rollout.grow: with rollout.group_size = 1 every group would grow; set it to 2 or more")


def check_trainable(config: TrainConfig) -> None:
    """Raise ConfigError if sampling is greedy, or if the policy could escape a reward.

    Reads: rollout.temperature, env.wrappers.
    """
    given = config.rollout.temperature
    if 0 in ([value for _, value in given] if isinstance(given, list) else [given]):
        raise ConfigError(
            "rollout.temperature = 0: greedy episodes of a task are all the same, so there is nothing to learn "
            "from them; training needs at least 0.01 (eval.temperature = 0 makes evaluations greedy)"
        )
    for choice in the_env(config).wrappers:
        if "wall_clock" not in WRAPPERS.entry(choice.name).traits:
            continue
        raise ConfigError(
            f"env.wrappers: {choice.name} counts wall-clock time (queues and publishes too), and episodes that it cuts are "
            "unscored, so a policy could escape a bad reward by being slow; use rollout.episode_timeout"
        )


def _check_colocated(config: TrainConfig) -> None:
    if config.rollout.max_staleness > 0:
        raise ConfigError("rollout.colocate: an engine that sleeps during updates needs rollout.max_staleness = 0")
    if "sleeps" not in engine_of(config).traits:
        raise ConfigError(f"rollout.colocate: only engine = {ENGINES.that_are('sleeps')} can free its memory")
    if config.weights.lora == "adapter" and "keeps" not in engine_of(config).traits:
        raise ConfigError(
            'rollout.colocate: an engine that slept has lost the base weights of the adapter; use weights.lora = "merged", or '
            f"engine = {ENGINES.that_are('keeps')}, which keeps them"
        )
