"""Access a config per environment: environments by name, their weights, and the temperature of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from agentrl.config.schema import Choice, EnvConfig, EvalConfig, RolloutConfig, SftConfig, Steps
from agentrl.config.schema.episodes import entry_name
from agentrl.utils.errors import ConfigError, hint_text

Table = dict[str, Any]


def own_advantages(envs: tuple[EnvConfig, ...]) -> dict[str, Choice]:
    """Return the advantage estimators that trained environments override, by environment name."""
    return {env.called: env.advantage for env in envs if env.trains and env.advantage is not None}


def eval_weights(envs: tuple[EnvConfig, ...]) -> dict[str, float]:
    """Return each environment's weight in the mean over environments: `eval.weight`, by default 1."""
    return {env.called: 1.0 if env.eval is None or env.eval.weight is None else env.eval.weight for env in envs}


def warm_start_envs(envs: tuple[EnvConfig, ...], sft: SftConfig | None) -> list[EnvConfig]:
    """Return the environments of the warm start; none without [sft]. Raises ConfigError if no environment takes part."""
    if sft is None:
        return []
    named = sft.envs
    found = [env for env in envs if (env.called in named if named is not None else weight_at(env.weight, 0) > 0)]
    if not found:
        raise ConfigError("sft.envs: no environment takes part in the warm start; name one, or leave it out (sft=false)")
    return found


def check_envs(envs: tuple[EnvConfig, ...], sft: SftConfig | None) -> None:
    """Check the environments of a config. Raises ConfigError for equal names, weights that leave nothing to train on or to
    compare by, a schedule with unsorted steps, and unknown names in `sft.envs`."""
    if not envs:
        return
    names = [env.called for env in envs]
    for number, name in enumerate(names):
        if name in names[:number]:
            first = names.index(name)
            raise ConfigError(
                f'{entry_name(number, name)}.name: env[{first}] is called {name!r} too; set name = "..." in one of them'
            )
    for number, env in enumerate(envs):
        steps = [step for step, _ in env.weight] if isinstance(env.weight, list) else []
        if isinstance(env.weight, list) and (not steps or steps != sorted(set(steps))):
            raise ConfigError(
                f"{entry_name(number, env.called)}.weight: expected points [step, weight] with ascending steps, got {steps}"
            )
    # Between two of these steps the sum of the weights is linear, so it can only be 0 at one of them.
    for step in sorted({0, *(step for env in envs if isinstance(env.weight, list) for step, _ in env.weight)}):
        if not any(weight_at(env.weight, step) > 0 for env in envs):
            at = f" at step {step}" if step else ""
            raise ConfigError(f"env: every weight is 0{at}, so a group could be of no environment; set env.NAME.weight")
    if all(env.eval is not None and env.eval.weight == 0 for env in envs):
        raise ConfigError("env: every eval.weight is 0, so evaluations have no mean; leave one out")
    for name in (sft.envs or []) if sft is not None else []:
        if name not in names:
            raise ConfigError(f"sft.envs: there is no environment {name!r}{hint_text(name, names)}; there are {', '.join(names)}")


def weight_at(weight: Steps | None, step: int) -> float:
    """Interpolate a weight or temperature linearly after `step` updates; constant outside of the points; None is 1."""
    if not isinstance(weight, list):
        return 1.0 if weight is None else weight
    for (before, low), (after, high) in pairwise(weight):
        if before <= step <= after:
            return low + (high - low) * (step - before) / (after - before)
    return weight[0][1] if step < weight[0][0] else weight[-1][1]


# -- raw tables --------------------------------------------------------------------------------------


def name_of(entry: Any) -> str:
    """Return the name of an unvalidated entry; "" if it has none."""
    if not isinstance(entry, dict) or not isinstance(named := entry.get("name", entry.get("id")), str):
        return ""
    return named if "name" in entry else EnvConfig(id=named).called


