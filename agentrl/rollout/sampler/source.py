"""Bookkeeping for a task sampler: which group got which task, with which outcome, and both in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl.catalog import EnvRef
from agentrl.config.schema import StartConfig
from agentrl.errors import ConfigError
from agentrl.rollout.sampler.base import GroupOutcome, TaskChoice, TaskSampler
from agentrl.rollout.sampler.pool import pool_seeds
from agentrl.rollout.start import GoldStart, StartOutcome


class TaskSource:
    """Draws tasks for groups and passes their outcomes to the sampler, at updates and in order."""

    def __init__(self, env: EnvRef, sampler: TaskSampler, name: str, run_seed: int, start: StartConfig | None = None) -> None:
        self.env, self.sampler, self.name, self.run_seed = env, sampler, name, run_seed
        self.start = None if start is None else GoldStart(start, env)
        self._starts: list[StartOutcome] = []
        self._drawn: dict[int, TaskChoice] = {}
        self._outcomes: list[GroupOutcome] = []
        self._pool: Sequence[int] | None = None

    def pool(self) -> Sequence[int]:
        """Seeds of the tasks that the sampler chooses from; none if it makes new ones. Determined at the first call."""
        if self._pool is None:
            self._pool = ()
            wanted = self.sampler.wants()
            if wanted is not None:
                env = self.env.build()
                self._pool = pool_seeds(env, wanted)
                env.close()
                self.sampler.use(self._pool)
        return self._pool

    def draw(self, index: int) -> TaskChoice:
        """The task of a group; the same again if it was drawn before (a group that is run again)."""
        self.pool()
        if index not in self._drawn:
            choice = self.sampler.choose(self.run_seed, index)
            self._drawn[index] = choice if self.start is None else self.start.begin(self.run_seed, index, choice)
        return self._drawn[index]

    def finished(self, index: int, success: float | None) -> float | None:
        """A group finished with this share of successes; None, which says nothing about its task, if the success of no
        member is known. Of one that was given a part of the solution the sampler is told nothing. Returns the success
        of a whole task, which mixtures may learn from."""
        choice = self._drawn.pop(index)
        if success is not None and choice.horizon is not None and choice.given:
            self._starts.append(StartOutcome(index, choice.horizon, choice.given, success))
            return None
        if success is not None:
            self._outcomes.append(GroupOutcome(index, choice.bucket, success))
        return success

    def forget(self, index: int) -> None:
        """A group that failed, went stale or was cancelled says nothing about its task."""
        self._drawn.pop(index, None)

    def running(self) -> list[int]:
        """The groups that were drawn and have neither finished nor been forgotten."""
        return list(self._drawn)

    def update(self) -> None:
        """At an update: the sampler learns from what finished since the last one."""
        # Sorted, because the order in which groups finish differs from run to run.
        outcomes, self._outcomes = sorted(self._outcomes, key=lambda outcome: outcome.index), []
        self.sampler.observe(outcomes)
        starts, self._starts = sorted(self._starts, key=lambda outcome: outcome.index), []
        if self.start is not None:
            self.start.observe(starts)

    def metrics(self) -> dict[str, float]:
        """The sampler's metrics, under `sampler/`."""
        found = {f"sampler/{name}": value for name, value in self.sampler.metrics().items()}
        return found if self.start is None else found | {f"sampler/{k}": v for k, v in self.start.metrics().items()}

    def to_json(self) -> dict[str, Any]:
        """The sampler's state, the choices of running groups, and the outcomes that it has not seen yet."""
        return {
            "name": self.name,
            "state": self.sampler.state(),
            "drawn": {str(index): asdict(choice) for index, choice in self._drawn.items()},
            "outcomes": [asdict(outcome) for outcome in self._outcomes],
            **({} if self.start is None else {"start": self.start.state(), "starts": list(map(asdict, self._starts))}),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of `to_json`. Raises ConfigError if another sampler wrote it."""
        if state["name"] != self.name:
            raise ConfigError(
                f"rollout.sampler: the checkpoint was written with {state['name']!r}, but the config names {self.name!r}"
            )
        self.pool()
        self.sampler.load(state["state"])
        self._drawn = {int(index): TaskChoice(**choice) for index, choice in state["drawn"].items()}
        self._outcomes = [GroupOutcome(**outcome) for outcome in state["outcomes"]]
        if self.start is not None and "start" in state:
            self.start.load(state["start"])
            self._starts = [StartOutcome(**outcome) for outcome in state["starts"]]
