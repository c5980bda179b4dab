"""The reward spec against scripted policies: gold succeeds, idling does not, a free order is really free."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject, describe
from agentrl.env.sample import sample_arguments
from agentrl.trajectory import Message, ToolCall

LUCK = 0.1


def check_gold(subject: Subject) -> str:
    """Gold turns end the episode and are a success, on every split."""
    env = subject.build()
    played = 0
    for split in env.splits:
        for seed in subject.seeds():
            env.reset(seed=seed, options={"split": split})
            turns = subject.gold(env)
            for number, turn in enumerate(turns):
                ended = env.step(turn)[2]
                if ended != (number == len(turns) - 1):
                    what = "ended early" if ended else "did not end"
                    raise CheckFailed(f"{describe(env.task)}: gold {what} at turn {number + 1} of {len(turns)}")
            if not subject.won(env):
                raise CheckFailed(f"{describe(env.task)}: gold scored {subject.score(env)} and is not a success")
            played += 1
    return f"gold succeeded on {played} tasks"


Idler = Callable[[Subject, ToolEnv, int], list[Message | str]]


def _nothing(subject: Subject, env: ToolEnv, seed: int) -> list[Message | str]:
    return [""]


def _empty(subject: Subject, env: ToolEnv, seed: int) -> list[Message | str]:
    return ["I do not know."]


def _echo(subject: Subject, env: ToolEnv, seed: int) -> list[Message | str]:
    return ["\n".join(m.content for m in env.prompt(env.task) if m.role == "user")]


def _spam(subject: Subject, env: ToolEnv, seed: int) -> list[Message | str]:
    """Every read-only tool twice, with sampled arguments, and then no answer."""
    rng = subject.rng(seed)
    readers = [item for item in env.toolbox if item.options.read_only]
    calls = [
        Message("assistant", tool_calls=(ToolCall(item.name, sample_arguments(item.signature.parameters, rng)),))
        for item in readers * 2
    ]
    return [*calls, ""]


IDLERS: dict[str, Idler] = {
    "do nothing": _nothing, "answer empty": _empty, "echo the prompt": _echo, "read-only spam": _spam,
}  # fmt: skip


def check_exploits(subject: Subject) -> str:
    """Scripts that solve nothing must not score well on average, except if idling is correct by design."""
    env = subject.build()
    limit = env.idle_share + LUCK
    means: dict[str, float] = {}
    for name, script in IDLERS.items():
        values: list[float] = []
        for seed in subject.seeds(subject.tasks * 2):
            env.reset(seed=seed)
            for turn in _until_silence(script(subject, env, seed), env):
                if env.step(turn)[2]:
                    break
            values.append(subject.score(env) or 0.0)
        means[name] = sum(values) / len(values)
        if means[name] > limit:
            worst = values.index(max(values))
            raise CheckFailed(
                f"{name!r} scores {means[name]:.2f} on average (allowed: {limit:.2f}), {values[worst]:.2f} at seed {worst}"
            )
    shown = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    return f"{subject.tasks * 2} tasks each: {shown}"


def _until_silence(turns: list[Message | str], env: ToolEnv) -> list[Message | str]:
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
                raise CheckFailed(f"{describe(env.task)}: the order {names} scored {value} and is not a success")
            tried += 1
    if not tried:
        raise Skipped(f"none of {subject.tasks} gold solutions has two calls")
    return f"{tried} orders of gold calls succeeded"


def _reordered(gold: list[Message], rng: random.Random) -> list[Message]:
    """The gold turns with all their calls shuffled; every turn keeps its number of calls."""
    calls = [call for turn in gold for call in turn.tool_calls]
    shuffled = iter(rng.sample(calls, len(calls)))
    return [replace(turn, tool_calls=tuple(next(shuffled) for _ in turn.tool_calls)) for turn in gold]
