"""Wrappers by name, as configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.env.wrapper import WRAPPERS
from agentrl.errors import ConfigError


def wrap(env: ToolEnv, name: str, args: Mapping[str, Any]) -> ToolEnv:
    """`env` in the wrapper of that name. Raises ConfigError for an unknown name or invalid arguments."""
    make = WRAPPERS.bind(name, args)
    try:
        wrapped: ToolEnv = make(env)
    except ValueError as problem:
        raise ConfigError(f"env.wrappers {name!r}: {problem}") from problem
    return wrapped
