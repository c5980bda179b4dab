"""All registries, by the config key that takes their names."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from agentrl.config.keys import inline
from agentrl.utils.errors import UserError
from agentrl.utils.registry import Registry

REGISTRIES = {
    "algorithm.advantage": ("agentrl.trainer.algorithms.advantages", "ADVANTAGES"),
    "algorithm.correction": ("agentrl.trainer.algorithms.losses", "CORRECTIONS"),
    "algorithm.kl.kind": ("agentrl.trainer.algorithms.losses", "KL"),
    "algorithm.loss": ("agentrl.trainer.algorithms.losses", "POLICY_LOSSES"),
    "callbacks": ("agentrl.run.callbacks", "CALLBACKS"),
    "engine": ("agentrl.rollout.engine", "ENGINES"),
    "env.sandbox.provider": ("agentrl.env.address", "SANDBOXES"),
    "env.wrappers": ("agentrl.env.wrappers", "WRAPPERS"),
    "model.engine": ("agentrl.trainer.train_engine", "TRAIN_ENGINES"),
    "rollout.accept": ("agentrl.rollout.collector", "FILTERS"),
    "rollout.context": ("agentrl.rollout.context", "CONTEXTS"),
    "rollout.mixture": ("agentrl.rollout.mixtures", "MIXTURES"),
    "rollout.sampler": ("agentrl.rollout.samplers", "SAMPLERS"),
    "trackers": ("agentrl.run.trackers", "TRACKERS"),
    "weights.route": ("agentrl.engines.weights.base", "ROUTES"),
}
"""Config key -> module and name of its registry; imported on demand, because most modules load torch."""
ALIASES = {"env.sampler": "rollout.sampler", "env.advantage": "algorithm.advantage"}
"""Keys of an environment -> key of the run that takes the same names."""


@dataclass(frozen=True, slots=True)
class RegisteredName:
    """A registered name: its meaning, and its arguments with defaults as TOML, "unset" or "required"."""

    name: str
    meaning: str
    args: dict[str, str] = field(default_factory=dict)


def registry_of(key: str) -> Registry[Any] | None:
    """Import the registry of the names that a config key takes; None if it takes none."""
    home = REGISTRIES.get(ALIASES.get(key, key))
    return None if home is None else getattr(import_module(home[0]), home[1])


def names_of(key: str) -> list[RegisteredName]:
    """List the names that a key takes, with their arguments, or with the error if a name cannot be loaded."""
    found: list[RegisteredName] = []
    if (registry := registry_of(key)) is None:
        return found
    for name in registry:
        try:
            make, parameters = registry.entry(name).make, registry.parameters(name)
        except UserError as problem:
            found.append(RegisteredName(name, f"cannot be loaded: {problem}"))
            continue
        about = inspect.cleandoc(make.__doc__ or "").split("\n\n")[0]
        args = {}
        for key, parameter in parameters.items():
            value = parameter.default
            if value is inspect.Parameter.empty or value is None:
                args[key] = "unset" if value is None else "required"
            elif callable(value):
                args[key] = str(getattr(value, "__name__", type(value).__name__))
            else:
                args[key] = inline(value) if isinstance(value, str | int | float | list | tuple | dict) else repr(value)
        found.append(RegisteredName(name, " ".join(about.split()), args))
    return found
