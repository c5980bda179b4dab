"""Demonstrations for an update: the gold solutions of tasks at which a whole group failed (`algorithm.demonstrations`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tensordict import TensorDict

from agentrl.batch import collate
from agentrl.errors import EnvError
from agentrl.rollout.evaluate import success_rate
from agentrl.rollout.player import RunEnv
from agentrl.rollout.sampler.base import TaskChoice
from agentrl.train.experience import demonstrated
from agentrl.trajectory import Group, Trajectory
from agentrl.warm_start import gold_transcript, without_chance

log = logging.getLogger(__name__)

MEMBER = -2
"""The member number of a demonstration, which no episode of a group has."""


class Demonstrations:
    """Remembers the tasks of groups in which nobody succeeded, also of groups that are dropped, until the next update.

    With `rollout.max_staleness` above 0 groups end at any time, so a checkpoint holds what has failed since the last update."""

    def __init__(self, envs: Sequence[RunEnv], episodes: int, longest: int) -> None:
        """`episodes`: the most of an update; `longest`: tokens of the longest row that can be trained."""
        self.envs, self.episodes, self.longest = {env.name: env for env in envs}, episodes, longest
        self._failed: dict[int, TaskChoice] = {}
        self._said = False

    def seen(self, group: Group, choice: TaskChoice) -> None:
        """A group has ended, whose task is `choice`."""
        if success_rate(group.scored()) == 0.0:
            self._failed[group.index] = choice

    def to_json(self) -> list[dict[str, Any]]:
        """The tasks that are owed to the next update, for a checkpoint."""
        return [{"group": index, "choice": asdict(choice)} for index, choice in self._failed.items()]

    def load_json(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Inverse of `to_json`."""
        self._failed = {one["group"]: TaskChoice(**one["choice"]) for one in state}

    async def take(self) -> tuple[TensorDict | None, dict[str, float]]:
        """The rows of the next update's demonstrations (None if there are none), and metrics."""
        failed, self._failed = self._failed, {}
        made: list[tuple[int, Trajectory]] = []
        skipped = 0
        for index in sorted(failed):
            if len(made) == self.episodes:
                break
            gold = await self._gold(index, failed[index])
            if gold is None:
                skipped += 1
            else:
                made.append((index, gold))
        metrics = {"demonstrations/episodes": float(len(made)), "demonstrations/skipped": float(skipped)}
        if not made:
            return None, metrics
        rows = demonstrated(collate([gold for _, gold in made], [index for index, _ in made], allow_unscored=True))
        return rows, metrics | {"demonstrations/tokens": float(sum(gold.sampled_tokens for _, gold in made))}

    async def _gold(self, index: int, choice: TaskChoice) -> Trajectory | None:
        part = self.envs[choice.env]
        env = without_chance(part.env.with_params(choice.params)).build()
        policy, limit = part.policy, part.limits.episode_timeout
        try:
            async with asyncio.timeout(limit):
                gold = await gold_transcript(env, policy.renderer, choice.seed, "train", policy.context, part.limits)
        except TimeoutError:
            self._say(index, f"its gold solution was not played within rollout.episode_timeout = {limit:g} s")
            return None
        except (NotImplementedError, EnvError) as fault:
            self._say(index, f"its gold solution cannot be played: {fault}")
            return None
        longest = max(map(len, gold.ledgers))
        if longest > self.longest:
            self._say(index, f"its gold solution has {longest} tokens, and a row may have {self.longest}")
            return None
        gold.member = MEMBER
        return gold

    def _say(self, index: int, why: str) -> None:
        if not self._said:  # the metric demonstrations/skipped counts them all
            log.warning("algorithm.demonstrations: the task of group %d is left out: %s", index, why)
        self._said = True
