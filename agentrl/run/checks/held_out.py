"""No training run draws from the held-out split: the tasks of the two splits are compared before it starts; both have some."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from agentrl.catalog import EnvRef
from agentrl.config import EnvConfig, TrainConfig
from agentrl.config.envs import alone, trained, warmed
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, TaskDataError
from agentrl.rollout.sampler.base import make_sampler
from agentrl.trajectory import Task

TRAIN = "train"
MOST = 20_000
"""Tasks of a split that are compared."""


def check_held_out(config: TrainConfig) -> None:
    """Raise ConfigError if a task that an environment of the run trains on is also one of those that it, or another of the run,
    is evaluated on. Compared by content, of environments with finitely many tasks that are played here; others make them by
    content (`agentrl.env.draw`), or are beyond reach. Also if one of the two splits has no task at all.

    Reads: env, tools, eval.split, rollout.sampler, sft.params, sft.envs.
    """
    trained: dict[str, tuple[str, Task]] = {}
    for env in config.envs:
        refs = _trained_on(config, env)
        if refs and env.params.get("split", TRAIN) != TRAIN:
            raise ConfigError(
                f"env.params.split = {env.params['split']!r} ({env.called}): a run trains on the split {TRAIN!r} and on no other"
                "; eval.split says what it is evaluated on"
            )
        for ref in refs:
            for task in _tasks(ref, TRAIN, env.called):
                trained.setdefault(_content(task), (env.called, task))
    for env in config.envs if trained else ():
        one = alone(config, env)
        split = one.eval.split
        for task in () if split == TRAIN else _tasks(EnvRef.of(one), split, env.called):
            if (found := trained.get(_content(task))) is not None:
                _refuse(env.called, split, task, *found)


def _refuse(evaluated: str, split: str, task: Task, trains: str, other: Task) -> None:
    where = "" if trains == evaluated else f" by {trains}"
    raise ConfigError(
        f"env ({evaluated}): task {task.id!r} of the split {split!r} is also trained on{where}, as {other.id!r}: the run would "
        'be evaluated on what it trains on. Choose env.params that keep them apart, or eval.split = "train" if that is meant'
    )


def _trained_on(config: TrainConfig, env: EnvConfig) -> list[EnvRef]:
    """The environment under each set of parameters that training gives it: the sampler's if an update draws its tasks, and the
    warm start's if it takes part in that; none if it is only evaluated."""
    one = alone(config, env)
    ref = EnvRef.of(one)
    sampler = make_sampler(one.rollout.sampler)
    drawn = [ref, *(ref.with_params(params) for params in sampler.variants())] if trained(one) else []
    return [*drawn, ref.with_params(one.sft.params)] if one.sft is not None and env in warmed(config) else drawn


def _tasks(ref: EnvRef, split: str, called: str) -> Iterator[Task]:
    """The tasks of a split; none if they have no end, or are elsewhere. Raises ConfigError if it has none at all."""
    if ref.at is not None:
        return
    env = replace(ref, wrappers=()).build()
    try:
        count = env.task_count(split)
        if count == 0:
            _none_there(called, env, split)
        for seed in range(min(count or 0, MOST)):
            yield env.make_task(seed, split)
    finally:
        env.close()


def _none_there(called: str, env: ToolEnv, split: str) -> None:
    try:
        env.make_task(0, split)
        said = ""
    except TaskDataError as problem:
        said = f": {problem}"
    ways = "" if split == TRAIN else ', or eval.split = "train" if the run may be evaluated on what it trains on'
    raise ConfigError(f"env ({called}): the split {split!r} has no task{said}. Choose other env.params{ways}")


def _content(task: Task) -> str:
    return json.dumps([dict(task.data), dict(task.gold)], sort_keys=True, default=str)
