"""The templates of `agentrl env new`."""

from __future__ import annotations

import json
import re
from itertools import combinations
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

SQLITE = '''"""{title}: keep a table of stock up to date, in a SQLite database per episode."""

import random
import sqlite3
from contextlib import closing

from agentrl.env import Message, Task, ToolCall, ToolEnv, draw, task_rng, tool
from agentrl.utils.errors import ToolError

ITEMS = ["milk", "bread", "tea", "rice", "soap", "paper", "salt", "oil"]


class {title}(ToolEnv):
    """Bring the table up to date after a sale."""

    id = "{namespace}/{title}-v0"
    reward = "reward.json"
    summary = "keep a table of stock up to date"

    def __init__(self, *, items: int = 4, **base):
        super().__init__(**base)
        self.items = items
        self.database = b""  # the state as bytes, so that copies of an episode share nothing

    def make_task(self, rng_seed, split):
        def propose(rng: random.Random):
            stock = {{name: rng.randint(5, 20) for name in sorted(rng.sample(ITEMS, self.items))}}
            return rng.choice(sorted(stock)), rng.randint(1, 5), stock

        # A task's split depends on its content, so train and held-out tasks never coincide.
        item, sold, stock = draw(task_rng(self.id, split, rng_seed), split, propose, str)
        data = {{"item": item, "sold": sold, "stock": stock}}
        return Task(f"{name}/{{split}}/{{rng_seed}}", rng_seed, split, data, {{"stock": stock | {{item: stock[item] - sold}}}})

    def prompt(self, task):
        sold = f"We sold {{task.data['sold']}} {{task.data['item']}}."
        return [Message("user", f"{{sold}} Bring the table stock(item, count) up to date.")]

    async def setup(self, task):
        with closing(sqlite3.connect(":memory:")) as db:
            db.execute("CREATE TABLE stock (item TEXT PRIMARY KEY, count INTEGER)")
            db.executemany("INSERT INTO stock VALUES (?, ?)", task.data["stock"].items())
            db.commit()
            self.database = db.serialize()

    def open(self):
        db = sqlite3.connect(":memory:")
        db.deserialize(self.database)
        return closing(db)

    @tool(read_only=True)
    async def count(self, item: str) -> int:
        """how many of an item are in stock"""
        with self.open() as db:
            row = db.execute("SELECT count FROM stock WHERE item = ?", (item,)).fetchone()
        if row is None:
            raise ToolError(f"there is no {{item}}")
        return row[0]

    @tool
    async def set_count(self, item: str, count: int) -> str:
        """write how many of an item are in stock"""
        with self.open() as db:
            if db.execute("UPDATE stock SET count = ? WHERE item = ?", (count, item)).rowcount == 0:
                raise ToolError(f"there is no {{item}}")
            db.commit()
            self.database = db.serialize()
        return "written"

    def state(self):
        with self.open() as db:
            return {{"stock": dict(db.execute("SELECT item, count FROM stock ORDER BY item"))}}

    def gold_turns(self, task):
        item = task.data["item"]
        calls = [("count", {{"item": item}}), ("set_count", {{"item": item, "count": task.gold["stock"][item]}})]
        turns = [Message("assistant", tool_calls=(ToolCall(name, arguments),)) for name, arguments in calls]
        return [*turns, Message("assistant", "Done.")]
'''

SERVER = '''"""An MCP server: `python server.py` serves it over stdio. Replace it by yours, in any language."""

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("{name}")
READS = ToolAnnotations(read_only_hint=True)
PRICES = {{"milk": 2, "bread": 3, "tea": 5, "rice": 4, "soap": 6, "paper": 7, "salt": 1, "oil": 8}}


@server.tool(annotations=READS)
def price(item: str) -> int:
    """What an item costs."""
    if item not in PRICES:
        raise ToolError(f"there is no {{item}}")
    return PRICES[item]


if __name__ == "__main__":
    server.run("stdio")
'''

PRICES = {"milk": 2, "bread": 3, "tea": 5, "rice": 4, "soap": 6, "paper": 7, "salt": 1, "oil": 8}

STATE_REWARD = {
    "agentrl_reward": 1,
    "name": "NAME",
    "description": "1 if the table is as it should be at the end, else 0.",
    "root": {
        "use": "state.match",
        "id": "success",
        "args": {"expect": {"$": "/task/gold/stock"}, "path": "/stock", "by": "fields"},
    },
}

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
{env}

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


TEMPLATES = {
    "stateless": "tools that look things up; the answer is scored",
    "sqlite": "tools that change a SQLite database per episode; its state is scored",
    "mcp": "the tools of an MCP server, with tasks from a file",
}


def write_template(name: str, shelf: str, template: str = "stateless") -> Path:
    """Write `envs/NAME` and a config `NAME.toml` for it on a shelf; returns the folder.
    Raises UserError for a bad name, or if one of the two exists already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r}: a short name is lower-case letters, digits and _, for example todo_list")
    folder, config = Path(shelf) / "envs" / name, Path(shelf) / f"{name}.toml"
    for taken in (folder, config):
        if taken.exists():
            raise UserError(f"{taken} exists already; choose another name or remove it")
    title = "".join(part.capitalize() for part in name.split("_"))
    folder.mkdir(parents=True)
    env, files = f'id = "{name}"', {}
    if template == "mcp":
        env = f"""id = "mcp"
params = {{ command = ["python", "envs/{name}/server.py"], tasks = "envs/{name}/tasks.jsonl" }}"""
        tasks = ""
        for number, pair in enumerate(combinations(sorted(PRICES), 2)):  # every eighth is held out
            row = {
                "id": f"prices/{number}",
                "split": "heldout" if number % 8 == 7 else "train",
                "prompt": f"What do {pair[0]} and {pair[1]} cost together?",
                "gold": {
                    "answer": sum(PRICES[item] for item in pair),
                    "calls": [{"name": "price", "arguments": {"item": item}} for item in pair],
                },
            }
            tasks += json.dumps(row) + "\n"
        files = {"server.py": SERVER.format(name=name), "tasks.jsonl": tasks}
    else:
        source, reward = (ENV, REWARD) if template == "stateless" else (SQLITE, STATE_REWARD)
        files = {
            "env.py": source.format(name=name, title=title, namespace="my"),
            "reward.json": json.dumps({**reward, "name": name}, indent=2) + "\n",
            f"test_{name}.py": TEST.format(name=name),
        }
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    config.write_text(CONFIG.format(name=name, env=env), encoding="utf-8")
    return folder
