"""Which engine a run uses, by name (rollout/engine_maker.py has the registry); only the chosen backend is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.backends.api.make import API, api_name
from agentrl.config import TrainConfig
from agentrl.registry import Entry
from agentrl.rollout.engine import Engine
from agentrl.rollout.engine_maker import ENGINES, EngineMaker
from agentrl.train.pretrained import model_context

if TYPE_CHECKING:
    from agentrl.backends.api.engine import Transcript
    from agentrl.cluster.placement import Pools

__all__ = ["API", "api_name"]

AUTO = "auto"


def resolve_engine(name: str) -> str:
    """The name of an engine: `auto` is the one that suits this machine best (vLLM on one with a GPU, else embedded).

    Raises ConfigError for an unknown name, DependencyError if what it needs is not installed.
    """
    if name == AUTO:
        return max(ENGINES.own(), key=lambda entry: entry.make.suits()).name
    ENGINES.entry(name).make.check_installed()
    return name


def engine_name(config: TrainConfig) -> str:
    """The engine of a run: what claims its model (an API), else what `engine` says. Raises as `resolve_engine` does."""
    claiming = [entry.name for entry in ENGINES.own() if entry.make.claims(config.model.path)]
    return claiming[0] if claiming else resolve_engine(config.engine)


def engine_of(config: TrainConfig) -> Entry[type[EngineMaker]]:
    """What is registered of the run's engine: its needs and traits. Raises as `resolve_engine` does."""
    return ENGINES.entry(engine_name(config))


def needs_ray(config: TrainConfig) -> bool:
    """Whether a training run must start Ray: for its workers, or for its engine."""
    return config.cluster.backend == "ray" or "ray" in engine_of(config).needs


def maker_of(name: str, config: TrainConfig) -> EngineMaker:
    """The maker of that engine with the config's `engine_args`. Raises ConfigError for an argument that it does not take."""
    maker: EngineMaker = ENGINES.bind(name, config.engine_args)(config)
    return maker


def make_engine(name: str, model: str, config: TrainConfig, pools: Pools | None = None) -> Engine:
    """The engine, not started. `name` is what `resolve_engine` gave, `model` a folder or hub name; with
    `pools`, the engine's own processes run where the role "rollout" is placed."""
    ray_options = pools.ray_options("rollout") if pools is not None and "rollout" in pools else ()
    return maker_of(name, config).make(model, model_context(model), ray_options)


def make_api_engine(config: TrainConfig, transcript: Transcript) -> Engine:
    """The engine of a model whose ids are messages (`api:NAME`, asked as the config's `api` section says)."""
    return maker_of(engine_name(config), config).make_with(transcript)
