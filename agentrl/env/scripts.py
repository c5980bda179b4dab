"""Scripted policies for any environment: gold, and four that solve nothing. Their episodes need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.env.sample import sample_arguments
from agentrl.reward.probes import copied_question
from agentrl.trajectory import Message, ToolCall

REFUSAL = "I do not know."

Script = Callable[[ToolEnv, Any], list[Message]]
"""The turns of a running episode; from a `numpy.random.Generator`, if it draws. Raises NotImplementedError if there are none."""


def gold(env: ToolEnv, rng: Any) -> list[Message]:
    """The environment's own solution."""
    return list(env.gold_turns(env.task))


def idle(env: ToolEnv, rng: Any) -> list[Message]:
    """Says nothing."""
    return [Message("assistant")]


def refuse(env: ToolEnv, rng: Any) -> list[Message]:
    """Says that it does not know."""
    return [Message("assistant", REFUSAL)]


def echo(env: ToolEnv, rng: Any) -> list[Message]:
    """Repeats what the user said in the opening, and puts its formula into a box."""
    return [Message("assistant", copied_question(env.trajectory.messages))]


def spam(env: ToolEnv, rng: Any) -> list[Message]:
    """Calls every read-only tool twice, with sampled arguments, and then says nothing."""
    readers = [item for item in env.toolbox if item.options.read_only]
    calls = [(ToolCall(item.name, sample_arguments(item.signature.parameters, rng)),) for item in readers * 2]
    return [*(Message("assistant", tool_calls=one) for one in calls), Message("assistant")]


SCRIPTS: dict[str, Script] = {"gold": gold, "idle": idle, "refuse": refuse, "echo": echo, "spam": spam}


def lines_of(name: str, env: ToolEnv, rng: Any) -> Iterator[Message]:
    """The turns of a script, without an end: gold falls silent, the others repeat their last one, since a user may ask back."""
    turns = SCRIPTS[name](env, rng)
    yield from turns
    last = Message("assistant") if SCRIPTS[name] is gold else turns[-1]
    while True:
        yield last
