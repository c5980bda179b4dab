"""`agentrl env check`: check that an environment fulfills its contract."""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env

from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory
from agentrl.env.base import ToolEnv
from agentrl.env.check_tools import (
    CheckFailed,
    CheckFinding,
    Script,
    Skipped,
    Subject,
    check_fault,
    check_fuzz,
    check_teardown,
    crash,
    describe,
    echo,
    hang,
    idle,
    play,
    refuse,
    short_repr,
    spam,
)
from agentrl.env.official import Benchmark, Played, played_of
from agentrl.env.spaces import Action, sample_arguments
from agentrl.reward import Scorer
from agentrl.reward.values import leaves_of
from agentrl.utils.errors import AgentrlError, fault_text
from agentrl.utils.redaction import map_texts

# Reset and step


def check_contract(subject: Subject) -> str:
    """Run Gymnasium's checker, and check the further guarantees of a ToolEnv."""
    env = subject.build()
    if "/" not in env.id or not env.id.rpartition("-v")[2].isdigit():
        raise CheckFailed(f"id {env.id!r} is not of the form Namespace/Name-v0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env, skip_render_check=True)
    ours = [str(item.message) for item in caught if "agentrl" in str(item.message)]
    if ours:
        raise CheckFailed(f"Gymnasium warns: {short_repr(ours[0])}")
    tools = 0
    for seed in range(subject.tasks):
        observation, info = env.reset(seed=seed)
        tools, where = max(tools, len(env.toolbox)), describe(env.task)
        if not isinstance(observation, list) or not all(isinstance(item, Message) for item in observation):
            raise CheckFailed(f"{where}: reset gave {short_repr(observation)}, not a list of messages")
        if not observation or observation[-1].role not in ("user", "tool"):
            raise CheckFailed(f"{where}: the opening messages do not end with the user's turn")
        if not isinstance(info, dict):
            raise CheckFailed(f"{where}: info is {short_repr(info)}, not a dict")
        env.step("")
        record = env.trajectory
        if Trajectory.from_json(json.loads(json.dumps(record.to_json()))) != record:
            raise CheckFailed(f"{where}: the record is not the same after a round trip through JSON")
    env.close()
    return f"gymnasium's check_env and {subject.tasks} resets; {tools} tools"


def check_seeds(subject: Subject) -> str:
    """Check that equal seeds and turns give equal messages and final states in two instances."""
    digests = set()
    for seed in range(subject.tasks):
        texts: list[str] = []
        for _ in range(2):
            env = subject.build()
            env.reset(seed=seed)
            play(env, subject.turns(env, seed))
            record = env.trajectory
            env.close()
            # Results are compared without value, duration and images: durations differ between runs.
            for turn in record.turns:
                turn.results = [replace(result, value=None, seconds=0.0, images=()) for result in turn.results]
            row = record.to_json()
            texts.append(json.dumps({key: row[key] for key in ("task", "messages", "turns", "tools", "state")}, sort_keys=True))
        one, two = texts
        if one != two:
            at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
            near = slice(max(0, at - 40), at + 40)
            raise CheckFailed(f"seed {seed} gave two different episodes: ...{one[near]}... against ...{two[near]}...")
        digests.add(one)
    if len(digests) == 1 and subject.tasks > 1:
        raise CheckFailed(f"all {subject.tasks} seeds gave the same episode")
    return f"{subject.tasks} seeds twice each, {len(digests)} different episodes"


_PROBE = """
import pickle, sys
from agentrl.env.check import tasks_digest
print(tasks_digest(pickle.loads(sys.stdin.buffer.read()).build(), int(sys.argv[1])))
"""


def tasks_digest(env: ToolEnv, count: int) -> str:
    """Digest the tasks and prompts of the first `count` seeds of each split."""
    rows = []
    for split in env.splits:
        for seed in range(count):
            observation, _ = env.reset(seed=seed, options={"split": split})
            rows.append([m.content for m in observation])
            rows.append([env.task.id, json.dumps([dict(env.task.data), dict(env.task.gold)], sort_keys=True)])
    env.close()
    return blake2b(json.dumps(rows).encode()).hexdigest()


def check_process(subject: Subject) -> str:
    """Check that a process with another hash seed makes the same tasks."""
    if subject.portable is None:
        raise Skipped("the environment cannot be built in another process (no reference to it)")
    here = tasks_digest(subject.build(), subject.tasks)
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, str(subject.tasks)],
        input=subject.portable,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    )
    if done.returncode:
        raise CheckFailed(f"it cannot be built in another process: {done.stderr.decode(errors='replace').strip()[-300:]}")
    if done.stdout.split()[-1:] != [here.encode()]:
        raise CheckFailed("another process makes other tasks from the same seeds (set order? hash()? the clock?)")
    return f"{subject.tasks} tasks per split agree with those of another process"


