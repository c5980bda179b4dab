"""Checks of `rollout.router_replay`."""

from __future__ import annotations

from agentrl.config import TrainConfig
from agentrl.errors import ConfigError, ModelError
from agentrl.experts import Routers
from agentrl.rollout.engine_maker import ENGINES
from agentrl.run.engines import engine_of
from agentrl.train.pretrained import meta_model


def check_router_replay(config: TrainConfig) -> None:
    """Raise ConfigError if routers are to be replayed for an engine that does not tell what they chose, for a dense model, or for
    one whose choices cannot be repeated.

    Reads: rollout.router_replay, engine, model.
    """
    if not config.rollout.router_replay:
        return
    if "experts" not in (entry := engine_of(config)).traits:
        raise ConfigError(
            f"rollout.router_replay: engine = {entry.name} does not tell which experts a token went to; engines that do: "
            f"{ENGINES.that_are('experts')}"
        )
    if config.model.compile:
        raise ConfigError("rollout.router_replay: routers of compiled layers cannot be told what to choose; unset model.compile")
    routers, model = Routers(meta_model(config.model)), config.model.path or "[model.init]"
    if not len(routers) and not routers.problem:
        raise ConfigError(f"rollout.router_replay: {model} is a dense model, which has no routers; set it to false")
    try:
        routers.probe()
    except ModelError as problem:
        raise ConfigError(f"rollout.router_replay: {model}: {problem}") from None
