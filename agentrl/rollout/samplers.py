"""Task samplers: choose the task of each group and learn from group outcomes.

Interface and registry, finite task pools, then `uniform`, `success_weighted` and `staged`."""

from __future__ import annotations

import itertools
import json
import logging
import math
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from agentrl.config import Choice
from agentrl.rollout.engine import derive
from agentrl.utils.errors import ConfigError, EnvError
from agentrl.utils.registry import Registry

if TYPE_CHECKING:
    from agentrl.env import ToolEnv

SAMPLERS: Registry[Callable[..., TaskSampler]] = Registry("rollout.sampler", "SAMPLERS", "agentrl.rollout.samplers")


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """Task of one group: its seed, `params` that override `env.params`, and the `bucket` that counts its outcome.

    Samplers leave the other fields alone. `env`: name of the environment (see `rollout.mixture`). `horizon`: number of tool
    calls in the task's gold solution; `given`: how many of them are made before the policy begins (see `rollout.start`)."""

    seed: int
    params: Mapping[str, Any] = field(default_factory=dict)
    bucket: str = ""
    env: str = ""
    horizon: int | None = None
    given: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", operator.index(self.seed))  # Gymnasium rejects NumPy integers


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Outcome of one group. `success`: share (0..1) of successes among its members."""

    index: int
    bucket: str
    success: float


class Stateful:
    """Base class of components that learn from groups: checkpoint state and metrics."""

    def state(self) -> dict[str, Any]:
        """Return the JSON state for a checkpoint; empty by default."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of an update (a mixture's are named NAME/key); none by default."""
        return {}


class TaskSampler(Stateful, ABC):
    """Chooses the task of each group.

    A choice depends only on the run's seed, the group's index and the observations so far, never on an advancing random state,
    so that a group rerun after a resume gets the same task. `observe` is called only at updates, with outcomes in index order,
    so that with `max_staleness` 0 choices do not depend on which group finished first.
    """

    def wants(self) -> int | None:
        """Return the size of the task pool to choose from: 0 for all tasks of the environment (no pool if they are endless),
        None (the default) for no pool. `use` receives the pool before the first `choose` or `load`."""
        return None

    _seeds: Sequence[int] = ()

    def use(self, seeds: Sequence[int]) -> None:
        """Receive the pool requested by `wants`: seeds of distinct tasks of the training split."""
        self._seeds = seeds

    @abstractmethod
    def choose(self, run_seed: int, index: int) -> TaskChoice:
        """Choose the task of group `index`."""

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Learn from the groups, filtered ones included, that finished since the last update, in index order. Does nothing by
        default."""

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """Return all `params` that may be chosen, or, if they are too many to try, a selection that includes all extremes. Each
        is checked once before a run starts."""
        return [{}]


def fresh_seed(run_seed: int, index: int) -> int:
    """Return a task seed that no other group of the run gets."""
    return derive(run_seed, "task", index)


def uniform(run_seed: int, index: int, purpose: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on the arguments."""
    return derive(run_seed, purpose, index) / 2**63


def make_sampler(choice: Choice) -> TaskSampler:
    """Build a sampler. Raises ConfigError for an unknown name or argument and suggests the nearest one."""
    sampler: TaskSampler = SAMPLERS.build(choice.name, choice.args, kind=TaskSampler)
    return sampler


# Arms

SHOWN = 16
"""Largest number of arms that the metrics report one by one; with more, only aggregates."""


def pick_arm(weights: Sequence[float], point: float) -> int:
    """Return the arm at `point` of [0, 1) when the weights' shares are laid end to end."""
    ends = list(itertools.accumulate(weights))
    return min(bisect_right(ends, point * ends[-1]), len(ends) - 1)


# A finite pool of tasks

log = logging.getLogger(__name__)

MAX_REPEATS = 1000
"""The search for distinct tasks ends after this many consecutive seeds without a new one."""


