"""The mcp environment: the packaged server and its tasks, an own server over stdio, forks, faults."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.trajectory import StopReason
from agentrl.env import ToolEnv
from agentrl.env.catalog import EnvRef, find_env, list_envs, make_env
from agentrl.utils.errors import ConfigError, DependencyError, EnvError, TaskDataError
from tests.env.toyenvs import call
from tests.shelf.conversation_probes import answer, gold_episode

FOLDER = Path(str(find_env("mcp").path)).parent
TOOLS = ("search", "count", "take", "add")


def rows(path: Path, *tasks: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(task) for task in tasks))
    return str(path)


def test_the_task_file_is_what_its_script_writes() -> None:
    made = subprocess.run([sys.executable, str(FOLDER / "make_tasks.py")], capture_output=True, text=True, check=True)
    assert made.stdout == (FOLDER / "tasks.jsonl").read_text()


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_gold_scores_one_on_every_level(level: int, split: str) -> None:
    env = make_env("mcp", level=level)
    for seed in range(3):
        assert gold_episode(env, seed, split)[0] == 1.0
        assert env.trajectory.task.data["level"] == level
        assert env.trajectory.state == env.trajectory.task.gold["state"]


def test_the_right_number_with_the_wrong_state_is_no_success() -> None:
    env = make_env("mcp", level=2)
    env.reset(seed=0)
    assert env.step(str(env.task.gold["answer"]))[1] == 0.0
    env.reset(seed=0)
    turns = env.gold_turns(env.task)
    rewards = [env.step(turn)[1] for turn in (turns[1], turns[1], turns[-1])]  # the change is made twice
    assert rewards == [0.0, 0.0, 0.0] and env.trajectory.terminated


def test_what_belongs_to_the_environment_is_out_of_reach_and_mistakes_come_back_as_messages() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    env = make_env("mcp")
    env.reset(seed=0)
    assert (root.handlers, root.level) == before, "building a server leaves the process's logging alone"
    assert env.toolbox.names == TOOLS
    assert "unknown_tool" in answer(env, "dump") and "unknown_tool" in answer(env, "load", stock={})
    assert "no item with code" in answer(env, "count", code="k1")
    assert "wrong_type" in answer(env, "take", code="k1", amount="many")
    env.close()


# -- a server of one's own ---------------------------------------------------------------------------


@pytest.fixture
def stdio(tmp_path: Path) -> dict[str, Any]:
    """The packaged server as a program, with tasks of every kind of gold."""
    load = [{"name": "load", "arguments": {"stock": {"k1": {"name": "red mug", "count": 9}}}}]
    count = {"name": "count", "arguments": {"code": "k1"}}
    take = {"name": "take", "arguments": {"code": "k1", "amount": 2}}
    tasks = rows(
        tmp_path / "tasks.jsonl",
        {"id": "number", "split": "train", "prompt": "how many mugs?", "setup": load, "gold": {"answer": 9, "calls": [count]}},
        {"id": "text", "split": "number", "prompt": "which color?", "setup": load, "gold": {"answer": "Red"}},
        {"id": "state", "split": "state", "prompt": "take two", "setup": load, "gold": {"state": {"k1": 7}, "calls": [take]}},
        {"id": "calls", "split": "calls", "prompt": "look", "setup": load, "gold": {"calls": [count]}},
    )
    return {"command": [sys.executable, str(FOLDER / "server.py")], "tasks": tasks, "state_tool": "dump"}


def test_a_program_over_stdio_and_every_kind_of_gold(stdio: dict[str, Any]) -> None:
    env = make_env("mcp", **stdio)
    assert set(env.splits) == {"train", "number", "state", "calls"}
    for split in ("train", "state", "calls"):
        assert gold_episode(env, 0, split)[0] == 1.0, split
    env.reset(seed=0, options={"split": "number"})
    assert env.toolbox.names == TOOLS
    with pytest.raises(NotImplementedError, match="no gold calls"):
        env.gold_turns(env.task)
    assert env.step("It is RED.")[1] == 1.0
    env.reset(seed=0, options={"split": "number"})
    assert env.step("It is reddish.")[1] == 0.0
    env.reset(seed=0, options={"split": "calls"})
    assert env.step("looked")[1] == 0.0


def test_a_fork_over_stdio_is_a_session_of_its_own(stdio: dict[str, Any]) -> None:
    env = make_env("mcp", **stdio)
    env.reset(seed=0, options={"split": "state"})
    env.step(call("take", code="k1", amount=3))
    snapshot, replay_env = env.snapshot(), env.fork()
    assert answer(replay_env, "take", code="k1", amount=5) == "took 5 of red mug"
    assert (answer(env, "count", code="k1"), answer(replay_env, "count", code="k1")) == ("6", "1")
    env.restore(snapshot)
    assert answer(env, "count", code="k1") == "6" and len(env.trajectory.turns) == 2
    env.close()
    replay_env.close()


CLOCK = """
import asyncio
import time
from mcp.server import MCPServer
server = MCPServer("clock")

