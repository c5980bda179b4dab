"""`by_progress`: kinds of tasks whose success changes, either way, are drawn more often."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Annotated, Any

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.rollout.sampler.arms import arm_metrics, arm_name, pick_arm
from agentrl.rollout.sampler.base import SAMPLERS, GroupOutcome, TaskChoice, TaskSampler, fresh_seed, uniform

FEWEST = 4
"""An arm with fewer groups than this has no slope yet."""


@SAMPLERS.register("by_progress")
@dataclass(kw_only=True)
class ByProgressSampler(TaskSampler):
    """Draws an arm with weight max(`floor`, |progress|), where progress is how far its success rose or fell.

    The success s_0 ... s_(n-1) of the arm's last n <= `window` groups is fitted by the line of least squares, whose slope is
    b = sum (i - mean i) (s_i - mean s) / sum (i - mean i)^2 per group; progress = b (n - 1), what the line rises over these
    groups, cut to [-1, 1]. An arm with fewer than 4 groups has weight 1, so that each is seen.

    Learning progress as in Teacher-Student Curriculum Learning (Matiisen, Oliver, Cohen and Schulman 2017, arXiv 1707.00183):
    practise that on which progress is fastest, and, by the absolute value, that which is being forgotten. Departures: the arm is
    drawn by weight, the line is over the arm's own groups instead of time, and `floor` keeps drawing every arm.
    """

    buckets: list[dict[str, Any]]
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    window: Annotated[int, Field(ge=FEWEST)] = 16

    def __post_init__(self) -> None:
        self._arms = [arm_name(params) for params in self.buckets]
        if len(set(self._arms)) < max(len(self._arms), 1):
            raise ConfigError(
                "rollout.sampler 'by_progress': "
                + ("two of args.buckets are the same" if self._arms else "args.buckets is empty; name at least one bucket")
            )
        self._recent = {arm: deque[float](maxlen=self.window) for arm in self._arms}

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        arm = pick_arm([self.weight(arm) for arm in self._arms], uniform(run_seed, index, "sampler"))
        return TaskChoice(fresh_seed(run_seed, index), self.buckets[arm], self._arms[arm])

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            if outcome.bucket in self._recent:  # one that ran while the config was changed may be of an arm that is no more
                self._recent[outcome.bucket].append(outcome.success)

    def progress(self, arm: str) -> float | None:
        """How far the arm's success rose over its window, in [-1, 1]; below 0: it fell. None: not known yet."""
        recent = self._recent[arm]
        if len(recent) < FEWEST:
            return None
        slope = linear_regression(range(len(recent)), recent).slope
        return max(-1.0, min(1.0, slope * (len(recent) - 1)))

    def weight(self, arm: str) -> float:
        """The arm's weight before normalization, in [floor, 1]."""
        progress = self.progress(arm)
        return 1.0 if progress is None else max(self.floor, abs(progress))

    def success(self, arm: str) -> float | None:
        """Mean success of its last groups; None without any."""
        return fmean(self._recent[arm]) if self._recent[arm] else None

    def variants(self) -> Sequence[Mapping[str, Any]]:
        return self.buckets

    def state(self) -> dict[str, Any]:
        return {arm: list(recent) for arm, recent in self._recent.items() if recent}

    def load(self, state: Mapping[str, Any]) -> None:
        for arm, recent in state.items():
            if arm in self._recent:  # an arm that the config no longer has is forgotten
                self._recent[arm] = deque(recent, maxlen=self.window)

    def metrics(self) -> dict[str, float]:
        return arm_metrics(self._arms, self.weight, success=self.success, progress=self.progress)
