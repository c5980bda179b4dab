"""What a run's config provides to its reward spec: allowed functions, a judge, a replay environment."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.config.schema import JudgeConfig, RewardConfig
from agentrl.errors import ConfigError
from agentrl.reward.judge.client import Judge, JudgeSettings
from agentrl.reward.leaf import Context, PythonLeaf, ReplayEnv
from agentrl.trajectory import Task


def make_context(config: RewardConfig, *, replay_env: Callable[[Task], ReplayEnv] | None = None) -> Context:
    """The Context for `compile_spec`.

    Functions are imported here because the run's own config names them; a spec can never cause an import.
    Raises ConfigError for a name that is not a function.
    """
    python = {name: _function(name, target) for name, target in config.python.items()}
    return Context(replay_env=replay_env, python=python, judge=Judge(judge_settings(config.judge)))


def judge_settings(config: JudgeConfig) -> JudgeSettings:
    """The config section as the judge's settings."""
    return JudgeSettings(
        api_base=config.api_base,
        cache=None if config.cache is None else Path(config.cache),
        calls=config.calls,
        usd=config.usd,
        usd_per_million=config.usd_per_million,
        concurrency=config.concurrency,
        timeout=config.timeout,
        retries=config.retries,
    )


def _function(name: str, target: str) -> PythonLeaf:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(f"reward.python.{name}: {target!r} is not of the form 'module:function'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"reward.python.{name}: cannot import {module_name!r}: {error}") from error
    found: Any = vars(module).get(attribute)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(f"reward.python.{name}: {module_name} has no function {attribute!r}; it has: {known or 'none'}")
    function: PythonLeaf = found
    return function
