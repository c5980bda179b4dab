"""Horizons: how many calls the gold solutions of tasks have, and the bins by which success is told apart.

`Trajectory.horizon` has the number of an episode's task. Few different numbers are a bin each; of more there are ranges, chosen
once per run from its own tasks and written to `horizons.json` of its folder, so that all rows of a run, also after a resume, have
the same.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.catalog import EnvRef
from agentrl.config import TrainConfig
from agentrl.config.envs import alone, trained_at_all
from agentrl.env import ToolEnv
from agentrl.files import atomic_write
from agentrl.plain_data import json_text
from agentrl.rollout.sampler.base import fresh_seed, make_sampler
from agentrl.run.folder import stored_object
from agentrl.trajectory import Trajectory

log = logging.getLogger(__name__)

FILE = "horizons.json"
MOST = 6
"""Bins of an environment: up to so many different numbers are told apart one by one."""
TASKS, LOOKED = 24, 120
"""Tasks of each set of parameters that are looked at, and of an environment in all."""
SECONDS = 30.0
"""For so long at most, in an environment: far more than `LOOKED` tasks take, since a bin that hangs on the machine's load makes
two runs of one config hard to compare."""
VALUES = ("success", "reward", "scored", "unscored", "turns", "response_length")
"""What a row has of each bin, under `horizon/BIN/`."""
KEY = re.compile(r"(?:env/([^/]+)/)?horizon/([^/]+)/success")
"""A success by horizon in a row: the environment's name, of several, and the bin."""


@dataclass(frozen=True, slots=True)
class Bins:
    """Ranges of horizons: each begins at a number of `starts` and ends before the next, the last one at `last`. Without any,
    every number is a bin by itself."""

    starts: tuple[int, ...] = ()
    last: int = 0

    @classmethod
    def of(cls, horizons: Collection[int]) -> Bins:
        """Bins for tasks with these horizons: of `MOST` different ones or fewer each its own, of more as many ranges, with about
        as many different numbers in each."""
        numbers = sorted(set(horizons))
        if len(numbers) <= MOST:
            return cls()
        return cls(tuple(int(part[0]) for part in np.array_split(numbers, MOST)), numbers[-1])

    def label(self, horizon: int) -> str:
        """The name of the bin: "7", "5-8", or beyond all ranges "under-5", "over-40"."""
        if not self.starts:
            return str(horizon)
        if horizon < self.starts[0]:
            return f"under-{self.starts[0]}"
        if horizon > self.last:
            return f"over-{self.last}"
        ends = [*(start - 1 for start in self.starts[1:]), self.last]
        low, high = next((low, high) for low, high in zip(self.starts, ends, strict=True) if horizon <= high)
        return str(low) if low == high else f"{low}-{high}"


def order(label: str) -> tuple[int, int]:
    """By which labels are sorted, from the shortest tasks to the longest."""
    number = int(re.findall(r"\d+", label)[0])
    return number, -1 if label.startswith("under") else int(label.startswith("over"))


def by_bin(episodes: Iterable[Trajectory], bins: Bins) -> dict[str, list[Trajectory]]:
    """The episodes whose horizon is known, by the labels of their bins, the shortest first."""
    found: dict[str, list[Trajectory]] = {}
    for episode in episodes:
        if episode.horizon is not None:
            found.setdefault(bins.label(episode.horizon), []).append(episode)
    return {label: found[label] for label in sorted(found, key=order)}


def labels_of(row: Mapping[str, Any], env: str | None = None) -> list[str]:
    """The bins of which a row has a success: of its environment, or of the one called `env`; the shortest first."""
    found = [match for key in row if (match := KEY.fullmatch(key))]
    return sorted({match[2] for match in found if match[1] == env}, key=order)


def key_of(label: str, value: str, env: str | None = None) -> str:
    """The key of a row's value by horizon; `env`: of this one of several environments."""
    return f"{'' if env is None else f'env/{env}/'}horizon/{label}/{value}"


