"""What a run's config provides to its reward spec: allowed functions, a judge, a replay environment."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from agentrl.config.schema import JudgeConfig, RewardConfig
from agentrl.given import PREFIX, names, taken
from agentrl.redaction import resolved
from agentrl.reward.judge.client import Judge, JudgeSettings
from agentrl.reward.leaf import AsTwin, Context, ReplayEnv
from agentrl.reward.spec import load_spec
from agentrl.reward.view import View
from agentrl.shelves import function_named
from agentrl.trajectory import Task


def make_context(config: RewardConfig, *, replay_env: Callable[[Task], ReplayEnv | AsTwin] | None = None) -> Context:
    """The Context for `compile_spec`.

    Functions are imported here because the run's own config names them; a spec can never cause an import.
    Raises ConfigError for a name that is not a function.
    """
    python = {name: function_named(f"reward.python.{name}", target) for name, target in config.python.items()}
    # Whoever gave a function in Python has allowed it; under its own name a config allows it like any other.
    python |= {name: taken(name, "env.reward").value for name in names()}
    python = {name: as_leaf(function) for name, function in python.items() if inspect.isroutine(function)}
    return Context(replay_env=replay_env, python=python, judge=Judge(judge_settings(config.judge)))


def given_spec(name: str) -> dict[str, Any]:
    """A spec that was given in Python ("given:NAME"); of a function, the spec that calls it. Raises ConfigError or
    RewardSpecError."""
    value = taken(name, "env.reward").value
    plain = {"agentrl_reward": 1, "name": name.removeprefix(PREFIX), "root": {"use": "python", "args": {"name": name}}}
    return load_spec(value if isinstance(value, Mapping) else plain)


def as_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function as a leaf calls it: `function(view, args)`. One with a single parameter gets the Trajectory; True and
    False count as 1 and 0."""
    whole = len(inspect.signature(function).parameters) == 1

    @wraps(function)
    def leaf(view: View, args: Any) -> Any:
        found = function(view.trajectory) if whole else function(view, args)
        return float(found) if isinstance(found, bool) else found

    return leaf


def judge_settings(config: JudgeConfig) -> JudgeSettings:
    """The config section as the judge's settings."""
    return JudgeSettings(
        api_base=resolved(config.api_base, "reward.judge.api_base"),
        args=config.args,
        cache=None if config.cache is None else Path(config.cache),
        calls=config.calls,
        usd=config.usd,
        usd_per_million=config.usd_per_million,
        concurrency=config.concurrency,
        timeout=config.timeout,
        retries=config.retries,
    )
