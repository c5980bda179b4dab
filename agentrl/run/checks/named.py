"""The environments that a config names are there and take its parameters. A mistake is told by its key, and where that stands."""

from __future__ import annotations

from collections.abc import Callable, Collection

from agentrl.catalog import EnvRef
from agentrl.catalog.index import ParameterError, check_ref
from agentrl.config import TrainConfig
from agentrl.config.envs import alone, entry_name, warmed
from agentrl.config.origin import COMMAND_LINE, DEFAULT, Keys, Origins
from agentrl.config.schema import EnvConfig
from agentrl.errors import CatalogError


def check_named(config: TrainConfig, origins: Callable[[], Origins] = Origins) -> None:
    """Raise CatalogError if an environment is nowhere, or does not take the parameters that it is given, in the warm start too.
    `origins`: of the config's values, asked only for a message.

    Reads: env, sft.params, sft.gate_params, sft.envs.
    """
    check_played(config, origins)
    for env in [] if config.sft is None else warmed(config):
        sft, number = alone(config, env).sft, config.envs.index(env)
        assert sft is not None
        for name, params in (("params", sft.params), ("gate_params", sft.gate_params)):
            own = env.sft is not None and getattr(env.sft, name) is not None
            keys: Keys = (*_at(config, number), "sft", name) if own else ("sft", name)
            try:
                check_ref(EnvRef.of(alone(config, env)).with_params(params))
            except ParameterError as problem:
                raise _told(config, problem, (*keys, problem.name or ""), number, origins) from problem


def check_played(config: TrainConfig, origins: Callable[[], Origins] = Origins, only: Collection[str] | None = None) -> None:
    """The part of `check_named` that is of `[env]`, of those environments that are called by a name in `only`."""
    for number, env in enumerate(config.envs):
        if only is None or env.called in only:
            try:
                check_ref(EnvRef.of(alone(config, env)))
            except CatalogError as problem:
                raise _told(config, problem, (*_at(config, number), *_key_of(problem, env)), number, origins) from problem


def _at(config: TrainConfig, number: int) -> Keys:
    return ("env", number) if isinstance(config.env, list) else ("env",)


def _key_of(problem: CatalogError, env: EnvConfig) -> Keys:
    """The key in the environment's entry that the problem is about."""
    if not isinstance(problem, ParameterError) or problem.name is None:
        return ("id",)  # a parameter that it needs and is not given stands nowhere
    return ("sandbox",) if problem.name == "sandbox" and "sandbox" not in env.params else ("params", problem.name)


def _told(config: TrainConfig, problem: CatalogError, keys: Keys, number: int, origins: Callable[[], Origins]) -> CatalogError:
    """The error with the key and its place in front; as it is, if it is of a name that was typed as such."""
    place = origins().of(keys)
    if place == COMMAND_LINE:
        return problem
    words = list(keys)
    if keys[0] == "env" and isinstance(config.env, list):
        words[:2] = [entry_name(number, config.envs[number].called) if len(config.envs) > 1 else "env"]
    return CatalogError(f"{'' if place in ('', DEFAULT) else f'{place}: '}{'.'.join(map(str, words))}: {problem}")
