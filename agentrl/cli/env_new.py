"""The template of `agentrl env new`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from agentrl.utils.errors import UserError

ENV = '''"""{title}: look things up and count those of one color."""

import random

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng
from agentrl.utils.errors import ToolError
from agentrl.env import tool

THINGS = ["milk", "bread", "tea", "rice", "soap", "paper", "salt", "oil", "eggs", "nuts", "honey", "flour"]


class {title}(ToolEnv):
    """Say how many of the named things have the asked-for color."""

    id = "{namespace}/{title}-v0"
    reward = "reward.json"
    summary = "count the things of one color"
    order_free = True

    def __init__(self, *, things: int = 4, **base):
        super().__init__(**base)
        self.things = things
        self.colors = {{}}

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            names = sorted(rng.sample(THINGS, self.things))
            return rng.choice(["red", "blue"]), {{name: rng.choice(["red", "blue"]) for name in names}}

        # A task's split depends on its content, so train and held-out tasks never coincide.
        color, colors = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        count = sum(value == color for value in colors.values())
        data = {{"color": color, "colors": colors}}
        return Task(f"{name}/{{split}}/{{rng_seed}}", rng_seed, split, data, {{"answer": str(count)}})

    def prompt(self, task):
        names = ", ".join(task.data["colors"])
        return [Message("user", f"How many of these are {{task.data['color']}}: {{names}}? Look each one up.")]

    async def setup(self, task):
        self.colors = dict(task.data["colors"])

    @tool(read_only=True)
    async def look(self, name: str) -> str:
        """the color of a thing"""
        if name not in self.colors:
            raise ToolError(f"there is no {{name}}")
        return self.colors[name]

    def gold_turns(self, task):
        looks = [Message("assistant", tool_calls=(ToolCall("look", {{"name": name}}),)) for name in task.data["colors"]]
        return [*looks, Message("assistant", task.gold["answer"])]
'''

REWARD = {
    "agentrl_reward": 1,
    "name": "NAME",
    "description": "1 if the last number of the final answer is the gold one, else 0.",
    "root": {
        "use": "number.close",
        "id": "success",
        "args": {"expect": {"$": "/task/gold/answer"}, "where": "answer", "which": "last"},
    },
}

TEST = '''"""The environment fulfills the contract: the same checks as `agentrl env check {name}`."""

import pickle
from pathlib import Path

import pytest

from agentrl.env.catalog import EnvRef
from agentrl.env.check import CHECKS, Subject, check_all
from agentrl.reward import compile_spec, load_spec

HERE = Path(__file__).parent
REF = EnvRef("{name}", source=str(HERE / "env.py"))
SUBJECT = Subject(REF.build, compile_spec(load_spec(HERE / "reward.json")), fuzz=100, portable=pickle.dumps(REF))


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check):
    finding = check_all(SUBJECT, [check])[0]
    assert finding.ok is not False, finding.evidence
'''

CONFIG = """name = "{name}"
steps = 2

[env]
id = "{name}"

[model.init]                 # random weights

[sft]                        # a short warm start on gold turns; before a turn the teacher stops with probability 0.1
min_steps = 120
max_steps = 120
gate = 0.0
gate_every = 120
gate_tasks = 8
teacher = {{ stop = 0.1 }}
optimizer = "muon"           # of a model of random weights; leave these three out for a real one
lr = 3e-3
matrix_lr = 0.02

[rollout]
groups = 4
group_size = 4
max_turns = 6
max_turn_tokens = 32

[algorithm]
minibatch = 8

[optim]
lr = 1e-3                    # for a tiny model; a real one has 1e-6

[cluster]
backend = "inline"

[eval]
tasks = 8
"""


def write_template(name: str, shelf: str) -> Path:
    """Write `envs/NAME` and `NAME.toml`, which trains on it, on a shelf; returns the folder. Raises UserError for a bad name, and
    if one of the two is there already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r}: a short name is lower-case letters, digits and _, for example todo_list")
    folder, config = Path(shelf) / "envs" / name, Path(shelf) / f"{name}.toml"
    for taken in (folder, config):
        if taken.exists():
            raise UserError(f"{taken} exists already; choose another name or remove it")
    title = "".join(part.capitalize() for part in name.split("_"))
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(ENV.format(name=name, title=title, namespace="my"), encoding="utf-8")
    (folder / "reward.json").write_text(json.dumps({**REWARD, "name": name}, indent=2) + "\n", encoding="utf-8")
    (folder / f"test_{name}.py").write_text(TEST.format(name=name), encoding="utf-8")
    config.write_text(CONFIG.format(name=name), encoding="utf-8")
    return folder
