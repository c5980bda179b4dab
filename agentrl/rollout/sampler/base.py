"""The contract of task samplers: which task a group gets, and what a sampler learns from its outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.config import Choice
from agentrl.registry import Registry
from agentrl.rollout.seeds import derive

SAMPLERS: Registry[Callable[..., TaskSampler]] = Registry("rollout.sampler", "SAMPLERS", "agentrl.rollout.sampler")


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """The task of one group: its seed, environment parameters that override `env.params`, and the
    bucket in which its outcome is counted. `env`: the name of the environment, which no sampler sets (see `rollout/mixture`);
    nor does one set `horizon` and `given`: the calls of the task's gold solution, and how many of them the group is given
    (see `rollout/start`)."""

    seed: int
    params: Mapping[str, Any] = field(default_factory=dict)
    bucket: str = ""
    env: str = ""
    horizon: int | None = None
    given: int = 0


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """How one group went: the share (0..1) of successes among its members."""

    index: int
    bucket: str
    success: float


class TaskSampler(ABC):
    """Chooses the task of each group.

    A choice depends on the run's seed, the group's index and what was observed so far, never on a random state
    that advances, so that a group that is run again after a resume gets the same task. `observe` is called only at
    updates, with the outcomes in the order of the groups' indices; so with `max_staleness` 0
    choices do not depend on which group finished first.
    """

    def wants(self) -> int | None:
        """The size of the pool of tasks that it chooses from: 0 means all tasks of the environment (no pool if they are
        endless), None (the default) no pool at all. The pool is given to `use` before anything is chosen or loaded."""
        return None

    def use(self, seeds: Sequence[int]) -> None:  # noqa: B027 - most samplers have no pool
        """Receive the pool that `wants` asked for: seeds of different tasks of the training split."""

    @abstractmethod
    def choose(self, run_seed: int, index: int) -> TaskChoice:
        """The task of group `index`."""

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:  # noqa: B027 - most samplers learn nothing
        """Learn from the groups that finished since the last update (including filtered ones, which are an
        outcome too), by ascending index. Nothing by default."""

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """Every `params` that it may ever choose, or, of more than can be tried, some with all extremes among them; each is
        checked once before a run starts."""
        return [{}]

    def state(self) -> dict[str, Any]:
        """What a checkpoint must contain, as JSON; `load` is the inverse. Nothing by default."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - the counterpart of an empty state
        """Inverse of `state`."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics row of an update. None by default."""
        return {}


def fresh_seed(run_seed: int, index: int) -> int:
    """The seed of a task that no other group of the run gets."""
    return derive(run_seed, "task", index)


def uniform(run_seed: int, index: int, purpose: str) -> float:
    """A number in [0, 1) that depends only on its arguments."""
    return derive(run_seed, purpose, index) / 2**63


def make_sampler(choice: Choice) -> TaskSampler:
    """A new sampler. Raises ConfigError for an unknown name or argument, naming the nearest."""
    sampler: TaskSampler = SAMPLERS.bind(choice.name, choice.args)()
    return sampler
