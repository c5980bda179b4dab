"""Read a config by environment: the environments by name, the models, the temperature of an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from agentrl.config.schema import Choice, EnvConfig, EvalConfig, RolloutConfig, SftConfig, Steps, TrainConfig
from agentrl.utils.errors import ConfigError, UserError, hint_text

Table = dict[str, Any]


def alone(config: TrainConfig, env: EnvConfig) -> TrainConfig:
    """The config as if `env` were its only environment: what it sets itself takes the place of the run's sections.

    All that plays, scores and checks one environment reads such a config, whose `envs` is this one.
    """
    own = {"tools": env.tools, "agent": env.agent, "limits": env.limits, "sampler": env.sampler, "advantage": env.advantage}
    weight = None if trained_at_all(env.weight) else 0.0
    rest = env.model_copy(update={**dict.fromkeys((*own, "eval", "sft"), None), "weight": weight})
    if weight is None:
        drawn: dict[str, Any] = {"sampler": env.sampler or config.rollout.sampler}
    else:  # it is only evaluated: neither the run's curriculum nor its forks are of its tasks
        drawn = {"sampler": env.sampler or type(config.rollout)().sampler, "start": None, "branch": None}
    rollout = _with(config.rollout, env.limits).model_copy(update=drawn)
    algorithm = config.algorithm.model_copy(update={"advantage": env.advantage or config.algorithm.advantage})
    update = {
        "env": rest,
        "tools": env.tools or config.tools,
        "agent": env.agent or config.agent,
        "rollout": rollout,
        "algorithm": algorithm,
        "eval": _with(config.eval, env.eval, but="weight"),
        "sft": config.sft and _with(config.sft, env.sft),
    }
    return config.model_copy(update=update)


def each(config: TrainConfig) -> list[TrainConfig]:
    """The config of each environment, as `alone` makes it."""
    return [alone(config, env) for env in config.envs]


def trained_envs(envs: tuple[EnvConfig, ...]) -> list[EnvConfig]:
    """The environments that some update of a run draws tasks of; the others are only evaluated."""
    return [env for env in envs if trained_at_all(env.weight)]


def widest(config: TrainConfig, of: Sequence[EnvConfig] | None = None) -> TrainConfig:
    """The config with the widest limits of the environments `of`, by default all, in [rollout], for what they share, such as the
    engine's cache."""
    if not config.envs:
        return config
    rollouts = [alone(config, env).rollout for env in of or config.envs]
    names = ("max_turns", "max_turn_tokens", "max_episode_tokens")
    limits = {name: max(getattr(rollout, name) for rollout in rollouts) for name in names}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=limits)})


def longest_sample(config: TrainConfig) -> int:
    """The most tokens that an episode may sample in any of the environments that updates draw tasks of."""
    rollouts = [alone(config, env).rollout for env in trained_envs(config.envs)]
    return max(min(rollout.max_turns * rollout.max_turn_tokens, rollout.max_episode_tokens) for rollout in rollouts)


def own_advantages(envs: tuple[EnvConfig, ...]) -> dict[str, Choice]:
    """The environments with an advantage estimator of their own, by name, of those that updates draw tasks of."""
    return {env.called: env.advantage for env in trained_envs(envs) if env.advantage is not None}


def eval_weights(envs: tuple[EnvConfig, ...]) -> dict[str, float]:
    """The weight of each environment in the mean over them: 1, or its own `eval.weight`."""
    return {env.called: 1.0 if env.eval is None or env.eval.weight is None else env.eval.weight for env in envs}


def warm_start_envs(envs: tuple[EnvConfig, ...], sft: SftConfig | None) -> list[EnvConfig]:
    """The environments that take part in the warm start. Raises ConfigError without one."""
    assert sft is not None
    named = sft.envs
    found = [env for env in envs if (env.called in named if named is not None else weight_at(env.weight, 0) > 0)]
    if not found:
        raise ConfigError("sft.envs: no environment takes part in the warm start; name one, or leave it out (sft=false)")
    return found


def _with(section: Any, own: Any, but: str = "") -> Any:
    """The section with what the environment's own part of it sets."""
    given = {} if own is None else {key: value for key, value in own if value is not None and key != but}
    return section.model_copy(update=given)


def the_env(envs: tuple[EnvConfig, ...]) -> EnvConfig:
    """The only environment of a config. Raises ConfigError if it has several, or none."""
    if not envs:
        raise ConfigError("env: this takes an environment, and the config has none; it trains on [data] (agentrl sft)")
    if len(envs) > 1:
        names = ", ".join(env.called for env in envs)
        raise ConfigError(f"env: this takes one environment, and the config has {len(envs)}: {names}")
    return envs[0]


def check_envs(envs: tuple[EnvConfig, ...], sft: SftConfig | None) -> None:
    """Of a config with environments: raise ConfigError for two of one name, for weights that leave nothing to train on or to
    compare by, for a schedule whose steps do not ascend, and for names in `sft.envs` that there are not."""
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
    # Between two of these steps the sum of the weights is a straight line, so it is 0 nowhere if it is at none of them.
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
    """A weight after `step` updates: on the line between the points before and after it, else that of the nearest; by
    default 1."""
    if not isinstance(weight, list):
        return 1.0 if weight is None else weight
    for (before, low), (after, high) in pairwise(weight):
        if before <= step <= after:
            return low + (high - low) * (step - before) / (after - before)
    return weight[0][1] if step < weight[0][0] else weight[-1][1]


