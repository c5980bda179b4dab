"""Whether gold solutions can be shown in updates (`algorithm.demonstrations`)."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import trained_at_all
from agentrl.errors import ConfigError
from agentrl.rollout.sampler.base import fresh_seed, make_sampler

TASKS = 4
"""Tasks of each set of parameters of which the gold solution is asked for."""


def check_demonstrations(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming what is in the way, if there is no gold solution that an update could show.

    Reads: algorithm.demonstrations, rollout.sampler, env, tools.sets, tools.mcp, agent, seed.
    """
    if one.algorithm.demonstrations is None or not trained_at_all(one.envs[0].weight):
        return
    if (why := _obstacle(one, ref)) is not None:
        raise ConfigError(f"algorithm.demonstrations ({one.envs[0].called}): {why}; leave algorithm.demonstrations out")


def _obstacle(one: TrainConfig, ref: EnvRef) -> str | None:
    if ref.at is not None:
        return f"env.url = {ref.at.url!r}: the gold solutions of an environment elsewhere are not asked for in a run"
    if one.agent is not None:
        return "[agent]: an agent writes prompts of its own, which a gold solution does not have"
    for params in make_sampler(one.rollout.sampler).variants():
        env = ref.with_params(params).build()
        try:
            if all(env.horizon(env.make_task(fresh_seed(one.seed, n), "train")) is None for n in range(TASKS)):
                return "its tasks have no gold solution"
        finally:
            env.close()
    return None
