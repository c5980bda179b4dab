"""Task samplers: which task a group gets, and what a sampler learns from its outcome.

The contract and its registry, a finite pool of tasks, then `uniform`, `success_weighted` and `staged`."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", operator.index(self.seed))  # Gymnasium takes no number of numpy


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Outcome of one group: the share (0..1) of successes among its members."""

    index: int
    bucket: str
    success: float


class Stateful:
    """Base of what learns from groups: its state in a checkpoint, and its numbers."""

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, as JSON; `load` is the inverse. Nothing by default."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""

    def metrics(self) -> dict[str, float]:
        """Numbers for the metrics row of an update; those of a mixture as NAME/key. None by default."""
        return {}


class TaskSampler(Stateful, ABC):
    """Chooses the task of each group.

    A choice depends on the run's seed, the group's index and the observations so far, never on a random state that advances:
    a group that runs again after a resume gets the same task. `observe` is called only at updates, with the outcomes in the
    order of the groups' indices; with `max_staleness` 0 choices do not depend on which group finished first.
    """

    def wants(self) -> int | None:
        """The size of the pool of tasks that it chooses from: 0 means all tasks of the environment (no pool if they are
        endless), None (the default) no pool at all. The pool is given to `use` before anything is chosen or loaded."""
        return None

    _seeds: Sequence[int] = ()

    def use(self, seeds: Sequence[int]) -> None:
        """Receive the pool that `wants` asked for: seeds of different tasks of the training split."""
        self._seeds = seeds

    @abstractmethod
    def choose(self, run_seed: int, index: int) -> TaskChoice:
        """The task of group `index`."""

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        """Learn from the groups that finished since the last update (including filtered ones, which are an
        outcome too), by ascending index. Nothing by default."""

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """Every `params` that it may ever choose, or, of more than can be tried, some with all extremes among them; each is
        checked once before a run starts."""
        return [{}]


def fresh_seed(run_seed: int, index: int) -> int:
    """The seed of a task that no other group of the run gets."""
    return derive(run_seed, "task", index)


def uniform(run_seed: int, index: int, purpose: str) -> float:
    """A number in [0, 1) that depends only on its arguments."""
    return derive(run_seed, purpose, index) / 2**63


def make_sampler(choice: Choice) -> TaskSampler:
    """A new sampler. Raises ConfigError for an unknown name or argument, naming the nearest."""
    sampler: TaskSampler = SAMPLERS.build(choice.name, choice.args, kind=TaskSampler)
    return sampler


# Arms

SHOWN = 16
"""With more arms than this, the metrics report aggregates instead of each arm."""


def arm_name(params: Mapping[str, Any]) -> str:
    """Environment parameters in words, such as `calls=[2, 4],keys=9`: equal for equal ones."""
    return ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(params.items()))


def pick_arm(weights: Sequence[float], point: float) -> int:
    """The arm in whose share, laid end to end, a point of [0, 1) falls."""
    ends = list(itertools.accumulate(weights))
    return min(bisect_right(ends, point * ends[-1]), len(ends) - 1)


# A finite pool of tasks

log = logging.getLogger(__name__)

MAX_REPEATS = 1000
"""The search for different tasks ends after this many seeds in a row without a new one."""


def pool_seeds(env: ToolEnv, size: int, say: Callable[[str], None] = log.warning) -> Sequence[int]:
    """Seeds of the pool's tasks, none if tasks are endless.

    With `size`: of the first `size` different tasks of the training split (compared by `Task.data`), or of
    as many as there are, which is said. Without: of all tasks of an environment that has a finite number.
    Raises EnvError if the environment's number of tasks is not valid.
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
    """The indices 0..size-1 of a pool in the order of an epoch: another permutation for each run seed and epoch."""
    return np.random.default_rng(derive(run_seed, "epoch", epoch)).permutation(size)


# uniform


@SAMPLERS.register("uniform")
@dataclass(kw_only=True)
class UniformSampler(TaskSampler):
    """Goes through a finite pool without replacement, in a new order each epoch: the environment's tasks if it
    has a finite number, or its first `pool` different ones. Without a pool, a new task for every group.

    Group i has position i modulo the pool's size in epoch i // size. So the replacement of a group takes the next task,
    and the task of a group that failed, went stale, or was filtered or cancelled comes up again in the next epoch.
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
        if state.get("pool", len(self._seeds)) != len(self._seeds):
            log.warning(
                "rollout.sampler: the checkpoint was written with a pool of %d tasks, now there are %d: the epoch "
                "starts again in another order",
                state["pool"],
                len(self._seeds),
            )

    def metrics(self) -> dict[str, float]:
        return {"epoch": self._begun / len(self._seeds), "pool": float(len(self._seeds))} if self._seeds else {}


# success_weighted


@SAMPLERS.register("success_weighted")
@dataclass(kw_only=True)
class SuccessWeightedSampler(TaskSampler):
    """Draws an arm with weight max(`floor`, 4 p (1 - p)), where p is its running success.

    p (1 - p) is the variance of a 0/1 reward: how much a group of an arm can teach on average (called
    learnability in Rutherford et al. 2024, arXiv 2408.15099); the factor 4 makes it 1 at p = 0.5. p is the mean of a
    Beta(1, 1) prior and the outcomes; older ones are discounted by `decay` per group of the same arm.

    The arms are either `buckets` (environment parameters, each with ever new tasks) or the first `pool` different
    tasks of the training split (or as many as there are). `floor` keeps drawing every arm, so that forgetting is
    noticed.
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
        self._begin([arm_name(params) for params in self.buckets])
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
            if (arm := outcome.bucket) not in self._sums:  # gone from the data since the group began
                continue
            self._sums[arm] = self.decay * self._sums[arm] + outcome.success
            self._counts[arm] = self.decay * self._counts[arm] + 1.0

    def success(self, arm: str) -> float:
        """Running success, 0.5 before anything is known."""
        return (1.0 + self._sums[arm]) / (2.0 + self._counts[arm])

    def weight(self, arm: str) -> float:
        """The arm's weight before normalization, in [floor, 1]."""
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
    """Goes through `stages` (environment parameters, easiest first) one by one.

    The next stage begins once the mean success of the last `window` groups of the current one is at least `threshold`. A fraction
    `review` of the groups gets a task of an earlier stage, so that it is not forgotten; these do not move the stage.
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
        metrics = {"stage": float(self._stage)}
        if self._recent:
            metrics["stage_success"] = sum(self._recent) / len(self._recent)
        return metrics
