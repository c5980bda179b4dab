"""Random inputs for every tool: valid, nearly valid and invalid ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject, short_repr
from agentrl.env.sample import sample_arguments
from agentrl.env.sync import run_sync
from agentrl.errors import EnvError
from agentrl.tool import Tool
from agentrl.trajectory import Json, ToolCall, ToolResult

RESET_EVERY = 50
ODD: tuple[Json, ...] = (
    None, True, 0, -1, 2**63, 10**30, -0.5, 1e308, "", " ", "a" * 5000, "\n\t\0", "é漢字🎈", "' OR 1=1 --",
    "../../etc/passwd", "<tool_call>", "{}", "NaN", [], {}, [[]], {"": None}, [1, "a", None],
)  # fmt: skip


def check_fuzz(subject: Subject) -> str:
    """Every input gets a result or a structured error, never a crash."""
    env = subject.build()
    env.reset(seed=0)
    names = env.toolbox.names
    if not names:
        raise Skipped("the environment has no tools")
    refused = 0
    gold = _gold_calls(env)
    for place, name in enumerate(names):
        rng, before = subject.rng(len(name)), place * subject.fuzz
        for number in range(subject.fuzz):
            if before + number and (before + number) % RESET_EVERY == 0:
                env.reset(seed=number // RESET_EVERY)
                gold = _gold_calls(env)
            if name not in env.toolbox:
                continue
            tool = env.toolbox[name]
            base = sample_arguments(tool.signature.parameters, rng)
            _make_fit(base, _words(env), rng)
            made = gold.get(name, [])
            # Half of the calls start from a gold call, since random arguments seldom reach a tool's deeper code.
            if made and rng.random() < 0.5:
                base = copy.deepcopy(made[int(rng.integers(len(made)))])
            refused += _one(env, tool, _varied(tool.signature.parameters, base, rng, number), number)
    env.close()
    total = subject.fuzz * len(names)
    return f"{total} calls of {len(names)} tools: {total - refused} answered, {refused} refused, no crash"


def _one(env: ToolEnv, tool: Tool, arguments: Any, number: int) -> int:
    """Make one call; 1 if it was refused."""
    try:
        result = run_sync(env.toolbox.call(ToolCall(tool.name, arguments, id=f"f{number}")))
    except EnvError as fault:
        raise CheckFailed(f"{tool.name}({short_repr(arguments)}): {fault}") from fault
    _check_answer(env, tool, arguments, result)
    return int(result.error is not None)


def _check_answer(env: ToolEnv, tool: Tool, arguments: Json, result: ToolResult) -> None:
    where = f"{tool.name}({short_repr(arguments)})"
    if tool.check(arguments) is not None and result.error is None:
        raise CheckFailed(f"{where}: arguments that its own check refuses were answered with {short_repr(result.content)}")
    core = env.unwrapped
    ours = tool.options.error is None and isinstance(core, ToolEnv) and type(core).error_text is ToolEnv.error_text
    if result.error is not None and ours and json.loads(result.content).get("error") != result.error:
        raise CheckFailed(f"{where}: its error is not structured: {short_repr(result.content)}")
    result.content.encode("utf-8")


def _make_fit(arguments: dict[str, Json], words: list[str], rng: np.random.Generator) -> None:
    """Replace most random strings by strings of the task, so that calls get past "no such record" errors."""
    for name, value in arguments.items():
        if isinstance(value, str) and words and rng.random() < 0.8:
            arguments[name] = words[int(rng.integers(len(words)))]


def _words(env: ToolEnv) -> list[str]:
    """Short strings (keys included) of the task's data and gold."""
    task = env.task
    found: dict[str, None] = {}
    level: list[Any] = [dict(task.data), dict(task.gold)]
    while level and len(found) < 500:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                inner += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                inner += item
            elif isinstance(item, str) and 0 < len(item) <= 80:
                found[item] = None
        level = inner
    return list(found)


def _gold_calls(env: ToolEnv) -> dict[str, list[dict[str, Json]]]:
    """Tool -> arguments of its calls in the gold solution."""
    try:
        turns = env.gold_turns(env.task)
    except NotImplementedError:
        return {}
    made: dict[str, list[dict[str, Json]]] = {}
    for call in (call for turn in turns for call in turn.tool_calls):
        made.setdefault(call.name, []).append(call.arguments or {})
    return made


def _varied(parameters: Mapping[str, Json], arguments: dict[str, Json], rng: np.random.Generator, number: int) -> Json:
    """A third of the calls unchanged, a third with one change, a third with an odd value."""
    kind = number % 3
    if kind == 0:
        return arguments
    names = list(parameters.get("properties", {})) or ["x"]
    name = names[int(rng.integers(len(names)))]
    if kind == 1:
        return _changed(arguments, name, rng)
    # Odd values are used in turn, not drawn, so that each one occurs; the other arguments stay valid.
    return {**arguments, name: ODD[number // 3 % len(ODD)]}


def _changed(arguments: dict[str, Json], name: str, rng: np.random.Generator) -> Json:
    change = int(rng.integers(4))
    if change == 0:
        arguments.pop(name, None)
    elif change == 1:
        arguments["unknown"] = 1
    elif change == 2:
        arguments[name] = ODD[int(rng.integers(len(ODD)))]
    else:
        arguments[name] = [arguments.get(name)]
    return arguments
