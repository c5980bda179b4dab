"""What is checked, and what a check found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.env.base import ToolEnv
from agentrl.env.own_reward import ScoreLike, ScorerLike
from agentrl.env.spaces import Action
from agentrl.env.sync import run_sync
from agentrl.reward import Scorer
from agentrl.trajectory import Message, Task


class CheckFailed(Exception):
    """The environment fails the check; the message is the evidence."""


class Skipped(Exception):
    """The check does not apply to this environment; the message says why."""


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The outcome of one check. `ok` is None if it does not apply."""

    check: str
    ok: bool | None
    evidence: str
    seconds: float


@dataclass(frozen=True)
class Subject:
    """The environment that is checked.

    `build` gives a new instance each time, `scorer` scores whole episodes (None: checks of rewards do not
    apply), `tasks` is the number of tasks per check, `fuzz` the number of inputs per tool. `portable` is
    a pickled object with `build()`, for building the environment in another process. `every`: gold and idling are tried on
    each task of an environment that has finitely many. `spec`: the reward spec's path, for evidence. `light`: episodes start
    programs, so faults are planted in one tool alone.
    """

    build: Callable[[], ToolEnv]
    scorer: ScorerLike | None
    tasks: int = 12
    fuzz: int = 500
    portable: bytes | None = None
    every: bool = False
    spec: str = ""
    light: bool = False

    def probed(self, env: ToolEnv, split: str, count: int) -> range:
        """Seeds of the tasks of a split: `count` of them, or each with `every`."""
        known = env.task_count(split)
        if known is not None:
            return range(known if self.every else min(count, known))
        if self.every:
            raise CheckFailed(f"--all-tasks: split {split!r} has no end of tasks; use --tasks N")
        return range(count)

    def seeds(self, count: int | None = None) -> range:
        return range(count or self.tasks)

    def few_seeds(self) -> range:
        """For checks that play a task several times."""
        return range(min(self.tasks, max(2, self.tasks // 2)))

    def gold(self, env: ToolEnv) -> list[Message]:
        """The gold turns of the running task. Raises CheckFailed if the environment has none."""
        try:
            return env.gold_turns(env.task)
        except NotImplementedError as problem:
            raise CheckFailed(f"no gold_turns: {problem}") from problem

    def turns(self, env: ToolEnv, seed: int, count: int = 4) -> list[Action]:
        """Gold turns if there are any, else `count` sampled calls."""
        try:
            return list(env.gold_turns(env.task))
        except NotImplementedError:
            env.action_space.seed(seed)
            return [env.action_space.sample() for _ in range(count)]

    def scored(self, env: ToolEnv) -> ScoreLike:
        """Value and success of the environment's finished episode. Raises Skipped without a scorer."""
        if self.scorer is None:
            raise Skipped("the environment names no reward spec")
        return run_sync(self.scorer.ascore(env.trajectory))

    def score(self, env: ToolEnv) -> float | None:
        """The value alone."""
        return self.scored(env).value

    def won(self, env: ToolEnv) -> bool:
        """Whether the episode is a success. Judges are not asked: it is one if they say the best of it, or the worst."""
        if not isinstance(self.scorer, Scorer) or not self.scorer.asks:
            return self.scored(env).success is True
        judged = (self.scorer.assuming(lambda _: True), self.scorer.assuming(lambda _: False))
        return any(one.score(env.trajectory).success is True for one in judged)

    def not_judged(self) -> str:
        """For evidence: the leaves of the spec that would call a model."""
        judged = self.scorer.judged if isinstance(self.scorer, Scorer) else []
        return f"; not judged: {', '.join(judged)}" if judged else ""

    def play(self, env: ToolEnv, turns: Sequence[Action], seed: int, split: str = "train") -> float | None:
        """Reset, play until the episode or the turns end, and score."""
        env.reset(seed=seed, options={"split": split})
        for turn in turns:
            if env.step(turn)[2]:
                break
        return self.score(env)

    def rng(self, seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)


def describe(task: Task) -> str:
    """A task's name for evidence."""
    return f"task {task.id!r} (seed {task.seed}, {task.split})"


def short_repr(value: Any, limit: int = 160) -> str:
    """A value's repr, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
