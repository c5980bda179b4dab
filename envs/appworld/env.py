"""AppWorld: code that calls the apps of a simulated person, judged by the task's own tests on the apps' databases."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.contrib.suites.benchmarks import calling, groups, mean_row
from agentrl.contrib.suites.foreign import ForeignSuite, HeldWorld
from agentrl.contrib.suites.suite import SuiteTask
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, tool
from agentrl.env.official import OfficialRow, Played

from .rows import in_percent, whole_row

SPLITS = {"train": "train", "dev": "heldout", "test_normal": "test_normal", "test_challenge": "test_challenge"}
VARIANTS = 3  # tasks of a scenario
SYSTEM = """You do tasks for {first_name} {last_name} ({email}, {phone_number}) by writing Python code, which runs in a shell \
that keeps its variables. Apps are called as apis.APP.API(...). Read before you call: \
print(apis.api_docs.show_app_descriptions()), print(apis.api_docs.show_api_descriptions(app_name='...')), \
print(apis.api_docs.show_api_doc(app_name='...', api_name='...')). Passwords, addresses and cards of your supervisor are in \
apis.supervisor. Nobody answers questions. You see only what is printed. When the task is done, call \
apis.supervisor.complete_task(), with answer=... if the task asks for one. It is {datetime}."""


class AppWorld(ForeignSuite):
    """An episode is a world in a process of AppWorld's own Python; its one tool runs code in it."""

    id = "agentrl/AppWorld-v0"
    reward = "appworld"
    summary = "AppWorld: a person's apps called by code, judged by the tests of each task; read from your installation"
    suite = "appworld"
    obtain = "pip install appworld; appworld install; appworld download data"
    files = ("data/datasets/*.txt", "data/tasks/*/specs.json", "data/tasks/*/ground_truth/*", "data/tasks/*/dbs/*")
    splits = ("train", "heldout", "test_normal", "test_challenge")
    required = ("data/datasets/train.txt", "data/tasks", "data/base_dbs")
    script = Path(__file__).with_name("inside.py")
    world: HeldWorld | None = None
    verdict: dict[str, Json] | None = None

    @classmethod
    def check_source(cls, folder: Path) -> str:
        super().check_source(folder)
        specs = next(iter(sorted((folder / "data" / "tasks").glob("*/specs.json"))), None)
        return f"AppWorld data {'of no task' if specs is None else json.loads(specs.read_text())['db_version']}"

    # -- tasks -------------------------------------------------------------------------------------

    def load(self) -> Iterable[SuiteTask]:
        for dataset, split in SPLITS.items():
            listed = self.source / "data" / "datasets" / f"{dataset}.txt"
            for line in listed.read_text().split("\n") if listed.is_file() else ():
                if name := line.split(":")[0].strip():  # what is behind the colon is a tag
                    yield self._read_task(name, dataset, split)

    def _read_task(self, name: str, dataset: str, split: str) -> SuiteTask:
        folder = self.source / "data" / "tasks" / name
        about = json.loads((folder / "specs.json").read_text())
        truth = folder / "ground_truth" / "metadata.json"
        difficulty = json.loads(truth.read_text())["difficulty"] if truth.is_file() else None
        person = about.get("supervisor") or about["main_user"]
        data = {"name": name, "dataset": dataset, "difficulty": difficulty, "instruction": about["instruction"]}
        return SuiteTask(
            f"appworld/{name}", name.rpartition("_")[0], {**data, "supervisor": person, "datetime": about["datetime"]}, {}, split
        )

    def prompt(self, task: Task) -> list[Message]:
        system = SYSTEM.format(**task.data["supervisor"], datetime=task.data["datetime"])
        return [Message("system", system), Message("user", task.data["instruction"])]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.verdict, self.world = None, HeldWorld(self.inside, ("start", {"task": task.data["name"]}))
        await self.world.start()

    async def teardown(self) -> None:
        if self.world is not None:
            self.world.end()

    @property
    def queued(self) -> str:
        return "a process for its world (params.processes)" if self.world is not None and self.world.waits else ""

    @tool(timeout=600, parallel=False, max_output=8192)
    async def execute(self, code: str) -> str:
        """Run Python code in the shell; returns what it prints, or its error.

        Args:
            code: Python
        """
        assert self.world is not None
        done = await self.world.act("execute", code=code)
        if done["completed"]:
            self.finish()
        return str(done["output"])

    async def conclude(self) -> None:
        assert self.world is not None
        found = await self.world.ask("evaluate")
        names = {kind: [one["requirement"] for one in found[kind]] for kind in ("passes", "failures")}
        self.verdict = {"success": found["success"], "tests": found["num_tests"], **names}
        self.verdict["share"] = len(names["passes"]) / found["num_tests"] if found["num_tests"] else 0.0

    def state(self) -> Json:
        return {"verdict": self.verdict}

    # -- scripted policies, official metrics -------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        file = self.source / "data" / "tasks" / task.data["name"] / "ground_truth" / "compiled_solution.py"
        if not file.is_file():
            raise NotImplementedError(f"{task.id}: the solution is not in its data (AppWorld publishes those of train and dev)")
        return [calling([("execute", {"code": f"{file.read_text()}\nsolution(apis, requester)"})])]

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """AppWorld's own table, in percent: task goal completion (TGC, the share of tasks that pass all their tests) and scenario
        goal completion (SGC, the share of scenarios, three variants of one task, of which all do) by dataset and difficulty."""
        rows: list[OfficialRow] = []
        for dataset, played in sorted(groups(episodes, lambda one: [one.data["dataset"]]).items()):
            levels = groups(played, lambda one: [str(one.data["difficulty"])] * (one.data["difficulty"] is not None))
            parts = {dataset: played, **{f"{dataset}, level {level}": part for level, part in sorted(levels.items())}}
            for name, part in parts.items():
                rows += [in_percent(mean_row(f"TGC {name}", part)), in_percent(whole_row(f"SGC {name}", part, VARIANTS))]
        return rows
