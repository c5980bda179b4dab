"""Reset and step as documented; the same seed gives the same episode; no task in two splits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from hashlib import blake2b

from gymnasium.utils.env_checker import check_env

from agentrl.env.check.report import CheckFailed, Skipped, Subject, describe, short_repr
from agentrl.trajectory import Message, Trajectory


def check_contract(subject: Subject) -> str:
    """Gymnasium's own checker, and what a ToolEnv guarantees beyond it."""
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
    for seed in subject.seeds():
        observation, info = env.reset(seed=seed)
        tools = max(tools, len(env.toolbox))
        _check_opening(observation, info, describe(env.task))
        env.step("")
        record = env.trajectory
        if Trajectory.from_json(json.loads(json.dumps(record.to_json()))) != record:
            raise CheckFailed(f"{describe(env.task)}: the record is not the same after a round trip through JSON")
    env.close()
    return f"gymnasium's check_env and {subject.tasks} resets; {tools} tools"


def _check_opening(observation: object, info: object, where: str) -> None:
    if not isinstance(observation, list) or not all(isinstance(item, Message) for item in observation):
        raise CheckFailed(f"{where}: reset gave {short_repr(observation)}, not a list of messages")
    if not observation or observation[-1].role not in ("user", "tool"):
        raise CheckFailed(f"{where}: the opening messages do not end with the user's turn")
    if not isinstance(info, dict):
        raise CheckFailed(f"{where}: info is {short_repr(info)}, not a dict")


def check_seeds(subject: Subject) -> str:
    """With the same seed and the same turns, two instances must agree in every message and in the final state."""
    digests = set()
    for seed in subject.seeds():
        one, two = (_transcript(subject, seed) for _ in range(2))
        if one != two:
            raise CheckFailed(f"seed {seed} gave two different episodes: {_first_difference(one, two)}")
        digests.add(one)
    if len(digests) == 1 and subject.tasks > 1:
        raise CheckFailed(f"all {subject.tasks} seeds gave the same episode")
    return f"{subject.tasks} seeds twice each, {len(digests)} different episodes"


def _transcript(subject: Subject, seed: int) -> str:
    env = subject.build()
    env.reset(seed=seed)
    for turn in subject.turns(env, seed):
        if env.step(turn)[2]:
            break
    record = env.trajectory
    env.close()
    # Results are compared without value and duration: the time that a call took differs between runs.
    for turn_record in record.turns:
        for index, result in enumerate(turn_record.results):
            turn_record.results[index] = type(result)(result.call_id, result.name, result.content, None, result.error)
    row = record.to_json()
    return json.dumps({key: row[key] for key in ("task", "messages", "turns", "tools", "state")}, sort_keys=True)


def _first_difference(one: str, two: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    return f"...{one[max(0, at - 40) : at + 40]}... against ...{two[max(0, at - 40) : at + 40]}..."


_PROBE = """
import pickle, sys
from agentrl.env.check.contract import tasks_digest
print(tasks_digest(pickle.loads(sys.stdin.buffer.read()).build(), int(sys.argv[1])))
"""


def tasks_digest(env: object, count: int) -> str:
    """A fingerprint of the tasks and prompts of the first `count` seeds of both splits."""
    from agentrl.env.base import ToolEnv

    assert isinstance(env, ToolEnv)
    rows = []
    for split in env.splits:
        for seed in range(count):
            observation, _ = env.reset(seed=seed, options={"split": split})
            rows.append([m.content for m in observation])
            rows.append([env.task.id, json.dumps([dict(env.task.data), dict(env.task.gold)], sort_keys=True)])
    env.close()
    return blake2b(json.dumps(rows).encode()).hexdigest()


def check_process(subject: Subject) -> str:
    """Another process, with a different hash seed, makes the same tasks."""
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
    if done.stdout.decode().strip() != here:
        raise CheckFailed("another process makes other tasks from the same seeds (set order? hash()? the clock?)")
    return f"{subject.tasks} tasks per split agree with those of another process"


def check_splits(subject: Subject) -> str:
    """No task's data and gold occur in two splits."""
    env = subject.build()
    seen: dict[str, str] = {}
    for split in env.splits:
        for seed in subject.seeds(subject.tasks * 8):
            task = env.make_task(seed, split)
            if task.split != split:
                raise CheckFailed(f"make_task({seed}, {split!r}) gave a task of split {task.split!r}")
            content = json.dumps([dict(task.data), dict(task.gold)], sort_keys=True, default=str)
            other = seen.setdefault(content, split)
            if other != split:
                raise CheckFailed(f"{describe(task)} has the content of a task of {other}")
    return f"{len(seen)} different tasks in {', '.join(env.splits)}, none in two"
