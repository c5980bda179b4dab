"""Samplers that follow the progress of buckets of tasks, or predict success from parameters."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from agentrl.rollout.engine import derive
from agentrl.rollout.samplers import (
    SAMPLERS,
    GroupOutcome,
    TaskChoice,
    TaskSampler,
    arm_metrics,
    arm_name,
    fresh_seed,
    pick_arm,
    uniform,
)
from agentrl.utils.errors import ConfigError

# by_progress

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
        """Rise of the arm's success over its window, in [-1, 1]; below 0: it fell. None: not known yet."""
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


# predicted

MOST_TRIED = 32
"""This many sets of parameters, corners among them, are tried before a run; so no more than 5 parameters may vary."""
BINS = 5
FADE = 0.98
"""What a group's weight in the calibration error is multiplied by with each later one."""


@SAMPLERS.register("predicted")
@dataclass(kw_only=True)
class PredictedSampler(TaskSampler):
    """Draws `candidates` sets of parameters, integers of `ranges` ([first, last] or [first, last, step], with both ends), and of
    these one with weight max(`floor`, 4 p (1 - p)), where p is its predicted success: groups that would teach nothing are rarely
    begun.

    p = sigmoid(c . x), x = (1, z_1, ..., z_d), z_k = (value - middle) / (half the width / sqrt 3): parameters drawn evenly from
    their range have mean 0 and variance 1. After each group with a share s of successes, in the order of their indices, one step
    of the logistic regression: c += `rate` (s - p) x / (1 + d); at first c = 0, and all tasks are alike. So success may rise or
    fall with a parameter, and its middle may move, but a parameter that is hardest in the middle cannot be expressed.

    p (1 - p) is the variance of a 0/1 reward, as for `success_weighted`, which knows nothing about an arm that it has not seen.
    """

    ranges: dict[str, Annotated[list[int], Field(min_length=2, max_length=3)]]
    candidates: Annotated[int, Field(ge=1)] = 8
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    rate: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0

    def __post_init__(self) -> None:
        name, most = "rollout.sampler 'predicted'", int(math.log2(MOST_TRIED))
        if not 1 <= len(self.ranges) <= most:
            raise ConfigError(
                f"{name}: args.ranges has {len(self.ranges)} parameters; give 1 to {most}, such as {{ calls = [2, 12] }}"
            )
        self._values = {key: range(ends[0], ends[1] + 1, *ends[2:]) for key, ends in self.ranges.items() if 0 not in ends[2:]}
        for key, ends in self.ranges.items():
            if not (values := self._values.get(key)) or values[0] != ends[0] or values[-1] != ends[1]:
                raise ConfigError(
                    f"{name}: args.ranges.{key} = {ends}: expected [first, last] or [first, last, step], with first <= last "
                    "and steps that meet both"
                )
        self._c = [0.0] * (1 + len(self.ranges))
        self._bins = [[0.0, 0.0, 0.0] for _ in range(BINS)]  # of groups by predicted success: number, predictions, successes
        self._last: tuple[float, float] | None = None

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        draw = np.random.default_rng(derive(run_seed, "predicted", index))
        drawn = [
            {key: values[draw.integers(len(values))] for key, values in self._values.items()} for _ in range(self.candidates)
        ]
        params = drawn[pick_arm([self.weight(params) for params in drawn], draw.random())]
        return TaskChoice(fresh_seed(run_seed, index), params, json.dumps(params))

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        predictions = []
        for outcome in outcomes:
            params = json.loads(outcome.bucket)
            if params.keys() != self.ranges.keys():  # begun before the config was changed
                continue
            x, p = self._x(params), self.predict(params)
            predictions.append((p, outcome.success))
            self._c = [c + self.rate * (outcome.success - p) * of / len(x) for c, of in zip(self._c, x, strict=True)]
            self._bins = [[FADE * number for number in numbers] for numbers in self._bins]
            of_bin = self._bins[min(int(p * BINS), BINS - 1)]
            of_bin[0], of_bin[1], of_bin[2] = of_bin[0] + 1.0, of_bin[1] + p, of_bin[2] + outcome.success
        if predictions:
            self._last = fmean(p for p, _ in predictions), fmean(success for _, success in predictions)

    def predict(self, params: Mapping[str, float]) -> float:
        """The predicted share of successes of a task with these parameters."""
        return 1.0 / (1.0 + math.exp(-sum(c * of for c, of in zip(self._c, self._x(params), strict=True))))

    def weight(self, params: Mapping[str, int]) -> float:
        """The weight of such a task before normalization, in [floor, 1]."""
        p = self.predict(params)
        return max(self.floor, 4.0 * p * (1.0 - p))

    def variants(self) -> Sequence[Mapping[str, Any]]:
        """All, if they are at most 32, else as many values of each parameter as fit, evenly spaced with both ends."""
        sizes = [len(values) for values in self._values.values()]
        each = max(sizes) if math.prod(sizes) <= MOST_TRIED else int(MOST_TRIED ** (1 / len(sizes)) + 1e-9)
        places = {n: {round(float(at)) for at in np.linspace(0, n - 1, min(n, each))} for n in sizes}
        grid = [[values[place] for place in sorted(places[len(values)])] for values in self._values.values()]
        return [dict(zip(self.ranges, values, strict=True)) for values in itertools.product(*grid)]

    def state(self) -> dict[str, Any]:
        coefficients = dict(zip(["", *self.ranges], self._c, strict=True))
        return {"coefficients": coefficients, "bins": self._bins, "last": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        self._c = [state["coefficients"].get(key, 0.0) for key in ("", *self.ranges)]
        self._bins = [list(numbers) for numbers in state["bins"]]
        self._last = None if state["last"] is None else (state["last"][0], state["last"][1])

    def metrics(self) -> dict[str, float]:
        metrics = {}
        middle: dict[str, float] = {key: (values[0] + values[-1]) / 2 for key, values in self._values.items()}
        for key, values in self._values.items():
            for end in sorted({values[0], values[-1]}):
                metrics[f"{key}={end}/success"] = self.predict({**middle, key: end})
        if self._last is not None:
            metrics["predicted"], metrics["observed"] = self._last
            # The expected calibration error: |mean success - mean prediction| over the groups of each of 5 equal ranges of
            # predicted success, averaged by their numbers of groups; older groups count less. A prediction is made before its
            # group is learned from.
            total = sum(count for count, _, _ in self._bins)
            apart = sum(abs(successes - predictions) for _, predictions, successes in self._bins)
            metrics["calibration_error"] = apart / total if total else 0.0
        return metrics

    def _x(self, params: Mapping[str, float]) -> list[float]:
        ends = {key: (values[0], values[-1]) for key, values in self._values.items()}
        return [1.0, *(math.sqrt(3.0) * (2 * params[key] - low - high) / max(high - low, 1) for key, (low, high) in ends.items())]
