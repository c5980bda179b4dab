"""The state that an episode began with is made again by the run's environment, and held against the last one."""

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.data.trajectory import Message, ToolCall, Trajectory
from agentrl.env.catalog import EnvRef
from tests.contrib.view.test_api import client
from tests.run.made_folders import run_folder

TASKS = Path(__file__).parents[3] / "envs" / "mcp" / "tasks.jsonl"


def played(seed: int) -> Trajectory:
    """An episode of key_value in which `set` changed a key and `add` the total."""

    async def play() -> Trajectory:
        env = EnvRef("key_value", {"calls": 2}).build()
        await env.areset(seed=seed, options={"split": "train"})
        key = next(iter(env.task.data["store"]))
        for name, arguments in (("set", {"key": key, "x": 77}), ("add", {"x": 5})):
            await env.astep(Message("assistant", "", (ToolCall(name, arguments, "call_0"),)))
        await env.astep(Message("assistant", "done"))
        await env.aclose()
        return env.trajectory

    return asyncio.run(play())


def test_what_an_episode_changed(tmp_path: Path) -> None:
    one = played(3)
    key, was = next(iter(one.task.data["store"].items()))
    other = played(4)
    other.task.data["store"][key] = 1000  # as if the environment's code had made other tasks then
    stateless = played(5)
    stateless.state = None
    folder = run_folder(tmp_path / "r", {"step_000001": [one, other, stateless]})
    folder.config.write_text('name = "r"\n[env]\nid = "key_value"\n[env.params]\ncalls = 2\n[model.init]\n')
    asking = client(tmp_path)
    found = asking.ask("/runs/r/episodes/step_000001.0")
    assert found["state_before"]["store"] == {**one.state["store"], key: was}
    assert found["state_diff"] == [
        {"path": f"/store/{key}", "kind": "changed", "before": was, "after": 77},
        {"path": "/total", "kind": "changed", "before": 0, "after": 5},
    ]
    changed = asking.ask("/runs/r/episodes/step_000001.1")
    assert changed["state_diff"] is None and "makes another task" in changed["state_problem"]
    assert "recorded no state" in asking.ask("/runs/r/episodes/step_000001.2")["state_problem"]


def test_what_an_episode_of_a_rollout_changed(tmp_path: Path) -> None:
    """Its folder has no config.toml: the note says which environment it was, with which parameters."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "trajectories.jsonl").write_text(json.dumps(played(3).to_json()) + "\n")
    note = {"env.id": "key_value", "env.params.calls": 2, "env.eval.split": "heldout", "seed": 0}
    (folder / "rollout.json").write_text(json.dumps({"identity": note}))
    found = client(tmp_path).ask("/runs/r/episodes/trajectories.0")
    assert found["state_problem"] is None and found["state_diff"][1] == {
        "path": "/total", "kind": "changed", "before": 0, "after": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    "env, said",
    [
        ('id = "key_value"\nurl = "http://127.0.0.1:9"', "env.url"),
        (f'id = "mcp"\n[env.params]\ncommand = ["touch", "started"]\ntasks = "{TASKS}"', "starts other processes"),
        ('id = "python"', "starts other processes"),
        ('id = "no_such"', "no_such"),
    ],
)
def test_nothing_is_started_for_it(here: Path, env: str, said: str) -> None:
    """A run folder from elsewhere must not choose what runs on this machine."""
    folder = run_folder(here / "runs" / "r", {"step_000001": [played(3)]})
    folder.config.write_text(f'name = "r"\n[model.init]\n[env]\n{env}\n')
    found = client(here / "runs").ask("/runs/r/episodes/step_000001.0")
    assert found["state_diff"] is None and said in found["state_problem"]
    assert not (here / "started").exists()