def check_splits(subject: Subject) -> str:
    """Check that no task's data and gold occur in two splits."""
    env = subject.build()
    seen: dict[str, str] = {}
    for split in env.splits:
        for seed in range(subject.tasks * 8):
            task = env.make_task(seed, split)
            content = json.dumps([dict(task.data), dict(task.gold)], sort_keys=True, default=str)
            other = seen.setdefault(content, split)
            if other != split:
                raise CheckFailed(f"{describe(task)} has the content of a task of {other}")
    return f"{len(seen)} different tasks in {', '.join(env.splits)}, none in two"


# Isolation of instances


def shown_by(env: ToolEnv) -> str:
    """Return all that an episode shows, messages and state, as JSON text."""
    row = env.trajectory.to_json()
    return json.dumps([row["messages"], row["state"]], sort_keys=True)


def check_instances(subject: Subject) -> str:
    """Check that two instances played alternately give the same episodes as each alone."""
    for seed in subject.few_seeds():
        seeds = (seed, seed + 1000)
        scripts: list[list[Action]] = []
        alone: list[str] = []
        for item in seeds:
            env = subject.build()
            env.reset(seed=item)
            scripts.append(subject.turns(env, item))
            play(env, scripts[-1])
            alone.append(shown_by(env))
            env.close()
        envs = [subject.build() for _ in seeds]
        for env, item in zip(envs, seeds, strict=True):
            env.reset(seed=item)
        over = [False, False]
        for turns in zip_longest(*scripts):
            for index, env in enumerate(envs):
                if not over[index] and turns[index] is not None:
                    over[index] = env.step(turns[index])[2]
        for index, env in enumerate(envs):
            if shown_by(env) != alone[index]:
                raise CheckFailed(
                    f"seed {seeds[index]} gives a different episode while seed {seeds[1 - index]} runs at the same time: "
                    f"{short_repr(env.trajectory.messages[-1].content)}"
                )
            env.close()
    return f"{len(subject.few_seeds())} pairs of episodes, played alternately"


def check_fork(subject: Subject) -> str:
    """Check that forks equal their parent and leave it unchanged, and that restore works."""
    count = 0
    for seed in subject.few_seeds():
        env = subject.build()
        env.reset(seed=seed)
        turns = subject.turns(env, seed)
        half = len(turns) // 2
        if any(env.step(turn)[2] for turn in turns[:half]):
            continue  # sampled turns may end an episode early, which leaves nothing to compare
        before, snapshot, forked = shown_by(env), env.snapshot(), env.fork()
        if shown_by(forked) != before:
            raise CheckFailed(f"seed {seed}: a fork after {half} turns is not equal to its parent")
        play(forked, turns[half:])
        if shown_by(env) != before:
            raise CheckFailed(f"seed {seed}: playing the fork changed its parent")
        play(env, turns[half:])
        if shown_by(env) != shown_by(forked):
            raise CheckFailed(f"seed {seed}: parent and fork end differently after the same turns")
        env.restore(snapshot)
        if shown_by(env) != before:
            raise CheckFailed(f"seed {seed}: restore did not return to the snapshot")
        env.close()
        forked.close()
        count += 1
    if not count:
        raise Skipped("every episode ended before its middle")
    return f"{count} episodes forked halfway and restored"


