"""Whether episodes can begin after gold calls (`rollout.start`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.env import ToolEnv
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import ConfigError
from agentrl.rollout.context.base import CONTEXTS
from agentrl.rollout.sampler.base import fresh_seed, make_sampler

TASKS = 4
"""Tasks of each set of parameters of which the gold solution is asked for."""
NO_GOLD = "its tasks have no gold solution"


def check_start(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming what is in the way, if gold calls cannot be made before the policy begins.

    Reads: rollout.start, rollout.context, rollout.sampler, env, agent, seed.
    """
    if one.rollout.start is not None and (why := _obstacle(one, ref)) is not None:
        raise ConfigError(f"rollout.start ({one.envs[0].called}): {why}; leave rollout.start out")


def _obstacle(one: TrainConfig, ref: EnvRef) -> str | None:
    if (why := elsewhere(ref)) is not None:
        return why
    if one.agent is not None:
        return "[agent]: an agent that plays by itself begins at the beginning"
    if "summarizes" in CONTEXTS.entry(one.rollout.context.name).traits:
        return f"rollout.context = {one.rollout.context.name!r}: the policy would write summaries of turns that are not its own"
    for choice in ref.wrappers:
        if "chance_faults" in WRAPPERS.entry(choice.name).traits:
            return f"env.wrappers: with {choice.name!r} tools fail at random, and gold calls with them"
    for env in each_env(one, ref):
        if env.user_models():
            return "its user is a model, which would have to answer gold turns too"
        if no_gold(one, env):
            return NO_GOLD
    return None


def elsewhere(ref: EnvRef) -> str | None:
    """Why the gold solutions of an environment are not known here; None if it is here."""
    if ref.at is None:
        return None
    return f"env.url = {ref.at.url!r}: the gold solutions of an environment elsewhere are not asked for in a run"


def each_env(one: TrainConfig, ref: EnvRef) -> Iterator[ToolEnv]:
    """The environment with each set of parameters that the sampler may choose; closed when the next is asked for."""
    for params in make_sampler(one.rollout.sampler).variants():
        with closing(ref.with_params(params).build()) as env:
            yield env


def no_gold(one: TrainConfig, env: ToolEnv) -> bool:
    """Whether none of its first tasks of training has a gold solution."""
    return all(env.horizon(env.make_task(fresh_seed(one.seed, n), "train")) is None for n in range(TASKS))
