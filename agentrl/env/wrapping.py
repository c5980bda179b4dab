"""Wrappers by name, as a config asks for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.env.budgets import TimeBudget, TokenLimit, TurnLimit
from agentrl.env.wrappers import Compaction, ObservationLimit, ToolFaults, ToolSubset, keep_recent
from agentrl.errors import ConfigError
from agentrl.tool.validate import nearest


def keep_recent_turns(env: ToolEnv, tokens: int, turns: int) -> ToolEnv:
    """`Compaction` by `keep_recent(turns)` when the conversation grows over `tokens`."""
    return Compaction(env, tokens, keep_recent(turns))


WRAPPERS: dict[str, Callable[..., ToolEnv]] = {
    "turn_limit": TurnLimit,
    "token_limit": TokenLimit,
    "time_budget": TimeBudget,
    "tool_subset": ToolSubset,
    "tool_faults": ToolFaults,
    "observation_limit": ObservationLimit,
    "keep_recent": keep_recent_turns,
}


def wrap(env: ToolEnv, name: str, args: Mapping[str, Any]) -> ToolEnv:
    """`env` in the wrapper of that name. Raises ConfigError for an unknown name or unfit arguments."""
    if name not in WRAPPERS:
        raise ConfigError(f"env.wrappers: no wrapper {name!r}; {nearest(name, list(WRAPPERS))}")
    maker = WRAPPERS[name]
    try:
        inspect.signature(maker).bind(env, **args)
        return maker(env, **args)
    except (TypeError, ValueError) as problem:
        known = [parameter for parameter in inspect.signature(maker).parameters if parameter != "env"]
        raise ConfigError(f"env.wrappers: {name}: {problem}; arguments: {', '.join(known)}") from problem