def pool_seeds(env: ToolEnv, size: int, say: Callable[[str], None] = log.warning) -> Sequence[int]:
    """Return the seeds of a pool of training tasks.

    With `size`: the first `size` distinct tasks (compared by `Task.data`); if there are fewer, all of them, with a line to `say`.
    With 0: all tasks of the environment, or none if they are endless. Raises EnvError if the environment's number of tasks is
    invalid.
    """
    count = env.task_count("train")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise EnvError(f"{env.id}: task_count('train') returned {count!r}; expected 1 or more, or None if tasks are endless")
    if not size:
        return range(count or 0)
    by_content: dict[str, int] = {}
    seed = repeats = 0
    while len(by_content) < size and repeats < MAX_REPEATS and (count is None or seed < count):
        content = json.dumps(env.make_task(seed, "train").data, sort_keys=True, default=str)
        repeats = 0 if by_content.setdefault(content, seed) == seed else repeats + 1
        seed += 1
    if len(by_content) < size:
        there = f"the training split has {len(by_content)} different tasks, not the {size} of args.pool"
        say(f"rollout.sampler: {there} ({seed} seeds tried)")
    return list(by_content.values())


@lru_cache(maxsize=4)
def epoch_order(run_seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the pool indices 0..size-1 in the order of an epoch: one permutation per run seed and epoch."""
    return np.random.default_rng(derive(run_seed, "epoch", epoch)).permutation(size)


# uniform


@SAMPLERS.register("uniform")
@dataclass(kw_only=True)
class UniformSampler(TaskSampler):
    """Draws from a finite pool without replacement, in a new order each epoch; without a pool, a new task per group.

    The pool: the first `pool` distinct tasks, or with 0 all tasks of an environment that has a finite number. Group i has
    position i % size in epoch i // size. So a replacement group takes the next task, and the task of a group that failed, went
    stale, or was filtered or cancelled comes up again in the next epoch.
    """

    pool: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        self._begun = 0

    def wants(self) -> int | None:
        return self.pool

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        size = len(self._seeds)
        if not size:
            return TaskChoice(fresh_seed(run_seed, index))
        self._begun = max(self._begun, index + 1)
        epoch, position = divmod(index, size)
        return TaskChoice(self._seeds[int(epoch_order(run_seed, epoch, size)[position])])

    def state(self) -> dict[str, Any]:
        return {"pool": len(self._seeds), "begun": self._begun} if self._seeds else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self._begun = state.get("begun", 0)
        then, now = state.get("pool", len(self._seeds)), len(self._seeds)
        if then != now:
            what = f"the checkpoint was written with a pool of {then} tasks, now there are {now}"
            log.warning("rollout.sampler: %s: the epoch starts again in another order", what)

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._begun / len(self._seeds), "pool": float(len(self._seeds))} if self._seeds else {}


# success_weighted


@SAMPLERS.register("success_weighted")
@dataclass(kw_only=True)
class SuccessWeightedSampler(TaskSampler):
    """Draws an arm with weight max(`floor`, 4 p (1 - p)), where p is its running success rate.

    p (1 - p) is the variance of a 0/1 reward, the expected learning signal of a group (called learnability in
    Rutherford et al. 2024, arXiv 2408.15099); the factor 4 makes it 1 at p = 0.5. p is the posterior mean under a
    Beta(1, 1) prior; older outcomes are discounted by `decay` per group of the same arm.

    Arms are either `buckets` (environment parameters, with a new task per group) or the first `pool` distinct tasks of the
    training split (all, if there are fewer). `floor` keeps every arm in use, so that forgetting is noticed.
    """

    buckets: list[dict[str, Any]] = field(default_factory=list)
    pool: Annotated[int, Field(ge=0)] = 0
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9

    def __post_init__(self) -> None:
        if (len(self.buckets) > 0) == (self.pool > 0):
            raise ConfigError(
                "rollout.sampler 'success_weighted': set one of args.buckets (parameters of the environment, a list) and "
                "args.pool (a number of tasks)"
            )
        # Canonical names, such as `calls=[2, 4],keys=9`.
        self._begin([",".join(f"{key}={json.dumps(value)}" for key, value in sorted(one.items())) for one in self.buckets])
        if len(set(self._arms)) < len(self._arms):
            raise ConfigError("rollout.sampler 'success_weighted': two of args.buckets are the same")

    def _begin(self, arms: list[str]) -> None:
        self._arms = arms
        self._sums = dict.fromkeys(arms, 0.0)
        self._counts = dict.fromkeys(arms, 0.0)

    def wants(self) -> int | None:
        return self.pool or None

    def use(self, seeds: Sequence[int]) -> None:
        super().use(seeds)
        self._begin([str(seed) for seed in seeds])

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        arm = pick_arm([self.weight(arm) for arm in self._arms], uniform(run_seed, index, "sampler"))
        if self.pool:
            return TaskChoice(self._seeds[arm], {}, self._arms[arm])
        return TaskChoice(fresh_seed(run_seed, index), self.buckets[arm], self._arms[arm])

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            if (arm := outcome.bucket) in self._sums:  # else the task was removed from the data after the group began
                self._sums[arm] = self.decay * self._sums[arm] + outcome.success
                self._counts[arm] = self.decay * self._counts[arm] + 1.0

    def success(self, arm: str) -> float:
        """Return the running success rate of an arm, 0.5 before any outcome."""
        return (1.0 + self._sums[arm]) / (2.0 + self._counts[arm])

    def weight(self, arm: str) -> float:
        """Return the arm's weight before normalization, in [floor, 1]."""
        p = self.success(arm)
        return max(self.floor, 4.0 * p * (1.0 - p))

    def variants(self) -> Sequence[Mapping[str, Any]]:
        return self.buckets or [{}]

    def state(self) -> dict[str, Any]:
        return {arm: [self._sums[arm], self._counts[arm]] for arm in self._arms if self._counts[arm]}

    def load(self, state: Mapping[str, Any]) -> None:
        for arm, (total, count) in state.items():
            if arm in self._sums:  # an arm that the config no longer has is forgotten
                self._sums[arm], self._counts[arm] = total, count

    def metrics(self) -> dict[str, float]:
        mean = sum(self.success(arm) for arm in self._arms) / len(self._arms)
        weights = [self.weight(arm) for arm in self._arms]
        shares = [weight / sum(weights) for weight in weights]
        # The number of equally likely arms that would have the same entropy.
        metrics = {"success": mean, "effective_arms": math.exp(-sum(share * math.log(share) for share in shares))}
        if len(self._arms) <= SHOWN:
            for arm, share in zip(self._arms, shares, strict=True):
                metrics |= {f"{arm}/share": share, f"{arm}/success": self.success(arm)}
        return metrics


# staged


@SAMPLERS.register("staged")
@dataclass(kw_only=True)
class StagedSampler(TaskSampler):
    """Curriculum over `stages` (environment parameters, easiest first).

    The next stage begins once the mean success of the last `window` groups of the current stage is at least `threshold`. A
    fraction `review` of the groups gets a task of a random earlier stage against forgetting; these do not advance the stage.
    """

    stages: list[dict[str, Any]]
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    window: Annotated[int, Field(ge=1)] = 16
    review: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("rollout.sampler 'staged': args.stages is empty; name at least one stage's parameters")
        self._stage = 0
        self._recent: deque[float] = deque(maxlen=self.window)

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        stage = self._stage
        if stage and uniform(run_seed, index, "review") < self.review:
            stage = int(uniform(run_seed, index, "stage") * stage)
        return TaskChoice(fresh_seed(run_seed, index), self.stages[stage], str(stage))

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            if outcome.bucket != str(self._stage):
                continue
            self._recent.append(outcome.success)
            # With a margin: 16 groups at a success of 0.6 add up to less than 16 * 0.6.
            full = len(self._recent) == self.window and self._stage + 1 < len(self.stages)
            if full and fmean(self._recent) > self.threshold - 1e-9:
                self._stage += 1
                self._recent.clear()
                log.info("curriculum: now stage %d of %d: %s", self._stage + 1, len(self.stages), self.stages[self._stage])

    def variants(self) -> Sequence[Mapping[str, Any]]:
        return self.stages

    def state(self) -> dict[str, Any]:
        return {"stage": self._stage, "recent": list(self._recent)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._stage = min(state["stage"], len(self.stages) - 1)
        self._recent = deque(state["recent"], maxlen=self.window)

    def metrics(self) -> dict[str, float]:
        return {"stage": float(self._stage), **({"stage_success": fmean(self._recent)} if self._recent else {})}
