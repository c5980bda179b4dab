"""`staged`: a curriculum of stages, each with its own environment parameters."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from agentrl.errors import ConfigError
from agentrl.rollout.sampler.base import SAMPLERS, GroupOutcome, TaskChoice, TaskSampler, fresh_seed, uniform

log = logging.getLogger(__name__)


@SAMPLERS.register("staged")
@dataclass(kw_only=True)
class StagedSampler(TaskSampler):
    """Goes through `stages` (environment parameters, easiest first) one by one.

    The next stage begins once the mean success of the last `window` groups of the current one is at least `threshold`. If that
    of a full window is under `back`, the stage before begins again; with 0, the default, it never goes back. A stage that
    begins, again or for the first time, is judged by groups chosen since.

    A fraction `review` of the groups gets a task of an earlier stage, so that what was learned there is not lost, and a fraction
    `ahead` one of the next stage, so that what the policy can do there already (after a warm start) is not lost either, and its
    success there is known before the stage begins (`ahead_success`). Neither moves the stage.
    """

    stages: list[dict[str, Any]]
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    window: Annotated[int, Field(ge=1)] = 16
    review: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.1
    ahead: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    back: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0

    def __post_init__(self) -> None:
        name = "rollout.sampler 'staged'"
        if not self.stages:
            raise ConfigError(f"{name}: args.stages is empty; name at least one stage's parameters")
        if self.back >= self.threshold:
            raise ConfigError(
                f"{name}: args.back = {self.back:g} must be less than args.threshold = {self.threshold:g}, else a stage would "
                "begin and be left again at the same success"
            )
        if self.review + self.ahead >= 1:
            raise ConfigError(
                f"{name}: args.review + args.ahead = {self.review + self.ahead:g} must be less than 1, else no group would get a "
                "task of the stage itself"
            )
        self._stage = 0
        self._recent: deque[float] = deque(maxlen=self.window)
        self._next: deque[float] = deque(maxlen=self.window)
        self._begun = self._since = 0  # groups chosen so far, and when the stage last moved

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        self._begun = max(self._begun, index + 1)
        stage, point = self._stage, uniform(run_seed, index, "review")
        if stage and point < self.review:
            stage = int(uniform(run_seed, index, "stage") * stage)
        elif stage + 1 < len(self.stages) and point >= 1.0 - self.ahead:  # of the same draw: the shares are those of all groups
            stage += 1
        return TaskChoice(fresh_seed(run_seed, index), self.stages[stage], str(stage))

    def observe(self, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            if outcome.index < self._since:  # chosen before the stage last moved
                continue
            if outcome.bucket == str(self._stage + 1):
                self._next.append(outcome.success)
            if outcome.bucket != str(self._stage):
                continue
            self._recent.append(outcome.success)
            if len(self._recent) < self.window:
                continue
            # With a margin: 16 groups at a success of 0.6 add up to less than 16 * 0.6.
            if fmean(self._recent) > self.threshold - 1e-9 and self._stage + 1 < len(self.stages):
                self._move(1)
            elif fmean(self._recent) < self.back - 1e-9 and self._stage:
                self._move(-1)

    def _move(self, by: int) -> None:
        self._stage += by
        self._recent.clear()
        self._next.clear()
        # Of a sampler that only goes up and draws nothing ahead, no group chosen before has the new stage's tasks.
        self._since = self._begun if self.ahead or self.back else 0
        where = self.stages[self._stage]
        log.info("curriculum: %s stage %d of %d: %s", "back to" if by < 0 else "now", self._stage + 1, len(self.stages), where)

    def variants(self) -> Sequence[Mapping[str, Any]]:
        return self.stages

    def state(self) -> dict[str, Any]:
        state = {"stage": self._stage, "recent": list(self._recent)}
        return {**state, "next": list(self._next), "begun": self._begun, "since": self._since}

    def load(self, state: Mapping[str, Any]) -> None:
        self._stage = min(state["stage"], len(self.stages) - 1)
        self._recent = deque(state["recent"], maxlen=self.window)
        # Missing in older checkpoints, of samplers that only went up.
        self._next = deque(state.get("next", ()), maxlen=self.window)
        self._begun, self._since = state.get("begun", 0), state.get("since", 0)

    def metrics(self) -> dict[str, float]:
        metrics = {"stage": float(self._stage)}
        if self._recent:
            metrics["stage_success"] = sum(self._recent) / len(self._recent)
        if self._next:
            metrics["ahead_success"] = sum(self._next) / len(self._next)
        return metrics
