"""Checks of environments: names and parameters, gold starts, and suites."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from agentrl.config.envs import Keys, warm_start_envs
from agentrl.config.origin import COMMAND_LINE, DEFAULT, Origins
from agentrl.config.schema import EnvConfig, RolloutConfig
from agentrl.config.schema.episodes import entry_name
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef, ParameterError, check_ref
from agentrl.env.wrappers import WRAPPERS
from agentrl.rollout.context import CONTEXTS
from agentrl.rollout.samplers import fresh_seed, make_sampler
from agentrl.run.digests import suite_env
from agentrl.utils.errors import CatalogError, ConfigError

if TYPE_CHECKING:
    from agentrl.run.assembly import RunStart

# Names


def check_named(start: RunStart, origins: Callable[[], Origins] = Origins, only: Collection[str] | None = None) -> None:
    """Raise CatalogError if an environment is not found or does not take its parameters, those of the warm start included.
    `origins`: returns the sources of the config's values, for messages; `only`: names of the environments to check.
    """
    config = start.config
    places: list[tuple[EnvConfig, Keys, str]] = []  # an environment, its keys, and their text
    for number, env in enumerate(config.envs):
        entry = entry_name(number, env.called) if len(config.envs) > 1 else "env"
        places.append((env, ("env", number) if isinstance(config.env, list) else ("env",), entry))
    for env, at, entry in places:
        if only is None or env.called in only:
            try:
                check_ref(EnvRef.of(env, config.tools))
            except CatalogError as problem:
                # A missing parameter has no place in the config.
                name = problem.name if isinstance(problem, ParameterError) else None
                section = name == "sandbox" and "sandbox" not in env.params
                keys = (*at, *(("id",) if name is None else ("sandbox",) if section else ("params", name)))
                raise _with_key(problem, keys, entry, origins().of(keys)) from problem
    warm = warm_start_envs(config.envs, config.sft) if start.purpose == "train" else []
    for env, at, entry in places:
        sft = config.alone(env).sft if env in warm else None
        for name, params in () if sft is None else (("params", sft.params), ("gate_params", sft.gate_params)):
            overridden = env.sft is not None and getattr(env.sft, name) is not None
            try:
                check_ref(EnvRef.of(env, config.tools).with_params(params))
            except ParameterError as problem:
                keys = (*(at if overridden else ()), "sft", name, problem.name or "")
                raise _with_key(problem, keys, entry, origins().of(keys)) from problem


def _with_key(problem: CatalogError, keys: Keys, entry: str, place: str) -> CatalogError:
    """Put key and place in front of an error; not if the name was typed on the command line.
    `entry`: text of an environment's first keys."""
    if place == COMMAND_LINE:
        return problem
    words = list(keys)
    if len(keys) > 1 and isinstance(keys[1], int):
        words[:2] = [entry]
    return CatalogError(f"{'' if place in ('', DEFAULT) else f'{place}: '}{'.'.join(map(str, words))}: {problem}")


# Starts

TASKS = 4
"""Number of tasks per set of parameters whose gold solution is tried."""


def check_start(start: RunStart) -> None:
    """Raise ConfigError with the obstacle if gold calls cannot be played before the policy begins (`rollout.start`)."""
    if start.config.rollout.start is None:
        return
    why = gold_obstacle(
        start,
        "that plays by itself starts from the beginning",
        "the policy would write summaries of turns that are not its own",
        played=True,
    )
    if why is not None:
        raise ConfigError(f"rollout.start ({start.config.the_env.called}): {why}; leave rollout.start out")


def gold_obstacle(start: RunStart, agent: str, summaries: str, *, played: bool) -> str | None:
    """Return the reason why gold solutions are not available or (`played`) cannot be played; None if they can.
    `agent`, `summaries`: ends of the reasons for [agent] and for a context policy with summaries."""
    ref, one, rollout = start.env, start.config, start.config.rollout
    if ref.at is not None:
        return f"env.url = {ref.at.url!r}: a run does not ask a remote environment for gold solutions"
    if one.agent is not None:
        return f"[agent]: an agent {agent}"
    if "summarizes" in CONTEXTS.entry(rollout.context.name).traits:
        return f"rollout.context = {rollout.context.name!r}: {summaries}"
    for choice in ref.wrappers if played else ():
        if "chance_faults" in WRAPPERS.entry(choice.name).traits:
            return f"env.wrappers: with {choice.name!r} tools fail at random, and gold calls with them"
    for env in each_env(rollout, ref):
        if played and env.user_models():
            return "its user is a model, which would have to answer gold turns too"
        if all(env.horizon(env.make_task(fresh_seed(one.seed, n), "train")) is None for n in range(TASKS)):
            return "its tasks have no gold solution"
    return None


def each_env(rollout: RolloutConfig, ref: EnvRef) -> Iterator[ToolEnv]:
    """Yield the environment with each set of parameters that the sampler may choose; closes it at the next one."""
    for params in make_sampler(rollout.sampler).variants():
        with closing(ref.with_params(params).build()) as env:
            yield env


# Suites


def suite_notes(envs: Iterable[EnvRef]) -> list[str]:
    """Return notes on files that changed since a suite was installed."""
    return [note for env in map(suite_env, envs) if env is not None for note in env.source_notes()]
