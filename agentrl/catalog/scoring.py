"""The reward spec that scores an environment's episodes, and what it may use: for runs, commands and Gymnasium."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.catalog.index import EnvRef, find_reward
from agentrl.config.schema import RewardConfig
from agentrl.errors import ConfigError
from agentrl.given import is_given
from agentrl.reward import Context, Scorer, compile_spec, load_spec, make_context
from agentrl.reward.context import given_spec


def find_spec(env: EnvRef, name: str | None) -> dict[str, Any]:
    """The spec of that name or path, by default the environment's own: its server's, if it is elsewhere. Raises ConfigError if
    there is none."""
    card = env.card() if name is None else None
    if card is not None and card["reward"] is not None:
        return load_spec(card["reward"])
    found = name or env.default_reward()
    if found is None:
        raise ConfigError(f"env.reward: {env.id} names no reward spec of its own; set env.reward=NAME_OR_PATH")
    return given_spec(found) if is_given(found) else load_spec(find_reward(found))


def spec_word(env: EnvRef, name: str | None, scorer: Scorer) -> str:
    """What names the spec of that name or path, by default the environment's own, on a command line."""
    found = name or (None if env.at is not None else env.default_reward())
    if found is None or is_given(found):
        return scorer.name
    path = Path(found)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def make_scorer(
    spec: dict[str, Any],
    config: RewardConfig,
    env: EnvRef | None,
    *,
    timeout: float = 120.0,
    through: Callable[[Context], Context] = lambda context: context,
) -> Scorer:
    """The compiled spec: its judge and its functions as `config` says, its gold replays on new environments of `env`.

    `timeout` (seconds) limits the scoring of an episode; `through` may wrap the context that the spec calls.
    Raises RewardSpecError for a bad spec, and for one that replays if `env` is None.
    """
    context = make_context(config, replay_env=None if env is None else lambda task: env.build())
    return compile_spec(spec, context=through(context), timeout=timeout)
