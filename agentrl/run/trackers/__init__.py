"""Where the metrics of a run go in addition to metrics.jsonl: the contract, and the registry of trackers by name.

A tracker is one file here, or in `plugins/` of a shelf; the config's `trackers` names those that a run uses. Each lives in a
thread of its own (`outlet.py`), so that what is slow, gone or full never holds up the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.config import Choice, TrainConfig
from agentrl.redaction import resolved
from agentrl.registry import Registry
from agentrl.run.folder import RunFolder

Status = Literal["done", "failed", "interrupted"]
Cell = str | float | None

REPEATED = ("sft", "gate")
"""Phases of the warm start, whose rows no resume takes back."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker is opened for. `config` is the resolved one; `resumed`: the run goes on from a checkpoint, and what
    it wrote before is in `folder`."""

    folder: RunFolder
    config: TrainConfig
    resumed: bool = False

    @property
    def name(self) -> str:
        """What the config calls the run."""
        return self.config.name


class Tracker(ABC):
    """Made for one run; its arguments after `run` are the config's. All methods are called in one thread, in order.

    What a method raises is told to the user once, and the run goes on.
    """

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start, or continue what this run has begun there before."""

    @classmethod
    def check(cls, config: TrainConfig, args: Mapping[str, Any]) -> None:
        """Raise a UserError if this cannot work: a package or a login is missing. Called before a run, in its main thread; `args`
        are all arguments."""
        return None

    @abstractmethod
    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of one row, after `step` updates; `phase` is "train", "eval", "before", ... None: not known."""

    def rewind(self, step: int) -> None:
        """The run goes on from `step` (-1: from its start; -2: its warm start too comes
        again). Rows of later steps, and those of the phase "after", come again
        (`voided`): take them back, or take none of them twice (`given.GivenRows`)."""
        return None

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        """Some episodes of an evaluation: rows with the same keys."""
        return None

    def picture(self, name: str, path: Path) -> None:
        """A picture that the run has written; one of the same name takes the place of the one before."""
        return None

    @abstractmethod
    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Called after the last row: how the run ended, and what is in summary.json."""

    def look(self) -> str | None:
        """The command or address that shows them, if there is one."""
        return None


TRACKERS: Registry[Callable[..., Tracker]] = Registry("trackers", "TRACKERS", "agentrl.run.trackers", given=1)


def voided(phase: str, step: int, to: int) -> bool:
    """Whether a row comes again if the run goes on from step `to`."""
    return to < -1 or (phase not in REPEATED and (step > to or phase == "after"))


def check_trackers(config: TrainConfig) -> None:
    """Raise a UserError for an unknown tracker or argument, and if one cannot work.

    Reads: trackers.
    """
    for choice in config.trackers:
        args = TRACKERS.arguments(choice.name, resolved(choice.args, f"trackers.{choice.name}.args"))
        make = TRACKERS.entry(choice.name).make
        if isinstance(make, type) and issubclass(make, Tracker):
            make.check(config, args)


def makers(choices: Sequence[Choice], run: TrackedRun) -> list[tuple[str, Callable[[], Tracker]]]:
    """The trackers of a run by name, in order, each yet to be made."""

    def maker(choice: Choice) -> Callable[[], Tracker]:
        bound = TRACKERS.bind(choice.name, resolved(choice.args, f"trackers.{choice.name}.args"))
        return lambda: bound(run)

    return [(choice.name, maker(choice)) for choice in choices]
