"""Probe episodes for lint: the gold solution of a task, and episodes that should not score like it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agentrl.reward.leaf import ReplayEnv
from agentrl.trajectory import Message, StopReason, Task, ToolCall, Trajectory

_COPIES = 3
_SPAM_TURNS = 12
_EVERY_NUMBER = ", ".join(str(number) for number in range(200))
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$([^$\n]+)\$|\\\((.+?)\\\)"
    r"|((?:\\[a-z]+(?:\{[^{}]*\})*|[0-9(√∫∑]|\b[a-z](?=\s?[-+*/^=]))"
    r"(?:\\[a-z]+|[-0-9a-z.,+*/^_=(){}×·÷√!% ](?![a-z]{3}| ?(?:is|to|of|in|at|or|by)\b))*)",
    re.DOTALL,
)


class ProbeEnv(ReplayEnv, Protocol):
    """What probing needs from an environment; `agentrl.env.ToolEnv` has it."""

    @property
    def trajectory(self) -> Trajectory: ...

    @property
    def action_space(self) -> Any: ...

    def make_task(self, rng_seed: int, split: str) -> Task: ...

    def gold_turns(self, task: Task) -> list[Message]: ...


def probe_episodes(
    build: Callable[[], ProbeEnv],
    tasks: int,
    seed: int = 0,
    *,
    enough: Callable[[], bool] = lambda: False,
    gold_needed: bool = True,
) -> dict[str, list[Trajectory]]:
    """Episodes by kind, one per task: gold, empty, silent, question, spam, padded and shuffled (see lint_probes). None is begun
    once `enough`.

    Raises NotImplementedError if the environment has no scripted gold policy; unless `gold_needed`, what gold is made of is then
    left out.
    """
    episodes: dict[str, list[Trajectory]] = {}
    for number in range(tasks):
        env = build()
        task = env.make_task(seed + number, "train")
        try:
            gold = env.gold_turns(task)
        except NotImplementedError:
            if gold_needed:
                raise
            gold = None
        env.close()
        for kind, turns in _turns(build, task, gold, seed, number):
            if enough():
                return episodes
            episodes.setdefault(kind, []).append(play_turns(build(), task, turns()))
    return episodes


Turns = Sequence[Message | str]


def _turns(
    build: Callable[[], ProbeEnv], task: Task, gold: list[Message] | None, seed: int, number: int
) -> list[tuple[str, Callable[[], Turns]]]:
    """The kinds of episodes of a task, each with what makes its turns."""
    idle: list[tuple[str, Callable[[], Turns]]] = [
        ("empty", lambda: [Message("assistant", "")]),
        ("silent", lambda: []),
        ("question", lambda: _question(build(), task)),
        ("spam", lambda: _spam(build(), task, seed + number)),
    ]
    if gold is None:
        return idle
    rng = random.Random(f"{seed}/{number}")
    return [
        ("gold", lambda: gold),
        *idle,
        ("padded", lambda: _padded(gold)),
        ("shuffled", lambda: _shuffled(gold, rng)),
    ]


def gold_episode(build: Callable[[], ProbeEnv], seed: int, split: str = "train") -> Trajectory:
    """The gold solution of one task. Raises NotImplementedError if the environment has none."""
    env = build()
    task = env.make_task(seed, split)
    return play_turns(env, task, env.gold_turns(task))


def play_turns(env: ProbeEnv, task: Task, turns: Turns) -> Trajectory:
    """The episode of fixed assistant turns. If it does not end by itself, it counts as cut by max_turns."""
    env.reset(seed=task.seed, options={"task": task})
    over = False
    for message in turns:
        if over:
            break
        outcome = env.step(message)  # type: ignore[arg-type]  # an action is a string or a message
        over = bool(outcome[2] or outcome[3])
    trajectory = env.trajectory
    env.close()
    if not over:
        trajectory.stop, trajectory.truncated = StopReason.MAX_TURNS, True
    return trajectory


def copied_question(messages: Iterable[Message]) -> str:
    """The question of an opening as an answer: what its user says, and in a box the formula of it."""
    question = "\n".join(message.content for message in messages if message.role == "user")
    formulas = [next(filter(None, found.groups()), "").strip(" .,?") for found in _FORMULA.finditer(question)]
    worth = max(formulas, key=len, default="")
    # A number that stands by itself is no formula, and would be the last number of the text.
    return f"{question}\n\\boxed{{{worth}}}" if re.search(r"[0-9a-z)}]\s?[-+*/^=!×÷·]|[√\\]", worth) else question


def _question(env: ProbeEnv, task: Task) -> list[Message]:
    env.reset(seed=task.seed, options={"task": task})
    opening = list(env.trajectory.messages)
    env.close()
    return [Message("assistant", copied_question(opening))]


def _spam(env: ProbeEnv, task: Task, seed: int) -> list[Message | str]:
    """Random schema-valid calls, then an answer with every number."""
    env.reset(seed=task.seed, options={"task": task})
    space = env.action_space
    space.seed(seed)
    calls = [space.sample() for _ in range(_SPAM_TURNS)]
    env.close()
    return [*calls, Message("assistant", _EVERY_NUMBER)]


def _padded(gold: Sequence[Message]) -> list[Message]:
    """The gold turns with every turn that makes calls repeated three times."""
    return [message for message in gold for _ in range(_COPIES if message.tool_calls else 1)]


def _shuffled(gold: Sequence[Message], rng: random.Random) -> list[Message]:
    """The gold turns with their calls in another order; the number of calls per turn stays."""
    calls: list[ToolCall] = [call for message in gold for call in message.tool_calls]
    order = list(range(len(calls)))
    if len(order) > 1:
        while order == sorted(order):
            rng.shuffle(order)
    moved = iter([calls[i] for i in order])
    return [
        replace(message, tool_calls=tuple(next(moved) for _ in message.tool_calls)) if message.tool_calls else message
        for message in gold
    ]