def trained_at_all(weight: Steps | None) -> bool:
    """Return True if some update of a run draws tasks of an environment with this weight."""
    return any(value for _, value in weight) if isinstance(weight, list) else weight != 0.0


@contextmanager
def name_entry_in_errors(config: TrainConfig, env: EnvConfig) -> Iterator[TrainConfig]:
    """Begins a UserError with the entry of `[[env]]` that it is about, if there are several. Yields the config of it `alone`."""
    try:
        yield alone(config, env)
    except UserError as problem:
        if len(config.envs) == 1:
            raise
        entry, text = entry_name(config.envs.index(env), env.called), str(problem)
        raise type(problem)(entry + text[3:] if text.startswith("env.") else f"{entry}: {text}") from problem


# -- in tables ---------------------------------------------------------------------------------------


def entry_name(number: int, name: str) -> str:
    """Name of an entry of `[[env]]` in messages."""
    return f"env[{number}] ({name})"


def name_of(entry: Any) -> str:
    """The name of an entry that was not validated yet; "" if it has none."""
    if not isinstance(entry, dict) or not isinstance(named := entry.get("name", entry.get("id")), str):
        return ""
    return named if "name" in entry else EnvConfig(id=named).called


def find_entry(entries: Sequence[Any], key: str) -> int | None:
    """The place of the entry that `key` names, or whose number it is; else None."""
    names = [name_of(entry) for entry in entries]
    if key in names:
        return names.index(key)
    return int(key) if key.isdigit() and int(key) < len(entries) else None


def entry_of(entries: Sequence[Any], key: str) -> int:
    """As `find_entry`. Raises ConfigError, with the nearest name, without one."""
    place = find_entry(entries, key)
    if place is None:
        names = [name_of(entry) for entry in entries]
        raise ConfigError(f"env.{key}: no environment has this name{hint_text(key, names)}; there are {', '.join(names)}")
    return place


def as_list(table: Mapping[str, Any]) -> list[Any]:
    """The entries of `env` in a table; none if it is not a list."""
    given = table.get("env")
    return given if isinstance(given, list) else []


Keys = tuple[str | int, ...]
"""The way to a value: keys of tables, and places in lists."""


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """The values in a table and its tables, each with the way to it; an empty table sets nothing."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*keys, key))
    elif value != {}:
        yield keys, value


def named_leaves(table: Table, envs: Sequence[EnvConfig]) -> Iterator[tuple[str, Keys, Any]]:
    """Each value of a config's table: its dotted key (environments of a list by name), the way to it (by number), itself."""
    entries = as_list(table)
    for keys, value in leaves({**table, "env": {}} if entries else table):
        yield ".".join(map(str, keys)), keys, value
    for number, (env, entry) in enumerate(zip(envs, entries, strict=False)):
        for keys, value in leaves(entry, ("env", number)):
            yield ".".join(map(str, ("env", env.called, *keys[2:]))), keys, value


# Models besides the policy


def other_models(config: TrainConfig) -> dict[str, str]:
    """By the key that names them, the folders or hub names of the models of other roles than the policy's. A critic that starts
    from the policy's model has none."""
    taught = config.algorithm.distillation
    named = {
        "critic.path": None if config.critic is None else config.critic.path,
        "reward_model.path": None if config.reward_model is None else config.reward_model.path,
        "algorithm.distillation.path": None if taught is None else taught.path,
    }
    return {key: path for key, path in named.items() if path is not None}


# Temperature of an update

LEAST_TEMPERATURE = 0.01


def temperature_at(rollout: RolloutConfig, version: int) -> float:
    """The temperature at which the episodes of the update after `version` others are sampled, and at which it is computed."""
    return weight_at(rollout.temperature, version)


def scheduled_temperature(rollout: RolloutConfig, version: int) -> float | None:
    """`temperature_at`, or None if it is one number for the whole run."""
    return temperature_at(rollout, version) if isinstance(rollout.temperature, list) else None


def one_temperature(rollout: RolloutConfig, what: str) -> float:
    """The only temperature. Raises ConfigError for points: `what` has no updates that they could be told by."""
    if isinstance(rollout.temperature, list):
        raise ConfigError(
            f"rollout.temperature: points [step, temperature] are followed by the updates of `agentrl train`, and {what} has no "
            f"number of updates; give one number, such as rollout.temperature={rollout.temperature[-1][1]:g}"
        )
    return rollout.temperature


def check_temperatures(rollout: RolloutConfig, evaluation: EvalConfig, experience: bool) -> None:
    """Raise ConfigError for temperatures that cannot be sampled at, and for points next to what trains tokens of other updates.

    Reads: rollout.temperature, rollout.max_staleness, eval.temperature, algorithm.experience.
    """
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
    # What is trained is softmax(logits / T) with the T of the update; every token must have been sampled at it.
    other = None
    if rollout.max_staleness > 0:
        other = f"rollout.max_staleness = {rollout.max_staleness} trains tokens that earlier updates' episodes sampled"
    elif experience:
        other = "algorithm.experience trains episodes of earlier updates"
    if other is not None:
        raise ConfigError(
            f"rollout.temperature: with points each update has a temperature of its own, and {other}, at another one; give one "
            "number, or leave that out"
        )
