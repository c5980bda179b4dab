"""Whether gold solutions can be shown in updates (`algorithm.demonstrations`)."""

from __future__ import annotations

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import trained_at_all
from agentrl.errors import ConfigError
from agentrl.rollout.context.base import CONTEXTS
from agentrl.run.checks.start import NO_GOLD, each_env, elsewhere, no_gold


def check_demonstrations(one: TrainConfig, ref: EnvRef) -> None:
    """Raise ConfigError, naming what is in the way, if there is no gold solution that an update could show.

    Reads: algorithm.demonstrations, rollout.context, rollout.sampler, env, tools.sets, tools.mcp, agent, seed.
    """
    if one.algorithm.demonstrations is None or not trained_at_all(one.envs[0].weight):
        return
    if (why := _obstacle(one, ref)) is not None:
        raise ConfigError(f"algorithm.demonstrations ({one.envs[0].called}): {why}; leave algorithm.demonstrations out")


def _obstacle(one: TrainConfig, ref: EnvRef) -> str | None:
    if (why := elsewhere(ref)) is not None:
        return why
    if one.agent is not None:
        return "[agent]: an agent writes prompts of its own, which a gold solution does not have"
    if "summarizes" in CONTEXTS.entry(one.rollout.context.name).traits:
        return f"rollout.context = {one.rollout.context.name!r}: a gold solution has no summaries, which the policy would write"
    return NO_GOLD if any(no_gold(one, env) for env in each_env(one, ref)) else None
