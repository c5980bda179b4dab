"""The reward spec against scripted policies: gold succeeds, idling does not, a free order is really free."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject, describe, short_repr
from agentrl.env.official import played_of
from agentrl.env.scripts import Script, echo, idle, refuse, spam
from agentrl.env.suite import Played, SuiteEnv
from agentrl.trajectory import Message, Task

LUCK = 0.1
"""What idling may earn on average beyond what is by design, where rewards are partial."""
NAMED = 10
"""Tasks that evidence names."""


def check_gold(subject: Subject) -> str:
    """Gold turns end the episode and are a success, on every split."""
    env = subject.build()
    played = 0
    for split in env.splits:
        for seed in subject.probed(env, split, subject.tasks):
            env.reset(seed=seed, options={"split": split})
            turns = subject.gold(env)
            for number, turn in enumerate(turns):
                ended = env.step(turn)[2]
                if ended != (number == len(turns) - 1):
                    what = "ended early" if ended else "did not end"
                    raise CheckFailed(f"{describe(env.task)}: gold {what} at turn {number + 1} of {len(turns)}{_refused(env)}")
            if not subject.won(env):
                raise CheckFailed(f"{describe(env.task)}: gold scored {subject.score(env)} and is not a success{_refused(env)}")
            played += 1
    return f"gold succeeded on {played} tasks{subject.not_judged()}"


def _refused(env: ToolEnv) -> str:
    """For evidence: the running episode's tool calls that ended in errors, by tool, and the first error; nothing without any."""
    answers = [(turn.index + 1, result) for turn in env.trajectory.turns for result in turn.results]
    wrong = [(turn, result) for turn, result in answers if result.error is not None]
    if not wrong:
        return ""
    tools = ", ".join(f"{name} {count}" for name, count in Counter(result.name for _, result in wrong).most_common())
    turn, first = wrong[0]
    return (
        f"; {len(wrong)} of its {len(answers)} tool calls ended in errors ({tools}), the first at turn {turn} of {first.name}: "
        f"{short_repr(first.content)}"
    )


IDLERS: dict[str, Script] = {
    "do nothing": idle, "answer empty": refuse, "echo the prompt": echo, "read-only spam": spam,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Floor:
    """What one of `IDLERS` earned: a value for each task (None: unscored), the tasks on which it was paid in full, and of a suite
    the episodes, for its own metrics."""

    agent: str
    values: list[float | None] = field(default_factory=list)
    paid: list[Task] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)


def floors(subject: Subject, env: ToolEnv, split: str, seeds: Iterable[int]) -> Iterator[Floor]:
    """What scripts that solve nothing earn on tasks of a split, one script after the other. Raises Skipped without a scorer."""
    tasks, inner = list(seeds), env.unwrapped
    for name, script in IDLERS.items():
        found = Floor(name)
        for seed in tasks:
            env.reset(seed=seed, options={"split": split})
            for turn in _until_silence(script(env, subject.rng(seed))):
                if any(env.step(turn)[2:4]):
                    break
            score = subject.scored(env)
            found.values.append(score.value)
            if score.success is True:
                found.paid.append(env.task)
            if isinstance(inner, SuiteEnv):
                found.played.append(played_of(inner, replace(env.trajectory, reward=score.value, success=score.success)))
        yield found


def check_exploits(subject: Subject) -> str:
    """Scripts that solve nothing must not be paid in full on any task, nor well on average, except as often as idling is correct
    by design (`idle_share`)."""
    env = subject.build()
    shown: list[str] = []
    count = subject.tasks if subject.light else subject.tasks * 2
    for floor in floors(subject, env, "train", subject.probed(env, "train", count)):
        values = [value or 0.0 for value in floor.values]
        if not values:
            raise Skipped("the split 'train' has no tasks")
        _judge(floor.agent, subject, env.idle_share, [describe(task) for task in floor.paid], values)
        shown.append(f"{floor.agent} {sum(values) / len(values):.2f}, {len(floor.paid)} in full")
    most = 100 * share_interval(0, len(values))[1]
    return f"{len(values)} tasks each: {'; '.join(shown)} (0 of {len(values)}: at most {most:.1f} % of all, 95 %)"


def _judge(name: str, subject: Subject, allowed: float, paid: list[str], values: list[float]) -> None:
    """Raise CheckFailed if a script is paid in full on more tasks than is by design, or well on average."""
    low, high = share_interval(len(paid), len(values))
    if paid and low > allowed:
        more = f" and {len(paid) - NAMED} more" if len(paid) > NAMED else ""
        by = f" by {subject.spec}" if subject.spec else ""
        raise CheckFailed(
            f"{name!r} is paid in full{by} on {len(paid)} of {len(values)} tasks ({100 * low:.1f} to {100 * high:.1f} % of all, "
            f"95 %; idle_share allows {100 * allowed:g} %): {', '.join(paid[:NAMED])}{more}"
        )
    mean = sum(values) / len(values)
    if mean > allowed + LUCK:
        worst = values.index(max(values))
        raise CheckFailed(
            f"{name!r} scores {mean:.2f} on average (allowed: {allowed + LUCK:.2f}), {values[worst]:.2f} at seed {worst}"
        )


def share_interval(count: int, of: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share of which `count` of `of` are seen (Wilson, 1927, equation 8); above 0 if one is
    seen, since that one is there."""
    z = 1.959964
    middle = (count + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(count * (of - count) / of + z * z / 4)
    return (max(0.0, middle - half) if count else 0.0), min(1.0, middle + half)


def _until_silence(turns: list[Message]) -> list[Message]:
    """A simulated user may ask back, so the script repeats its last line a few times."""
    return [*turns, *turns[-1:] * 20]


def check_order(subject: Subject) -> str:
    """If the class declares `order_free`, gold calls in any order succeed as well."""
    env = subject.build()
    if not env.order_free:
        raise Skipped("the class does not declare order_free")
    tried = 0
    for seed in subject.seeds():
        env.reset(seed=seed)
        gold = subject.gold(env)
        if sum(len(turn.tool_calls) for turn in gold) < 2:
            continue
        rng = random.Random(seed)
        for _ in range(4):
            turns = _reordered(gold, rng)
            value = subject.play(env, turns, seed)
            if not subject.won(env):
                names = json.dumps([call.name for turn in turns for call in turn.tool_calls])
                raise CheckFailed(f"{describe(env.task)}: the order {names} scored {value} and is not a success{_refused(env)}")
            tried += 1
    if not tried:
        raise Skipped(f"none of {subject.tasks} gold solutions has two calls")
    return f"{tried} orders of gold calls succeeded"


def _reordered(gold: list[Message], rng: random.Random) -> list[Message]:
    """The gold turns with all their calls shuffled; every turn keeps its number of calls."""
    calls = [call for turn in gold for call in turn.tool_calls]
    shuffled = iter(rng.sample(calls, len(calls)))
    return [replace(turn, tool_calls=tuple(next(shuffled) for _ in turn.tool_calls)) for turn in gold]
