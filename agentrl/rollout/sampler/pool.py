"""A finite pool of training tasks: the seeds that name them, and the order in which an epoch takes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agentrl.env import ToolEnv
from agentrl.errors import EnvError
from agentrl.rollout.seeds import derive

log = logging.getLogger(__name__)

MAX_REPEATS = 1000
"""The search for different tasks ends after this many seeds in a row without a new one."""


def pool_seeds(env: ToolEnv, size: int) -> Sequence[int]:
    """Seeds of the pool's tasks, none if tasks are endless.

    With `size`: of the first `size` different tasks of the training split (compared by `Task.data`), or of
    as many as there are, which is logged. Without: of all tasks of an environment that has a finite number.
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
        log.warning(
            "rollout.sampler: the training split has %d different tasks, not the %d of args.pool (%d seeds tried)",
            len(by_content),
            size,
            seed,
        )
    return list(by_content.values())


@lru_cache(maxsize=4)
def epoch_order(run_seed: int, epoch: int, size: int) -> np.ndarray:
    """The indices 0..size-1 of a pool in the order of an epoch: another permutation for each run seed and epoch."""
    return np.random.default_rng(derive(run_seed, "epoch", epoch)).permutation(size)
