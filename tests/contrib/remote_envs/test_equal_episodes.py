"""The same seeds give the same episodes in this process and over HTTP: messages, turns, tools, state, score, to the digit."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from agentrl.config.schema import Choice, RewardConfig, ToolsConfig
from agentrl.data.trajectory import Trajectory
from agentrl.env import Message, ToolCall, ToolEnv
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from tests.conftest import proof
from tests.contrib.remote_envs.served import Running, served
from tests.contrib.remote_envs.served import token as token  # a fixture

CASES: dict[str, tuple[str, dict[str, Any], tuple[Choice, ...], tuple[str, ...]]] = {
    "more tools": ("key_value", {"calls": 3}, (), ("calculator",)),
    "faulty tools": ("key_value", {"calls": 3}, (Choice(name="tool_faults", args={"rate": 0.4, "seed": 3}),), ()),
    "few turns": ("workspace", {}, (Choice(name="turn_limit", args={"turns": 3}),), ()), "workspace": ("workspace", {}, (), ()),
    "sql": ("sql", {}, (), ()), "search": ("search", {}, (), ()), "service_desk": ("service_desk", {}, (), ()),
    "function_calling": ("function_calling", {}, (), ()),
}  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Running]]:
    """Of each environment one, started when it is asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(served(name)))


def row_of(record: Trajectory) -> dict[str, Any]:
    """All of an episode but the time that it took."""
    row = record.to_json()
    for turn in row["turns"]:
        turn.pop("seconds")
        for result in turn["results"]:
            result.pop("seconds")
    return {key: value for key, value in row.items() if key != "timings"}


def turns_of(env: ToolEnv, seed: int) -> list[Any]:
    """Good turns, bad ones, several calls at once, a call of no tool, text with markup, and text."""
    turns: list[Any] = list(env.gold_turns(env.task))
    env.action_space.seed(seed)
    rng = random.Random(seed)
    odd = [
        env.action_space.sample(),
        Message("assistant", "", (ToolCall("nothing", {}, "c1"), ToolCall(env.toolbox.names[0], {"x": None}, "c1"))),
        Message("assistant", "é \ud83d \u2028", (ToolCall(env.toolbox.names[0], None, error="no JSON"),)),
    ]
    for turn in odd:
        turns.insert(rng.randrange(len(turns)), turn)
    return turns


async def play(env: ToolEnv, seed: int, split: str, scorer: Any) -> tuple[list[Any], dict[str, Any]]:
    observation, info = await env.areset(seed=seed, options={"split": split})
    seen: list[Any] = [(observation, info, env.toolbox.schemas())]
    for turn in turns_of(env, seed):
        result = await env.astep(turn)
        seen.append((result, env.trajectory.state, env.toolbox.schemas(), env.has_user, env.has_finished))
        if result[2] or result[3]:
            break
    await env.aclose()
    record = env.trajectory
    score = await scorer.ascore(record)
    return [*seen, (score.value, score.success, score.evidence, score.metrics)], row_of(record)


SHORT = ("faulty tools", "more tools", "sql")


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=proof) for name in CASES])
async def test_an_episode_over_http_is_the_episode_in_process(name: str, servers: Callable[[str], Running]) -> None:
    env_id, params, wrappers, sets = CASES[name]
    here = EnvRef(env_id, params, wrappers=wrappers, tools=ToolsConfig(sets=list(sets)))
    there = EnvRef(env_id, params, wrappers=wrappers, tools=here.tools, at=servers(env_id).address())
    spec = find_spec(here, None)
    assert find_spec(there, None) == spec
    scorers = [make_scorer(spec, RewardConfig(), ref) for ref in (here, there)]
    for seed, split in ((0, "train"), (1, "train"), (2, "heldout")):
        one, two = here.build(), there.build()
        assert one.make_task(seed, split) == two.make_task(seed, split)
        assert one.task_count(split) == two.task_count(split)
        assert one.toolbox.schemas() == two.toolbox.schemas()
        assert one.user_repeats == two.user_repeats
        first, second = await play(one, seed, split, scorers[0]), await play(two, seed, split, scorers[1])
        assert first == second
    assert not servers(env_id).app.sessions.episodes