def find_entry(entries: Sequence[Any], key: str) -> int | None:
    """Return the index of the entry with the name or number `key`, or None."""
    names = [name_of(entry) for entry in entries]
    if key in names:
        return names.index(key)
    return int(key) if key.isdigit() and int(key) < len(entries) else None


def entry_of(entries: Sequence[Any], key: str) -> int:
    """Return the index of an entry as `find_entry`. Raises ConfigError, with the nearest name, if there is no such entry."""
    place = find_entry(entries, key)
    if place is None:
        names = [name_of(entry) for entry in entries]
        raise ConfigError(f"env.{key}: no environment has this name{hint_text(key, names)}; there are {', '.join(names)}")
    return place


def as_list(table: Mapping[str, Any]) -> list[Any]:
    """Return the entries of `env` in a table; [] if it is not a list."""
    given = table.get("env")
    return given if isinstance(given, list) else []


Keys = tuple[str | int, ...]
"""Path to a value: table keys and list indices."""


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield (path, value) of the values in nested tables; empty tables are skipped."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*keys, key))
    elif value != {}:
        yield keys, value


def named_leaves(table: Table, envs: Sequence[EnvConfig]) -> Iterator[tuple[str, Keys, Any]]:
    """Yield each value of a config's table: dotted key (environments by name), path (environments by index), value."""
    entries = as_list(table)
    for keys, value in leaves({**table, "env": {}} if entries else table):
        yield ".".join(map(str, keys)), keys, value
    for number, (env, entry) in enumerate(zip(envs, entries, strict=False)):
        for keys, value in leaves(entry, ("env", number)):
            yield ".".join(map(str, ("env", env.called, *keys[2:]))), keys, value


# Temperature of an update

LEAST_TEMPERATURE = 0.01


def scheduled_temperature(rollout: RolloutConfig, version: int) -> float | None:
    """Return the temperature of the update with this number and of its episodes; None if it is constant in the run."""
    return weight_at(rollout.temperature, version) if isinstance(rollout.temperature, list) else None


def one_temperature(rollout: RolloutConfig, what: str) -> float:
    """Return the constant temperature. Raises ConfigError for a schedule, because `what` has no updates."""
    if isinstance(rollout.temperature, list):
        raise ConfigError(
            f"rollout.temperature: points [step, temperature] apply to the updates of `agentrl train`, but {what} has no "
            f"updates; give one number, such as rollout.temperature={rollout.temperature[-1][1]:g}"
        )
    return rollout.temperature


def check_temperatures(rollout: RolloutConfig, evaluation: EvalConfig, experience: bool) -> None:
    """Raise ConfigError for temperatures too low to sample at, and for a schedule where updates train tokens of other updates."""
    given = rollout.temperature
    points = given if isinstance(given, list) else [(0, given)]
    for section, value in (*(("rollout", value) for _, value in points), ("eval", evaluation.temperature)):
        if 0 < value < LEAST_TEMPERATURE:
            raise ConfigError(
                f"{section}.temperature = {value:g}: expected 0 (greedy) or at least {LEAST_TEMPERATURE:g}; "
                "vLLM raises lower values to 0.01"
            )
    if not isinstance(given, list):
        return
    steps = [step for step, _ in given]
    if not steps or steps != sorted(set(steps)):
        raise ConfigError(f"rollout.temperature: expected points [step, temperature] with ascending steps, got {steps}")
    # An update trains softmax(logits / T) with its own T, so all of its tokens must be sampled at T.
    other = None
    if rollout.max_staleness > 0:
        other = f"rollout.max_staleness = {rollout.max_staleness} trains tokens that earlier updates' episodes sampled"
    elif experience:
        other = "algorithm.experience trains episodes of earlier updates"
    if other is not None:
        raise ConfigError(
            f"rollout.temperature: points give each update its own temperature, but {other}, at another one; give one "
            "number, or leave that out"
        )