@server.tool()
def now() -> float:
    return time.time()

@server.tool()
def die() -> str:
    import os
    os._exit(3)

@server.tool()
async def wait() -> str:
    await asyncio.sleep(5)
    return "5 s later"

server.run("stdio")
"""


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "clock.py").write_text(CLOCK)
    tasks = rows(tmp_path / "clock.jsonl", {"split": "train", "prompt": "what time?", "gold": {"answer": "late"}})
    return {"command": [sys.executable, str(tmp_path / "clock.py")], "tasks": tasks}


def test_a_server_that_answers_differently_cannot_be_forked(clock: dict[str, Any]) -> None:
    env = make_env("mcp", **clock)
    env.reset(seed=0)
    env.step(call("now"))
    with pytest.raises(EnvError, match="not deterministic"):
        env.fork()
    env.close()


@pytest.mark.parametrize(("name", "seconds", "said"), [("die", 30, "die"), ("wait", 0.2, r"wait.*not finished within 0\.2 s")])
def test_a_state_tool_that_dies_or_is_late_is_never_a_reward(clock: dict[str, Any], name: str, seconds: float, said: str) -> None:
    """It is part of the environment: if it breaks, nobody failed the task."""
    env = make_env("mcp", **clock, state_tool=name)
    env.reset(seed=0)
    env.timeout = seconds  # type: ignore[attr-defined]
    began = time.monotonic()
    with pytest.raises(EnvError, match=said):
        env.step("late")
    assert time.monotonic() - began < 4, "the server waits for 5 s"
    assert env.trajectory.stop is StopReason.ENV_ERROR and env.trajectory.reward is None and not env.is_open
    assert not env.trajectory.terminated


def test_a_late_call_is_the_policys_doing_where_the_parameter_says_so(clock: dict[str, Any]) -> None:
    env = make_env("mcp", **clock, late="policy")
    env.reset(seed=0)
    env.toolbox.replace(env.toolbox["wait"].with_options(timeout=0.2))
    _, reward, terminated, truncated, info = env.step(call("wait"))
    assert (reward, terminated, truncated) == (0.0, False, True) and "no answer within 0.2 s" in info["error"]
    assert env.trajectory.stop is StopReason.MAX_TOOL_TIME and not env.is_open


def test_tools_that_are_not_there_are_named(clock: dict[str, Any], stdio: dict[str, Any]) -> None:
    with pytest.raises(EnvError, match="no tool 'dump'; it has now, die"):
        make_env("mcp", **clock, state_tool="dump").reset(seed=0)
    env = make_env("mcp", **{**stdio, "tools": ["count"]})
    env.reset(seed=0)
    assert env.toolbox.names == ("count",)
    env.close()


# -- mistakes ----------------------------------------------------------------------------------------


def test_bad_parameters_and_rows_are_told_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its own tasks"):
        make_env("mcp", command=["x"])
    with pytest.raises(ConfigError, match="late = 'policies'; expected 'policy' or 'infrastructure'"):
        make_env("mcp", late="policies")
    with pytest.raises(ConfigError, match="no such task in split"):
        make_env("mcp", level=9)
    for task, says_ in (
        ({"prompt": "x", "gold": {}}, "bad.jsonl:1: field gold"),
        ({"prompt": "x", "gold": {"answer": []}}, "bad.jsonl:1: field gold/answer"),
        ({"gold": {"answer": 1}}, "bad.jsonl:1: field .the row.: 'prompt'"),
        ({"prompt": "x", "gold": {"answer": 1}, "setup": [{"nme": "load"}]}, "bad.jsonl:1: field setup/0"),
    ):
        with pytest.raises(TaskDataError, match=says_):
            make_env("mcp", command=["x"], tasks=rows(tmp_path / "bad.jsonl", task))


def test_a_changed_task_file_is_read_again(stdio: dict[str, Any], tmp_path: Path) -> None:
    one, two = make_env("mcp", **stdio), make_env("mcp", **stdio)
    assert isinstance(one, ToolEnv) and vars(one)["tasks"] is vars(two)["tasks"]
    rows(tmp_path / "tasks.jsonl", {"split": "train", "prompt": "new", "gold": {"answer": 1}})
    assert make_env("mcp", **stdio).make_task(0, "train").data["prompt"] == "new"


def test_without_the_sdk_listing_works_and_building_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.utils.errors.find_spec", lambda name: None)
    assert "agentrl/Mcp-v0" in {entry.id for entry in list_envs()}
    with pytest.raises(DependencyError, match=r"agentrl\[mcp\]"):
        EnvRef("mcp").build()
