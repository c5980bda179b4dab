"""`uniform`: every task of a finite pool once per epoch; with endless tasks, a new one for every group."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from agentrl.rollout.sampler.base import SAMPLERS, TaskChoice, TaskSampler, fresh_seed
from agentrl.rollout.sampler.pool import epoch_order

log = logging.getLogger(__name__)


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
        self._seeds: Sequence[int] = ()
        self._begun = 0

    def wants(self) -> int | None:
        return self.pool

    def use(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds

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
