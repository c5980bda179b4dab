"""The state that an episode began with, and what it changed.

A trajectory has only its final state. The first one is what the environment sets up for the task, so it is made again from the
task's seed, when somebody looks: that costs a run nothing. It is shown only if the environment also makes the same task as then.
What would start more than Python code (a server, a sandbox, tools of other processes, an agent's program) is not started for it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import AgentrlError
from agentrl.plain_data import read_json
from agentrl.run.reader import RunRecord

Json = Any
LIMIT_S = 10.0
MOST = 500
"""Differences that are listed."""


def differences(before: Json, after: Json, at: str = "") -> Iterator[dict[str, Json]]:
    """Where two JSON values differ, outermost place first: JSON Pointer, `kind` (changed, added, removed), and both values (None
    for one that is not there)."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from _one(before, after, key in before, key in after, key, at)
    elif isinstance(before, list) and isinstance(after, list):
        for key in range(max(len(before), len(after))):
            yield from _one(before, after, key < len(before), key < len(after), key, at)
    elif before != after or isinstance(before, bool) != isinstance(after, bool):
        yield {"path": at or "/", "kind": "changed", "before": before, "after": after}


def _one(before: Json, after: Json, was: bool, is_: bool, key: Any, at: str) -> Iterator[dict[str, Json]]:
    place = f"{at}/{str(key).replace('~', '~0').replace('/', '~1')}"
    if was and is_:
        yield from differences(before[key], after[key], place)
    elif was:
        yield {"path": place, "kind": "removed", "before": before[key], "after": None}
    else:
        yield {"path": place, "kind": "added", "before": None, "after": after[key]}


def state_diff(run: RunRecord, found: Mapping[str, Json], allowed: bool) -> dict[str, Json]:
    """`state_diff`: the differences from the first state to the last, None if they are not known, and `state_problem`, why."""
    out: dict[str, Json] = {"state_before": None, "state_diff": None, "state_problem": None}
    if found.get("state") is None:
        return out | {"state_problem": "the environment has recorded no state"}
    if not allowed:
        return out | {"state_problem": "environments are not run (--no-envs)"}
    task = found["task"]
    seed, split, name = task.get("seed"), str(task.get("split", "train")), str(found.get("env") or "")
    content = json.dumps([task.get("data"), task.get("gold")], sort_keys=True)
    try:
        before = read_json(_initial(run.path, run.text, name, seed, split, content))
    except Exception as problem:  # of an environment's own code, which may raise anything
        said = str(problem) if isinstance(problem, AgentrlError) else f"{type(problem).__name__}: {problem}"
        return out | {"state_problem": f"the first state could not be made again: {said}"}
    made = differences(before, found["state"])
    return out | {"state_before": before, "state_diff": [item for item, _ in zip(made, range(MOST), strict=False)]}


@functools.lru_cache(maxsize=256)
def _initial(path: Path, config: str, env: str, seed: int, split: str, content: str) -> str:
    """The first state of a task as JSON text. Raises AgentrlError if it is not the task of then, or would start other processes;
    TimeoutError; and whatever the environment raises."""
    return asyncio.run(asyncio.wait_for(_set_up(RunRecord(path), env, seed, split, content), LIMIT_S))


async def _set_up(run: RunRecord, name: str, seed: int, split: str, content: str) -> str:
    from agentrl.catalog import EnvRef

    config = run.config
    env = next((env for env in config.envs if env.called == name), config.envs[0])
    tools = env.tools or config.tools
    for key, value in {"url": env.url, "sandbox": env.sandbox, "agent": env.agent or config.agent, "tools": tools.mcp}.items():
        if value:
            raise AgentrlError(f"env.{key}: it would be started for it")
    made = EnvRef(env.id, env.params).build()
    # Of a class that runs commands in a sandbox, or has a server of tools: a run folder must not choose what is started.
    if "sandbox" in inspect.signature(type(made).__init__).parameters or made._sources:
        raise AgentrlError(f"{made.id} starts other processes")
    try:
        await made.areset(seed=seed, options={"split": split})
        if json.dumps([made.task.data, made.task.gold], sort_keys=True, default=dict) != content:
            raise AgentrlError("the environment makes another task of this seed than then")
        return json.dumps(made.state())
    finally:
        await made.aclose()