# Gold answers that leak

MARK = "CANARY"
LONG_TEXT = 24
"""Characters from which on a gold text is searched for in the shown text."""
MAX_SHOWN = 0.5
"""Largest share of prompts that may contain the gold answer."""


def check_leaks(subject: Subject) -> str:
    """Check that gold is not shown: by canaries in it, by its long texts, and by answers in prompts."""
    env = subject.build()
    marked = 0
    prompts: list[tuple[str, str]] = []
    for seed in range(subject.tasks):
        opened, _ = env.reset(seed=seed)
        task = env.task
        shown = _shown_text(env, task, seed)
        # Text of the task's data and the tools' schemas (a tool's name in gold calls) is no secret. The schemas are the
        # record's, since a toolbox loses the tools that `setup` added when the episode ends.
        known = json.dumps([dict(task.data), env.trajectory.tools], ensure_ascii=False, default=str)
        for (place, _), text in leaves_of(task.gold):
            if isinstance(text, str) and len(text) >= LONG_TEXT and text in shown and text not in known:
                raise CheckFailed(f"{describe(task)}: gold{place} {short_repr(text)} is shown to the policy")
        # Again with a canary in place of each gold string. An environment may need meaningful gold (a simulated user's goal)
        # and refuse canaries; the other tests still apply.
        try:
            gold = map_texts(task.gold, lambda text: f"{MARK}{len(text)}", keys=False)
            shown = _shown_text(env, replace(task, gold=gold), seed)
        except (AgentrlError, ValueError, TypeError, KeyError, AttributeError):
            env.close()
        else:
            marked += 1
            if MARK in shown:
                seen = short_repr(shown[max(0, shown.index(MARK) - 60) : shown.index(MARK) + 40])
                raise CheckFailed(f"{describe(task)}: gold is shown to the policy: {seen}")
        if isinstance(task.gold.get("answer"), str | int | float):
            prompts.append((str(task.gold["answer"]), " ".join(m.content for m in opened)))
    env.close()
    found = [a for a, opening in prompts if a and re.search(rf"(?<!\w){re.escape(a)}(?!\w)", opening)]
    if len({answer for answer, _ in prompts}) >= 3 and len(found) / len(prompts) > MAX_SHOWN:
        raise CheckFailed(f"the gold answer occurs in {len(found)} of {len(prompts)} prompts, {found[0]!r} for one")
    return f"{subject.tasks} tasks, {marked} of them with canaries in the gold, none seen"


def _shown_text(env: ToolEnv, task: Task, seed: int) -> str:
    """Return as text all that a policy sees in an episode that calls every tool once."""
    observation, info = env.reset(seed=seed, options={"task": task})
    seen: list[Any] = [[m.content for m in observation], info, env.toolbox.schemas()]
    rng = np.random.default_rng(seed)
    for item in list(env.toolbox):
        call = ToolCall(item.name, sample_arguments(item.signature.parameters, rng))
        observation, _, over, _, info = env.step(Message("assistant", tool_calls=(call,)))
        seen.append([[m.content for m in observation], info])
        if over:
            break
    return json.dumps(seen, ensure_ascii=False, default=str)


# Scores of scripted policies

SLACK = 0.1
"""Mean score that idling may reach above `idle_share`, for partial rewards."""
NAMED = 10
"""Tasks that evidence lists by name."""


def check_gold(subject: Subject) -> str:
    """Check that gold turns end the episode with success, on every split."""
    env = subject.build()
    played = 0
    for split in env.splits:
        for seed in subject.probe_seeds(env, split, subject.tasks):
            env.reset(seed=seed, options={"split": split})
            turns = subject.gold(env)
            for number, turn in enumerate(turns):
                ended = env.step(turn)[2]
                if ended != (number == len(turns) - 1):
                    what = "ended early" if ended else "did not end"
                    raise CheckFailed(
                        f"{describe(env.task)}: gold {what} at turn {number + 1} of {len(turns)}{_refused_calls(env)}"
                    )
            if not subject.is_success(env):
                raise CheckFailed(
                    f"{describe(env.task)}: gold scored {subject.score(env).value} and is not a success{_refused_calls(env)}"
                )
            played += 1
    # Leaves of the spec that would call a model.
    judged = subject.scorer.judged if isinstance(subject.scorer, Scorer) else []
    return f"gold succeeded on {played} tasks" + (f"; not judged: {', '.join(judged)}" if judged else "")


