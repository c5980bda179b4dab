"""Whether episodes can begin after gold calls (`rollout.start`)."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import ConfigError
from agentrl.rollout.context.base import CONTEXTS
from agentrl.rollout.sampler.base import fresh_seed, make_sampler

TASKS = 4
"""Tasks of each set of parameters of which the gold solution is asked for."""


def check_start(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming what is in the way, if gold calls cannot be made before the policy begins.

    Reads: rollout.start, rollout.context, rollout.sampler, env, agent, seed.
    """
    if one.rollout.start is not None and (why := _obstacle(one, ref)) is not None:
        raise ConfigError(f"rollout.start ({one.envs[0].called}): {why}; leave rollout.start out")


def _obstacle(one: TrainConfig, ref: EnvRef) -> str | None:
    if ref.at is not None:
        return f"env.url = {ref.at.url!r}: the gold solutions of an environment elsewhere are not asked for in a run"
    if one.agent is not None:
        return "[agent]: an agent that plays by itself begins at the beginning"
    if "summarizes" in CONTEXTS.entry(one.rollout.context.name).traits:
        return f"rollout.context = {one.rollout.context.name!r}: the policy would write summaries of turns that are not its own"
    for choice in ref.wrappers:
        if "chance_faults" in WRAPPERS.entry(choice.name).traits:
            return f"env.wrappers: with {choice.name!r} tools fail at random, and gold calls with them"
    for params in make_sampler(one.rollout.sampler).variants():
        env = ref.with_params(params).build()
        try:
            if env.user_models():
                return "its user is a model, which would have to answer gold turns too"
            if all(env.horizon(env.make_task(fresh_seed(one.seed, n), "train")) is None for n in range(TASKS)):
                return "its tasks have no gold solution"
        finally:
            env.close()
    return None