def summary_of(rows: Sequence[Mapping[str, Any]], env: str | None = None) -> dict[str, dict[str, Any]]:
    """By horizon, of the held-out tasks before and after training: how many, success and reward, and how long their episodes were
    after it. Empty without horizons."""
    ends = {row["phase"]: row for row in rows if row["phase"] in ("before", "after")}
    found: dict[str, dict[str, Any]] = {}
    for label in sorted({label for row in ends.values() for label in labels_of(row, env)}, key=order):
        before, after = (
            {name: ends.get(phase, {}).get(key_of(label, name, env)) for name in VALUES} for phase in ("before", "after")
        )
        counts = [of[name] for of in (after, before) for name in ("scored", "unscored") if of[name] is not None][:2]
        found[label] = {
            "tasks": sum(counts),
            **{f"{name}_before": before[name] for name in ("success", "reward")},
            **{f"{name}_after": after[name] for name in ("success", "reward", "turns", "response_length")},
        }
    return found


def run_bins(config: TrainConfig, folder: Path) -> dict[str, Bins]:
    """The bins of each environment of a run whose horizons are known: those in the run's folder, or else chosen now and written
    there. Raises RunFolderError if the file is damaged."""
    file = folder / FILE
    stored = stored_object(file, "remove it: other bins are then chosen")
    if stored is not None:
        return {name: Bins(tuple(row["starts"]), row["last"]) for name, row in stored.items()}
    found = {}
    for env in config.envs:
        one = alone(config, env)
        until = time.monotonic() + SECONDS
        horizons = list(_horizons(one, until))
        if horizons:
            found[env.called] = Bins.of(horizons)
    rows = {name: {"starts": list(bins.starts), "last": bins.last} for name, bins in found.items()}
    atomic_write(file, json_text(rows) + "\n")
    return found


def variants_of(one: TrainConfig) -> list[tuple[str, EnvRef, str, Sequence[int]]]:
    """The tasks of an environment's run: in words, the environment with its parameters, the split, and the seeds of the first
    tasks. Of training for each `params` of the sampler (none with a weight of 0 throughout), and the held-out ones."""
    ref, sampler = EnvRef.of(one), make_sampler(one.rollout.sampler)
    fresh = [fresh_seed(one.seed, index) for index in range(TASKS)]
    held = range(min(one.eval.tasks, TASKS))
    variants = list(sampler.variants()) if trained_at_all(one.envs[0].weight) else []
    named = [_words(params) if len(variants) > 1 else "training" for params in variants]
    trained = [(name, ref.with_params(params), "train", fresh) for name, params in zip(named, variants, strict=True)]
    return [*trained, ("held-out", ref, one.eval.split, held)]


def seeds_in(env: ToolEnv, split: str, seeds: Sequence[int]) -> Sequence[int]:
    """The seeds as tasks of a split that may have an end: as many of its tasks, spread over it."""
    count = env.task_count(split)
    if count is None:
        return seeds
    return [int(at) for at in np.linspace(0, count - 1, min(count, len(seeds)))] if count else []


def _horizons(one: TrainConfig, until: float) -> Iterator[int]:
    """Horizons of tasks, in turn of each set of parameters, of so many tasks or until the time is over."""
    built = [(ref.build(), split, seeds) for _, ref, split, seeds in variants_of(one)]
    try:
        turns = [[(env, split, seed) for seed in seeds_in(env, split, seeds)] for env, split, seeds in built]
        tasks = (task for task in chain.from_iterable(zip_longest(*turns)) if task is not None)
        for number, task in enumerate(islice(tasks, LOOKED)):
            if time.monotonic() > until:
                log.warning(
                    "%s: bins of horizons are chosen by its first %d tasks: tasks are slow to make", one.envs[0].called, number
                )
                return
            if (found := task[0].horizon(task[0].make_task(task[2], task[1]))) is not None:
                yield found
    finally:
        for env, _, _ in built:
            env.close()


def _words(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in params.items())