def _refused_calls(env: ToolEnv) -> str:
    """Describe the episode's tool calls that ended in errors, by tool, with the first error; "" without any."""
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
    """Scores of one of `IDLERS`: a value per task (None: unscored), the tasks that it solved (`paid`), and for a Benchmark the
    episodes (`played`), for its official metrics."""

    agent: str
    values: list[float | None] = field(default_factory=list)
    paid: list[Task] = field(default_factory=list)
    played: list[Played] = field(default_factory=list)


def floors(subject: Subject, env: ToolEnv, split: str, seeds: Iterable[int]) -> Iterator[Floor]:
    """Yield the scores of each script of `IDLERS` on tasks of a split. Raises Skipped without a scorer."""
    tasks, inner = list(seeds), env.unwrapped
    for name, script in IDLERS.items():
        found = Floor(name)
        for seed in tasks:
            env.reset(seed=seed, options={"split": split})
            turns = script(env, np.random.default_rng(seed))
            for turn in [*turns, *turns[-1:] * 20]:  # a simulated user may keep the conversation going
                if any(env.step(turn)[2:4]):
                    break
            score = subject.score(env)
            found.values.append(score.value)
            if score.success is True:
                found.paid.append(env.task)
            if isinstance(inner, Benchmark):
                found.played.append(played_of(inner, replace(env.trajectory, reward=score.value, success=score.success)))
        yield found


