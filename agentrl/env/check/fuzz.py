"""Random inputs for every tool: valid ones, nearly valid ones and rubbish."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject, brief
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
    """Every input gets an answer: a result, or a structured error; never a crash, never silence."""
    env = subject.build()
    env.reset(seed=0)
    names = env.toolbox.names
    if not names:
        raise Skipped("the environment has no tools")
    refused = 0
    for name in names:
        rng = subject.rng(len(name))
        for number in range(subject.fuzz):
            if number % RESET_EVERY == 0:
                env.reset(seed=number // RESET_EVERY)
            if name not in env.toolbox:
                continue
            tool = env.toolbox[name]
            refused += _one(env, tool, _arguments(tool.signature.parameters, rng, number), number)
    env.close()
    total = subject.fuzz * len(names)
    return f"{total} calls of {len(names)} tools: {total - refused} answered, {refused} refused, no crash"


def _one(env: ToolEnv, tool: Tool, arguments: Any, number: int) -> int:
    """Make one call; 1 where it was refused."""
    try:
        result = run_sync(env.toolbox.call(ToolCall(tool.name, arguments, id=f"f{number}")))
    except EnvError as fault:
        raise CheckFailed(f"{tool.name}({brief(arguments)}): {fault}") from fault
    _check_answer(tool, arguments, result)
    return int(result.error is not None)


def _check_answer(tool: Tool, arguments: Json, result: ToolResult) -> None:
    where = f"{tool.name}({brief(arguments)})"
    if tool.check(arguments) is not None and result.error is None:
        raise CheckFailed(
            f"{where}: arguments against its own schema were answered with {brief(result.content)}"
        )
    if result.error is not None and json.loads(result.content).get("error") != result.error:
        raise CheckFailed(f"{where}: its error is not structured: {brief(result.content)}")
    result.content.encode("utf-8")


def _arguments(parameters: dict[str, Json], rng: np.random.Generator, number: int) -> Json:
    """A third valid, a third valid with one thing changed, a third odd."""
    arguments: dict[str, Json] = sample_arguments(parameters, rng)
    kind = number % 3
    if kind == 0:
        return arguments
    names = list(parameters.get("properties", {})) or ["x"]
    name = names[int(rng.integers(len(names)))]
    if kind == 1:
        return _changed(arguments, name, rng)
    # Every odd value comes up in turn, whatever the dice say, with valid values beside it.
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
