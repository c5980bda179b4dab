"""`next`: the config that a solved run says to try next."""

from __future__ import annotations

import logging

from agentrl.catalog import find_config
from agentrl.config import TrainConfig
from agentrl.config.load import load_config
from agentrl.errors import CatalogError, ConfigError

log = logging.getLogger(__name__)

SOLVED = 0.95
"""The held-out success from which a run is solved."""


def check_next(config: TrainConfig) -> None:
    """Raise ConfigError if no config has this name, or if it is none.

    Reads: next.
    """
    if config.next is None:
        return
    try:
        load_config(find_config(config.next))
    except (CatalogError, ConfigError) as problem:
        raise ConfigError(f"next: {problem}") from None


def harder(config: TrainConfig, success: float | None) -> str | None:
    """The config that a run with this success at its end says to try next; None if it is not solved, or if that config is not of
    this run's environments: `next` may be inherited from a base with others. One that was changed during the run and can no
    longer be read is not advised: the run has ended well, whatever became of that file."""
    if config.next is None or success is None or success < SOLVED:
        return None
    try:
        known = {env.id for env in load_config(find_config(config.next)).envs}
    except (CatalogError, ConfigError) as problem:
        log.warning("next = %r is not advised: %s", config.next, problem)
        return None
    return config.next if known == {env.id for env in config.envs} else None