def check_exploits(subject: Subject) -> str:
    """Check that scripts that solve nothing never succeed and have a low mean score, except in the share of tasks in which idling
    is correct (`idle_share`)."""
    env = subject.build()
    shown: list[str] = []
    count = subject.tasks if subject.light else subject.tasks * 2
    for floor in floors(subject, env, "train", subject.probe_seeds(env, "train", count)):
        values, paid = [value or 0.0 for value in floor.values], [describe(task) for task in floor.paid]
        if not values:
            raise Skipped("the split 'train' has no tasks")
        low, high = share_interval(len(paid), len(values))
        if paid and low > env.idle_share:
            more = f" and {len(paid) - NAMED} more" if len(paid) > NAMED else ""
            by = f" by {subject.spec}" if subject.spec else ""
            raise CheckFailed(
                f"{floor.agent!r} is paid in full{by} on {len(paid)} of {len(values)} tasks ({100 * low:.1f} to "
                f"{100 * high:.1f} % of all, 95 %; idle_share allows {100 * env.idle_share:g} %): {', '.join(paid[:NAMED])}{more}"
            )
        mean = sum(values) / len(values)
        if mean > env.idle_share + SLACK:
            worst = values.index(max(values))
            raise CheckFailed(
                f"{floor.agent!r} scores {mean:.2f} on average (allowed: {env.idle_share + SLACK:.2f}), {values[worst]:.2f} at "
                f"seed {worst}"
            )
        shown.append(f"{floor.agent} {mean:.2f}, {len(paid)} in full")
    most = 100 * share_interval(0, len(values))[1]
    return f"{len(values)} tasks each: {'; '.join(shown)} (0 of {len(values)}: at most {most:.1f} % of all, 95 %)"


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval (Wilson 1927, eq. 8) of `count` of `of`; its low end is 0 if `count` is 0."""
    z = 1.959964
    middle = (count + z * z / 2) / (of + z * z)
    half = z / (of + z * z) * math.sqrt(count * (of - count) / of + z * z / 4)
    return (max(0.0, middle - half) if count else 0.0), min(1.0, middle + half)


def check_order(subject: Subject) -> str:
    """Check that gold calls in any order succeed if the class declares `order_free`."""
    env = subject.build()
    if not env.order_free:
        raise Skipped("the class does not declare order_free")
    tried = 0
    for seed in range(subject.tasks):
        env.reset(seed=seed)
        gold = subject.gold(env)
        if sum(len(turn.tool_calls) for turn in gold) < 2:
            continue
        rng = random.Random(seed)
        for _ in range(4):
            # All calls are shuffled; each turn keeps its number of calls.
            calls = [call for turn in gold for call in turn.tool_calls]
            shuffled = iter(rng.sample(calls, len(calls)))
            turns = [replace(turn, tool_calls=tuple(next(shuffled) for _ in turn.tool_calls)) for turn in gold]
            env.reset(seed=seed, options={"split": "train"})
            play(env, turns)
            value = subject.score(env).value
            if not subject.is_success(env):
                names = json.dumps([call.name for turn in turns for call in turn.tool_calls])
                raise CheckFailed(
                    f"{describe(env.task)}: the order {names} scored {value} and is not a success{_refused_calls(env)}"
                )
            tried += 1
    if not tried:
        raise Skipped(f"none of {subject.tasks} gold solutions has two calls")
    return f"{tried} orders of gold calls succeeded"


# All checks

Check = Callable[[Subject], str]

CHECKS: dict[str, Check] = {
    "contract": check_contract,
    "same seed": check_seeds,
    "same seed elsewhere": check_process,
    "splits apart": check_splits,
    "gold scores most": check_gold,
    "idling scores nothing": check_exploits,
    "free order": check_order,
    "fuzzed calls": check_fuzz,
    "instances apart": check_instances,
    "fork": check_fork,
    "hang": partial(check_fault, fault=hang, expected=StopReason.TOOL_TIMEOUT),
    "crash": partial(check_fault, fault=crash, expected=StopReason.ENV_ERROR),
    "teardown": check_teardown,
    "no gold shown": check_leaks,
}


PARALLEL_CHECKS = 4
"""Checks that run at the same time if episodes start programs, for which they mostly wait."""


def check_all(
    subject: Subject, only: Iterable[str] | None = None, report: Callable[[CheckFinding], None] = lambda finding: None
) -> list[CheckFinding]:
    """Run all checks, or those named in `only`, and return their findings in order.

    Exceptions of the environment become findings. `report` is called with each finding as it is made. Raises KeyError for an
    unknown name in `only`.
    """
    checks = {name: CHECKS[name] for name in (CHECKS if only is None else only)}
    found: dict[str, CheckFinding] = {}
    waiting, lock = iter(list(checks.items())), threading.Lock()

    def work() -> None:
        for name, check in waiting:  # the threads share this iterator
            began = time.perf_counter()
            ok: bool | None = True
            try:
                evidence = check(subject)
            except CheckFailed as failure:
                ok, evidence = False, str(failure)
            except Skipped as reason:
                ok, evidence = None, str(reason)
            except Exception as fault:
                # The environment is the code under test, so any exception is a finding.
                ok, evidence = False, f"raised {fault_text(fault)}"
            with lock:
                found[name] = CheckFinding(name, ok, evidence, time.perf_counter() - began)
                report(found[name])

    if not subject.light:
        work()
        return list(found.values())
    threads = [threading.Thread(target=work, daemon=True, name="agentrl-check") for _ in range(PARALLEL_CHECKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[name] for name in checks]


def limit_to(subject: Subject) -> Subject:
    """Reduce tasks and inputs if episodes start programs, so that all checks take about 30 s. Raises EnvError if an episode does
    not start."""
    env = subject.build()
    if not env.has_sources:
        return subject
    began = time.perf_counter()
    env.reset(seed=0)
    tools = max(1, len(env.toolbox))
    env.close()
    # About 30 episodes are played for any number of tasks, and 20 more per task.
    episodes = 30.0 / (time.perf_counter() - began)
    tasks = max(1, min(subject.tasks, int((episodes - 30) / 20)))
    fuzz = subject.fuzz if tasks == subject.tasks else min(subject.fuzz, max(9, 100 // tools))
    return replace(subject, tasks=tasks, fuzz=fuzz, light=True)
