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

BARREN = 1000
"""So many seeds in a row without a new task end the search for more."""


def pool_seeds(env: ToolEnv, size: int) -> Sequence[int]:
    """Seeds of the pool's tasks, none if tasks are endless.

    With `size` those of the first so many different tasks of the training split (compared by `Task.data`), or of
    as many as there are, which is logged; without, of all tasks of an environment that has a finite number.
    Raises EnvError for a number of tasks that is none.
    """
    count = env.task_count("train")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise EnvError(f"{env.id}: task_count('train') gave {count!r}; expected 1 or more, or None if tasks are endless")
    if not size:
        return range(count or 0)
    found: dict[str, int] = {}
    seed = barren = 0
    while len(found) < size and barren < BARREN and (count is None or seed < count):
        content = json.dumps(env.make_task(seed, "train").data, sort_keys=True, default=str)
        barren = 0 if found.setdefault(content, seed) == seed else barren + 1
        seed += 1
    if len(found) < size:
        log.warning(
            "rollout.sampler: the training split has %d different tasks, not the %d of args.pool (%d seeds tried)",
            len(found),
            size,
            seed,
        )
    return list(found.values())


@lru_cache(maxsize=4)
def epoch_order(run_seed: int, epoch: int, size: int) -> np.ndarray:
    """The places 0..size-1 of a pool in the order of an epoch: another permutation for each run seed and epoch."""
    return np.random.default_rng(derive(run_seed, "epoch", epoch)).permutation(size)
