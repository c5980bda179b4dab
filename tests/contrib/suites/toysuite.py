"""A benchmark of six sums in three families, and the suite that reads it: written to a shelf and a source folder by tests."""

import json
from pathlib import Path

ENV = '''
import json
from agentrl.env import Message, ToolCall
from agentrl.contrib.suites.suite import SuiteEnv, SuiteTask
from agentrl.env.official import OfficialRow
from agentrl.utils.errors import ConfigError
from agentrl.env import tool


class Sums(SuiteEnv):
    id = "toys/Sums-v0"
    summary = "add numbers"
    reward = "reward.json"
    suite = "sums"
    module = "sums_eval_of_no_package"
    obtain = "git clone sums"
    files = ("data/*.json",)

    def __init__(self, *, families=None, **base):
        super().__init__(**base)
        self.families, self.total = families, 0

    @classmethod
    def check_source(cls, folder):
        if not (folder / "data" / "tasks.json").is_file():
            raise ConfigError("data/tasks.json is missing")
        return (folder / "VERSION").read_text().strip()

    def load(self):
        for row in json.loads((self.source / "data" / "tasks.json").read_text()):
            if self.families is None or row["family"] in self.families:
                yield SuiteTask(row["id"], row["family"], {"terms": row["terms"]}, {"total": sum(row["terms"])}, row.get("split"))

    @classmethod
    def official(cls, episodes):
        rows = []
        for family in sorted({one.family for one in episodes}):
            known = [one.success for one in episodes if one.family == family and one.success is not None]
            value = 100 * sum(known) / len(known) if known else None
            rows.append(OfficialRow(family, value, len(known), 0.5))
        values = [row.value for row in rows if row.value is not None]
        return [*rows, OfficialRow("overall", sum(values) / len(values) if values else None, sum(row.n for row in rows))]

    def prompt(self, task):
        return [Message("user", "Add " + ", ".join(map(str, task.data["terms"])))]

    async def setup(self, task):
        self.total = 0

    @tool
    async def add(self, value: int) -> int:
        """Add a value to the total."""
        self.total += value
        return self.total

    def state(self):
        return {"total": self.total}

    def gold_turns(self, task):
        return [*(Message("assistant", tool_calls=(ToolCall("add", {"value": n}),)) for n in task.data["terms"]),
                Message("assistant", "Done.")]
'''

REWARD = {
    "agentrl_reward": 1,
    "name": "sums",
    "root": {
        "use": "state.match",
        "id": "success",
        "args": {"path": "/total", "expect": {"$": "/task/gold/total"}, "by": "hash"},
    },
}

FAMILIES = ("easy", "hard", "odd")


def write_source(folder: Path, *, splits: bool = False) -> Path:
    """The benchmark: two tasks a family; with `splits`, the families' own splits ("odd" is held out)."""
    rows = []
    for number, family in enumerate(FAMILIES):
        for inner in range(2):
            own = {"split": "heldout" if family == "odd" else "train"} if splits else {}
            rows.append({"id": f"{family}{inner}", "family": family, "terms": [inner + 2, number + 1][: number + 1], **own})
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "tasks.json").write_text(json.dumps(rows))
    (folder / "data" / "extra.json").write_text("{}")
    (folder / "VERSION").write_text("1.2\n")
    return folder


def write_suite(shelf: Path) -> Path:
    """The suite on a shelf."""
    folder = shelf / "envs" / "sums"
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(ENV)
    (folder / "reward.json").write_text(json.dumps(REWARD))
    return folder / "env.py"
