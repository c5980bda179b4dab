"""A tool that hangs or crashes ends the episode with a typed stop reason, and everything is torn down."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.env.check.report import CheckFailed, Skipped, Subject
from agentrl.env.sample import sample_arguments
from agentrl.env.sync import run_sync
from agentrl.errors import EnvError
from agentrl.tool import Options, Tool
from agentrl.trajectory import Message, StopReason, ToolCall


async def _hang(**arguments: Any) -> None:
    await asyncio.sleep(3600)


async def _crash(**arguments: Any) -> None:
    raise RuntimeError("planted by agentrl env check")


def check_hang(subject: Subject) -> str:
    """Replace each tool in turn by one that never answers."""
    return _each(subject, _hang, StopReason.TOOL_TIMEOUT)


def check_crash(subject: Subject) -> str:
    """Replace each tool in turn by one that raises."""
    return _each(subject, _crash, StopReason.ENV_ERROR)


def _each(subject: Subject, function: Any, expected: StopReason) -> str:
    env = subject.build()
    env.reset(seed=0)
    names = env.toolbox.names[:1] if subject.light else env.toolbox.names
    if not names:
        raise Skipped("the environment has no tools")
    for name in names:
        if not env.is_open:  # a fault has ended the episode
            env.reset(seed=0)
        _planted(env, name, function, expected)
    return f"{len(names)} tools: the episode ends with {expected.value}, unscored"


def _planted(env: ToolEnv, name: str, function: Any, expected: StopReason) -> None:
    original = env.toolbox[name]
    schema = original.schema["function"]
    # Unchecked: what a policy is shown need not be JSON Schema, and it is not the arguments that fail here.
    options = Options(timeout=0.01, check="off", on_error="stop")
    env.toolbox.replace(Tool.from_schema(name, "", schema["parameters"], function, options))
    try:
        env.step(_call(original))
    except EnvError:
        record = env.trajectory
    else:
        raise CheckFailed(f"{name}: the fault was swallowed; step went on as if the tool had answered")
    if record.stop is not expected:
        raise CheckFailed(f"{name}: the episode stopped with {record.stop.value!r}, not {expected.value!r}")
    if record.reward is not None:
        raise CheckFailed(f"{name}: a fault of the environment was rewarded with {record.reward}")


def _call(tool: Tool) -> Message:
    import numpy as np

    arguments = sample_arguments(tool.signature.parameters, np.random.default_rng(0))
    return Message("assistant", tool_calls=(ToolCall(tool.name, arguments),))


def check_teardown(subject: Subject) -> str:
    """`teardown` runs once for every `setup`: at the end, on a fault, on cancellation and on a new reset."""
    counts: dict[str, int] = {}
    for case in ("the end", "a fault", "cancellation", "a new reset"):
        env = subject.build()
        runs = 0
        core = env.unwrapped
        assert isinstance(core, ToolEnv)
        original = core.teardown

        async def counted(original: Any = original) -> None:
            nonlocal runs
            runs += 1
            await original()

        core.teardown = counted  # type: ignore[method-assign]
        _end(env, case)
        counts[case] = runs
        if runs != 1:
            raise CheckFailed(f"after {case}, teardown had run {runs} times, not once")
    return f"once each after {', '.join(counts)}"


def _end(env: ToolEnv, case: str) -> None:
    env.reset(seed=0)
    if case == "the end" or (not len(env.toolbox) and case != "a new reset"):
        run_sync(env.aend(StopReason.DONE))
    elif case == "a new reset":
        env.reset(seed=1)
    elif case == "a fault":
        try:
            _planted(env, env.toolbox.names[0], _crash, StopReason.ENV_ERROR)
        except CheckFailed:
            env.close()
    else:
        run_sync(_cancel(env))


async def _cancel(env: ToolEnv) -> None:
    original = env.toolbox[env.toolbox.names[0]]
    parameters = original.schema["function"]["parameters"]
    env.toolbox.replace(Tool.from_schema(original.name, "", parameters, _hang, Options(check="off")))
    turn = asyncio.ensure_future(env.astep(_call(original)))
    await asyncio.sleep(0.01)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
