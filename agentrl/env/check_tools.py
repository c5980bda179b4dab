"""Findings of `agentrl env check`, scripted policies, and tool checks by random input and planted faults."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.data.trajectory import Json, Message, StopReason, Task, ToolCall
from agentrl.env.base import ScorerLike, ToolEnv
from agentrl.env.call_options import Options
from agentrl.env.spaces import Action, run_sync, sample_arguments
from agentrl.env.tools import Tool
from agentrl.reward import Score, Scorer
from agentrl.reward.lint import copied_question
from agentrl.utils.errors import EnvError
from agentrl.utils.event_loop import cancel_all

# Findings


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
    """The environment under check, and how much of it to check.

    `build` makes a new instance, `scorer` scores whole episodes (None: reward checks do not apply), `tasks` is the number of
    tasks per check, `fuzz` the number of inputs per tool. `portable` is a pickled object with `build()`, to build the
    environment in another process. `every`: try gold and idling on all tasks, which must be finitely many. `spec`: the reward
    spec's path, for evidence. `light`: episodes start programs, so faults are planted in one tool only.
    """

    build: Callable[[], ToolEnv]
    scorer: ScorerLike | None
    tasks: int = 12
    fuzz: int = 500
    portable: bytes | None = None
    every: bool = False
    spec: str = ""
    light: bool = False

    def probe_seeds(self, env: ToolEnv, split: str, count: int) -> range:
        """Return seeds of a split's tasks: `count` at most, or all with `every`. Raises CheckFailed if they are infinite."""
        known = env.task_count(split)
        if known is not None:
            return range(known if self.every else min(count, known))
        if self.every:
            raise CheckFailed(f"--all-tasks: split {split!r} has infinitely many tasks. Use --tasks N")
        return range(count)

    def few_seeds(self) -> range:
        """Return fewer seeds, for checks that play a task several times."""
        return range(min(self.tasks, max(2, self.tasks // 2)))

    def gold(self, env: ToolEnv) -> list[Message]:
        """Return the current task's gold turns. Raises CheckFailed if the environment has none."""
        try:
            return env.gold_turns(env.task)
        except NotImplementedError as problem:
            raise CheckFailed(f"no gold_turns: {problem}") from problem

    def turns(self, env: ToolEnv, seed: int, count: int = 4) -> list[Action]:
        """Return the gold turns if possible, else `count` sampled calls."""
        try:
            return list(env.gold_turns(env.task))
        except NotImplementedError:
            env.action_space.seed(seed)
            return [env.action_space.sample() for _ in range(count)]

    def score(self, env: ToolEnv) -> Score:
        """Score the environment's finished episode. Raises Skipped without a scorer."""
        if self.scorer is None:
            raise Skipped("the environment names no reward spec")
        return run_sync(self.scorer.ascore(env.trajectory))

    def is_success(self, env: ToolEnv) -> bool:
        """Return True for a success, by the best or the worst verdicts if there are judges."""
        if not isinstance(self.scorer, Scorer) or not self.scorer.asks:
            return self.score(env).success is True
        judged = (self.scorer.assuming(lambda _: True), self.scorer.assuming(lambda _: False))
        return any(one.score(env.trajectory).success is True for one in judged)


def play(env: ToolEnv, turns: Sequence[Action]) -> None:
    """Play turns until they are used up or the episode ends."""
    for turn in turns:
        if env.step(turn)[2]:
            break


def describe(task: Task) -> str:
    """Name a task for evidence."""
    return f"task {task.id!r} (seed {task.seed}, {task.split})"


def short_repr(value: Any) -> str:
    """Return the repr of a value, cut to 160 characters."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


# Scripted policies

REFUSAL = "I do not know."

Script = Callable[[ToolEnv, Any], list[Message]]
"""A script: from a running episode and a `numpy.random.Generator` to its turns. Raises NotImplementedError without any."""


def gold(env: ToolEnv, rng: Any) -> list[Message]:
    """Play the environment's gold solution."""
    return list(env.gold_turns(env.task))


def idle(env: ToolEnv, rng: Any) -> list[Message]:
    """Say nothing."""
    return [Message("assistant")]


def refuse(env: ToolEnv, rng: Any) -> list[Message]:
    """Say that the answer is not known."""
    return [Message("assistant", REFUSAL)]


def echo(env: ToolEnv, rng: Any) -> list[Message]:
    """Repeat the user's opening text, with its formula in a box."""
    return [Message("assistant", copied_question(env.trajectory.messages))]


def spam(env: ToolEnv, rng: Any) -> list[Message]:
    """Call every read-only tool twice with sampled arguments, then say nothing."""
    readers = [item for item in env.toolbox if item.options.read_only]
    calls = [(ToolCall(item.name, sample_arguments(item.signature.parameters, rng)),) for item in readers * 2]
    return [*(Message("assistant", tool_calls=one) for one in calls), Message("assistant")]


SCRIPTS: dict[str, Script] = {"gold": gold, "idle": idle, "refuse": refuse, "echo": echo, "spam": spam}


def endless_turns(name: str, env: ToolEnv, rng: Any) -> Iterator[Message]:
    """Yield a script's turns endlessly, since a user may keep asking: after gold silence, else the last turn again."""
    turns = SCRIPTS[name](env, rng)
    yield from turns
    last = Message("assistant") if SCRIPTS[name] is gold else turns[-1]
    while True:
        yield last


# Random input

RESET_EVERY = 50
ODD: tuple[Json, ...] = (
    None, True, 0, -1, 2**63, 10**30, -0.5, 1e308, "", " ", "a" * 5000, "\n\t\0", "é漢字🎈", "' OR 1=1 --",
    "../../etc/passwd", "<tool_call>", "{}", "NaN", [], {}, [[]], {"": None}, [1, "a", None],
)  # fmt: skip


def check_fuzz(subject: Subject) -> str:
    """Check that every input gets a result or a structured error, never a crash."""
    env = subject.build()
    env.reset(seed=0)
    names = env.toolbox.names
    if not names:
        raise Skipped("the environment has no tools")
    refused = 0
    gold: dict[str, list[dict[str, Json]]] = {}  # tool name -> arguments of its gold calls
    for place, name in enumerate(names):
        rng, before = np.random.default_rng(len(name)), place * subject.fuzz
        for number in range(subject.fuzz):
            if (before + number) % RESET_EVERY == 0:
                if before + number:
                    env.reset(seed=number // RESET_EVERY)
                gold = {}
                with suppress(NotImplementedError):
                    for call in (call for turn in env.gold_turns(env.task) for call in turn.tool_calls):
                        gold.setdefault(call.name, []).append(call.arguments or {})
            if name not in env.toolbox:
                continue
            tool = env.toolbox[name]
            base, words = sample_arguments(tool.signature.parameters, rng), _task_strings(env)
            for key, value in base.items():  # mostly strings of the task, so that calls get past "no such record" errors
                if isinstance(value, str) and words and rng.random() < 0.8:
                    base[key] = words[int(rng.integers(len(words)))]
            made = gold.get(name, [])
            # Half of the calls vary a gold call, since random arguments seldom reach a tool's deeper code.
            if made and rng.random() < 0.5:
                base = copy.deepcopy(made[int(rng.integers(len(made)))])
            refused += _try_call(env, tool, _vary_call(tool.signature.parameters, base, rng, number), number)
    env.close()
    total = subject.fuzz * len(names)
    return f"{total} calls of {len(names)} tools: {total - refused} answered, {refused} refused, no crash"


def _try_call(env: ToolEnv, tool: Tool, arguments: Any, number: int) -> int:
    """Make one call and check its result; returns 1 if it was refused, else 0."""
    where = f"{tool.name}({short_repr(arguments)})"
    try:
        result = run_sync(env.toolbox.call(ToolCall(tool.name, arguments, id=f"f{number}")))
    except EnvError as fault:
        raise CheckFailed(f"{where}: {fault}") from fault
    if tool.check(arguments) is not None and result.error is None:
        raise CheckFailed(f"{where}: arguments that its own check refuses were answered with {short_repr(result.content)}")
    core = env.unwrapped
    ours = tool.options.error is None and isinstance(core, ToolEnv) and type(core).error_text is ToolEnv.error_text
    if result.error is not None and ours and json.loads(result.content).get("error") != result.error:
        raise CheckFailed(f"{where}: its error is not structured: {short_repr(result.content)}")
    result.content.encode("utf-8")
    return int(result.error is not None)


def _task_strings(env: ToolEnv) -> list[str]:
    """Return short strings, keys included, of the task's data and gold."""
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


def _vary_call(parameters: Mapping[str, Json], arguments: dict[str, Json], rng: np.random.Generator, number: int) -> Json:
    """Vary a call by its number: one third unchanged, one with one change, one with an odd value."""
    kind = number % 3
    if kind == 0:
        return arguments
    names = list(parameters.get("properties", {})) or ["x"]
    name = names[int(rng.integers(len(names)))]
    if kind == 1:
        change = int(rng.integers(4))
        if change == 0:
            arguments.pop(name, None)
        elif change == 1:
            arguments["unknown"] = 1
        else:
            arguments[name] = ODD[int(rng.integers(len(ODD)))] if change == 2 else [arguments.get(name)]
        return arguments
    # Odd values are cycled through, not drawn, so that each occurs; the other arguments stay valid.
    return {**arguments, name: ODD[number // 3 % len(ODD)]}


# Tools that hang or crash


async def hang(**arguments: Any) -> None:
    await asyncio.sleep(3600)


async def crash(**arguments: Any) -> None:
    raise RuntimeError("planted by agentrl env check")


def check_fault(subject: Subject, fault: Callable[..., Any], expected: StopReason) -> str:
    """Replace each tool in turn by `fault`, and check the episode's stop reason."""
    env = subject.build()
    env.reset(seed=0)
    names = env.toolbox.names[:1] if subject.light else env.toolbox.names
    if not names:
        raise Skipped("the environment has no tools")
    for name in names:
        if not env.is_open:  # the last fault ended the episode
            env.reset(seed=0)
        _plant_faults(env, name, fault, expected)
    return f"{len(names)} tools: the episode ends with {expected.value}, unscored"


def _plant_faults(env: ToolEnv, name: str, function: Any, expected: StopReason) -> None:
    original = env.toolbox[name]
    schema = original.schema["function"]
    # Unchecked: the shown schema need not be valid JSON Schema, and the planted fault must fail, not the arguments.
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
    arguments = sample_arguments(tool.signature.parameters, np.random.default_rng(0))
    return Message("assistant", tool_calls=(ToolCall(tool.name, arguments),))


def check_teardown(subject: Subject) -> str:
    """Check that `teardown` runs once per `setup`: at the end, on a fault, on cancellation, on a new reset."""
    cases = ("the end", "a fault", "cancellation", "a new reset")
    for case in cases:
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
        env.reset(seed=0)
        if case == "the end" or (not len(env.toolbox) and case != "a new reset"):
            run_sync(env.aend(StopReason.DONE))
        elif case == "a new reset":
            env.reset(seed=1)
        elif case == "a fault":
            try:
                _plant_faults(env, env.toolbox.names[0], crash, StopReason.ENV_ERROR)
            except CheckFailed:
                env.close()
        else:
            run_sync(_cancel(env))
        if runs != 1:
            raise CheckFailed(f"after {case}, teardown had run {runs} times, not once")
    return f"once each after {', '.join(cases)}"


async def _cancel(env: ToolEnv) -> None:
    original = env.toolbox[env.toolbox.names[0]]
    parameters = original.schema["function"]["parameters"]
    env.toolbox.replace(Tool.from_schema(original.name, "", parameters, hang, Options(check="off")))
    turn = asyncio.ensure_future(env.astep(_call(original)))
    await asyncio.sleep(0.01)
    await cancel_all([turn])
