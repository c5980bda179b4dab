"""Gold that `math.equal` cannot read ends a run before it starts, with the task's name, and from a config."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.load import config_from
from agentrl.reward import compile_spec
from agentrl.run import checks
from agentrl.run.checks.reward_checks import check_gold
from agentrl.utils.errors import ConfigError
from tests.run.starts import scored

pytest.importorskip("math_verify", reason="math-verify is not installed: pip install 'agentrl[math]'")

ENV = """
from pathlib import Path

from agentrl.env import Message, ToolEnv
from agentrl.contrib.toolkit.taskdata import load_tasks


class Sheet(ToolEnv):
    id = "test/Sheet-v0"
    reward = "reward.json"
    summary = "questions of a file"

    def __init__(self, **base):
        super().__init__(**base)
        self.tasks = load_tasks(Path(__file__).with_name("tasks.jsonl"))

    def task_count(self, split):
        return self.tasks.count(split)

    def make_task(self, rng_seed, split):
        return self.tasks.task(rng_seed, split)

    def prompt(self, task):
        return [Message("user", task.data["q"])]

    def gold_turns(self, task):
        return [Message("assistant", str(task.gold["answer"]))]
"""
ROOT = {"use": "math.equal", "args": {"expect": {"$": "/task/gold/answer"}}}


def run(path: Path, changed: dict[str, Any], root: dict[str, Any] = ROOT, whole: bool = False) -> None:
    """The checks on twenty tasks, of which some are changed."""
    home = path / "envs" / "sheet"
    home.mkdir(parents=True, exist_ok=True)
    (home / "env.py").write_text(ENV)
    rows = [{"id": f"t{n}", "split": "heldout" if n > 15 else "train", "data": {"q": f"{n} + 1"}, "gold": {"answer": str(n + 1)}}
            for n in range(20)]  # fmt: skip
    rows = [{**row, **changed.get(row["id"], {})} for row in rows]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {"agentrl_reward": 1, "name": "math", "root": root}
    (home / "reward.json").write_text(json.dumps(spec))
    (path / "tiny.toml").write_text((Path(__file__).parents[3] / "examples/tiny.toml").read_text().replace("./graded", "graded"))
    env = {"id": "sheet", "reward": "envs/sheet/reward.json", "params": {}}
    sft = {"teacher": {}, "params": {}, "gate_params": {}}
    config = config_from({"name": "x", "env": env, "sft": sft, "model": {"init": {"layers": 1, "hidden": 32}}}, [])
    if whole:
        checks.check_config(config)
    check_gold(scored(config, compile_spec(spec)))


def test_the_task_is_named_of_either_split_and_before_any_episode(here: Path) -> None:
    run(here, {}, whole=True)
    # Not one of the first three tasks, whose gold solutions are played before a run.
    broken: dict[str, Any] = {"t11": {"gold": {"answer": "no idea"}}}
    with pytest.raises(
        ConfigError, match=r"task 't11' of the split 'train': at /root of .*'no idea' is no mathematics .* Correct the task"
    ):
        run(here, broken, whole=True)
    with pytest.raises(ConfigError, match=r"task 't18' of the split 'heldout'"):
        run(here, {"t18": {"gold": {"answer": ""}}})
    with pytest.raises(ConfigError, match=r"task 't5' .*resolves to nothing"):
        run(here, {"t5": {"gold": {"result": "6"}}})


def test_what_an_episode_may_do_without_is_not_asked(here: Path) -> None:
    broken: dict[str, Any] = {"t11": {"gold": {"answer": "no idea"}}}
    other = {"use": "text.equals", "args": {"expect": {"$": "/task/gold/answer"}}}
    run(here, broken, {**ROOT, "missing": 0})
    run(here, broken, {"op": "any", "of": [other, {**ROOT, "when": {"$": "/task/gold/answer", "ne": "no idea"}}]})
    with pytest.raises(ConfigError, match="at /root/of/1 of"):
        run(here, broken, {"op": "any", "of": [other, ROOT]})
