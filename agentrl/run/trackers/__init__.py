"""Where the metrics of a run go in addition to metrics.jsonl: the contract, and the registry of trackers by name.

A tracker is one file here, or in `plugins/` of a shelf; the config's `trackers` names those that a run uses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from agentrl.config import Choice
from agentrl.registry import Registry
from agentrl.run.folder import RunFolder


class Tracker(ABC):
    """Opened for one run; its arguments after `folder` are the config's."""

    @abstractmethod
    def __init__(self, folder: RunFolder) -> None:
        """Start, or continue after a resume."""

    @abstractmethod
    def row(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one row, after `step` updates; `phase` is "train", "eval", "before", ..."""

    @abstractmethod
    def close(self) -> None:
        """Called after the last row."""

    def look(self) -> str | None:
        """The command that shows them, if there is one."""
        return None


TRACKERS: Registry[Callable[..., Tracker]] = Registry("trackers", "TRACKERS", "agentrl.run.trackers", given=1)


def check_trackers(choices: Sequence[Choice]) -> None:
    """Raise ConfigError for an unknown tracker or argument.

    Reads: trackers.
    """
    for choice in choices:
        TRACKERS.bind(choice.name, choice.args)


def open_trackers(choices: Sequence[Choice], folder: RunFolder) -> list[Tracker]:
    """The trackers of a run, in order."""
    return [TRACKERS.bind(choice.name, choice.args)(folder) for choice in choices]
