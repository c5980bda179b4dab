"""`uniform`: every group a new task of the environment, as the environment itself draws them."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.rollout.sampler.base import TaskChoice, TaskSampler, fresh_seed


@dataclass(kw_only=True)
class UniformSampler(TaskSampler):
    """A new task for every group."""

    def choose(self, run_seed: int, index: int) -> TaskChoice:
        return TaskChoice(fresh_seed(run_seed, index))
