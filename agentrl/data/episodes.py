"""Episodes of runs, chosen by what they scored: for rejection sampling, and as pairs of which one is better."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from agentrl.config.schema import DataConfig
from agentrl.data.files import RowPlace, row_at
from agentrl.errors import BadRowError
from agentrl.trajectory import Trajectory

TaskKey = tuple[str, str, int, int, str]


@dataclass(frozen=True, slots=True)
class Scored:
    """An episode in a file: where it is, the task that it is of (environment, id, seed, turns given, a digest of what it says: of
    two runs with other `env.params` ids and seeds can be equal), what it scored."""

    place: RowPlace
    task: TaskKey
    reward: float

    def load(self) -> Trajectory:
        """The episode. Raises BadRowError if the row is of another shape."""
        return episode_of(row_at(self.place))


def is_episode(row: Mapping[str, Any]) -> bool:
    """Whether a row is an episode of a run's."""
    return row.get("ledgers") is not None and "task" in row


def episode_of(row: Mapping[str, Any]) -> Trajectory:
    """The episode that a row is. Raises BadRowError."""
    try:
        return Trajectory.from_json(row)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise BadRowError(f"not an episode of this version of agentrl: {type(problem).__name__}: {problem}"[:200]) from None


def scored(place: RowPlace, row: Mapping[str, Any], data: DataConfig, passed: Counter[str]) -> Scored | None:
    """The episode in a row if the config's filters let it through; else None, and `passed` counts why. Raises BadRowError."""
    try:
        task, reward = row["task"], row["reward"]
        key = (str(row.get("env") or row["env_id"]), str(task["id"]), int(task["seed"]), int(row.get("given", 0)), _said(task))
        split, success = task.get("split", "train"), row.get("success")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise BadRowError(f"not an episode of this version of agentrl: {type(problem).__name__}: {problem}"[:200]) from None
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise BadRowError(f"reward: expected a number, got {reward!r}"[:200])
    why = None
    if data.split is not None and split != data.split:
        why = f"of the split {split!r}, not data.split = {data.split!r}"
    elif reward is None:
        why = "unscored"
    elif data.loss == "dpo" and row.get("parent") is not None:
        why = "branches of others (rollout.branch): of their first turns they have no tokens to compare with another's"
    elif data.min_reward is not None and reward < data.min_reward:
        why = f"below data.min_reward = {data.min_reward:g}"
    elif data.success and success is not True:
        why = "no success (data.success)"
    if why is not None:
        passed[why] += 1
        return None
    return Scored(place, key, float(reward))


def best(found: Iterable[Scored], data: DataConfig, passed: Counter[str]) -> list[Scored]:
    """At most `data.per_task` episodes of each task: the highest rewards, of equal ones the first; in the files' order."""
    episodes = list(found)
    if data.per_task is None:
        return episodes
    kept = [one for same in _by_task(episodes) for one in sorted(same, key=lambda one: -one.reward)[: data.per_task]]
    if len(episodes) > len(kept):
        passed[f"more than data.per_task = {data.per_task} of a task"] += len(episodes) - len(kept)
    chosen = {id(one) for one in kept}
    return [one for one in episodes if id(one) in chosen]


def pairs(found: Iterable[Scored], data: DataConfig, passed: Counter[str]) -> Iterator[tuple[Scored, Scored]]:
    """Pairs (better, worse) of episodes of one task: its best with its worst, then the next of both, at most `data.per_task` (1)
    and as long as their rewards differ by `data.margin`. An episode is in one pair at most."""
    for same in _by_task(found):
        ranked = sorted(same, key=lambda one: -one.reward)
        number = 0
        while number < (data.per_task or 1) and number < len(ranked) - 1 - number:
            better, worse = ranked[number], ranked[-1 - number]
            if better.reward - worse.reward < data.margin:
                break
            yield better, worse
            number += 1
        if len(ranked) > 2 * number:
            passed["no pair: alike in reward, or beyond data.per_task"] += len(ranked) - 2 * number


def _by_task(found: Iterable[Scored]) -> list[list[Scored]]:
    tasks: dict[TaskKey, list[Scored]] = defaultdict(list)
    for one in found:
        tasks[one.task].append(one)
    return list(tasks.values())


def _said(task: Mapping[str, Any]) -> str:
    """A digest of a task's data and gold answers."""
    return sha256(json.dumps([task.get("data"), task.get("gold")], sort_keys=True).encode()).hexdigest()[:16]
