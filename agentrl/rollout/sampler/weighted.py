"""`success_weighted`: kinds of tasks (or single tasks) with medium success are drawn more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.rollout.sampler.arms import arm_metrics, arm_name, pick_arm
from agentrl.rollout.sampler.base import SAMPLERS, GroupOutcome, TaskChoice, TaskSampler, fresh_seed, uniform


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
        self._seeds: Sequence[int] = ()
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
        self._seeds = seeds
        self._begin([str(seed) for seed in seeds])

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        arm = pick_arm([self.weight(arm) for arm in self._arms], uniform(run_seed, index, "sampler"))
        if self.pool:
            return TaskChoice(self._seeds[arm], {}, self._arms[arm])
        return TaskChoice(fresh_seed(run_seed, index), self.buckets[arm], self._arms[arm])

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            arm = outcome.bucket
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
        return {"success": mean, **arm_metrics(self._arms, self.weight, success=self.success)}
