"""The environment that a command names, and what checks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.catalog import EnvRef
    from agentrl.env.check import Subject


def reference(env_id: str, params: list[str]) -> EnvRef:
    """The reference to an environment by id and `a=b` strings: its parameters, and keys of the section `tools`
    (`tools.sets=["notes"]`), as a config has them. Raises CatalogError or ConfigError."""
    from agentrl.catalog import EnvRef
    from agentrl.config.overrides import UNSET, parse_overrides

    values: dict[str, Any] = {}
    tools: list[str] = []
    for keys, value, text in parse_overrides(params):
        if keys[0] == "tools" and len(keys) > 1:
            tools.append(text)
            continue
        if len(keys) != 1:
            raise ConfigError(f"{text!r}: a parameter is one word, not {'.'.join(keys)} (only keys of `tools` have several)")
        if value is UNSET:
            raise ConfigError(f"{text!r}: there is nothing to unset; leave the parameter out for its default")
        values[keys[0]] = value
    if not tools:
        return EnvRef(env_id, values)
    from agentrl.config.load import config_from

    config = config_from({"name": "env", "env": {"id": env_id}, "model": {"path": "none"}}, tools)
    return EnvRef(env_id, values, tools=config.tools)


def subject_of(ref: EnvRef, reward: str | None, tasks: int = 12, fuzz: int = 500, every: bool = False) -> Subject:
    """What checks an environment, with the scorer of a spec (by default its own). Raises UserError for a mistake in its
    parameters or in the spec."""
    import pickle

    from agentrl.catalog.scoring import find_spec, make_scorer
    from agentrl.config.schema import RewardConfig
    from agentrl.env.check import Subject

    ref = ref.scripted()
    ref.build().close()  # a mistake in the parameters is reported once, not as the result of every check
    named = reward or ref.default_reward()
    scorer = make_scorer(find_spec(ref, named), RewardConfig(), ref) if named else None
    return Subject(ref.build, scorer, tasks, fuzz, pickle.dumps(ref), every, str(named or ""))
