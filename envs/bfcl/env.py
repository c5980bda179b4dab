"""The Berkeley function-calling leaderboard (BFCL v4) as an environment, over the user's own copy of its package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from agentrl.contrib.suites.benchmarks import calling, groups, message_of
from agentrl.contrib.suites.suite import SuiteEnv, SuiteTask
from agentrl.contrib.toolkit.bfcl_calls import possible_call
from agentrl.data.trajectory import Json
from agentrl.env import Message, Problem, Task, ToolCall
from agentrl.env.official import WHOLE, OfficialRow, Played
from agentrl.utils.errors import ConfigError

from .calls import answer_of, public_state, round_turns
from .formats import as_json, as_python, as_verbose_xml, as_xml
from .official import MeansTable, spread_rows
from .package import CLASSES, Package, split_by_functions
from .tools import api_tools, method_tools, recorded

TABLE = MeansTable(
    means={
        "simple": ("simple_python", "simple_java", "simple_javascript"),
        "non-live": ("simple", "multiple", "parallel", "parallel_multiple"),
        "live": ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
        "hallucination": ("irrelevance", "live_irrelevance"),
        "multi-turn": ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"),
        "web search": ("web_search_base", "web_search_no_snippet"),
        "memory": ("memory_kv", "memory_vector", "memory_rec_sum"),
        "agentic": ("web search", "memory"),
    },
    weights={"non-live": 0.1, "live": 0.1, "hallucination": 0.1, "multi-turn": 0.3, "agentic": 0.4},
    over_tasks={"live": {"live_simple": 258, "live_multiple": 1053, "live_parallel": 16, "live_parallel_multiple": 24}},
)
FORMATS = {"python": as_python, "json": as_json, "verbose_xml": as_verbose_xml, "concise_xml": as_xml}


class Bfcl(SuiteEnv):
    """Single-turn categories record the calls of one turn; multi-turn and memory run them on the leaderboard's own classes."""

    id = "agentrl/Bfcl-v0"
    reward = "bfcl"
    summary = "BFCL v4: function calls in one turn, in many, and with a memory (your own copy of the package)"
    suite = "bfcl"
    module = "bfcl_eval"
    obtain = "pip install --no-deps bfcl-eval filelock mpmath (memory: overrides rank_bm25)"
    files = ("utils.py", "constants/*.py", "data/**/*.json", "eval_checker/multi_turn_eval/func_source_code/*.py")
    required = ("utils.py", "constants/category_mapping.py", "data/possible_answer", "data/multi_turn_func_doc",
             CLASSES.replace(".", "/"))  # fmt: skip
    max_output = 1_000_000
    scripted = True
    beside = frozenset({"memory"})
    kind = "category"

    def __init__(
        self,
        *,
        category: str | Sequence[str] = ("single_turn", "multi_turn"),
        memory: str | None = None,
        holdout: Literal["families", "tasks"] = "families",
        **base: Any,
    ) -> None:
        """`category`: categories or groups of the leaderboard ("multi_turn", "live", "memory_kv", "simple_java", ...).
        `memory`: the folder in which `memory_*_prereq` leaves what it remembered and `memory_*` finds it (a result folder of the
        leaderboard's own program has the same form); without one every memory begins empty.
        `holdout`: hold out whole families, or inside each category tasks that share no function and no prompt with training.

        Raises ConfigError for an unknown category, and for one that needs the network."""
        super().__init__(**base)
        self.package = Package(self.source)
        self.categories = self.package.chosen([category] if isinstance(category, str) else category)
        self.memory = None if memory is None else Path(memory).expanduser()
        if self.memory is None and any(name.endswith("_prereq") for name in self.categories):
            raise ConfigError(
                "bfcl: categories memory_*_prereq need params.memory, the folder in which to leave what they remember"
            )
        self.holdout = holdout
        self.apis: dict[str, Any] = {}
        self.methods: dict[str, str] = {}
        self.round = self.steps = 0
        self.fresh = False
        self.made: Json = None

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """The leaderboard's table; format sensitivity, which is in none of its means, as how far the formats are apart."""
        found = groups(episodes, lambda one: [one.data["category"]])
        styles = found.pop("format_sensitivity", [])
        return [*TABLE.rows(found), *spread_rows("format sensitivity", styles, lambda one: [one.data["style"]])]

    # -- tasks -------------------------------------------------------------------------------------

    @property
    def idle_share(self) -> float:  # type: ignore[override]
        """The share of the categories of irrelevance, where no call is right."""
        rows = self._rows(WHOLE)
        return len([row for row in rows if row.data["scoring"] == "none"]) / len(rows)

    def load(self) -> Iterable[SuiteTask]:
        tasks = [task for category in self.categories for task in self.package.tasks(category)]
        return tasks if self.holdout == "families" else split_by_functions(tasks, super().whole())

    def whole(self) -> Sequence[SuiteTask]:
        tasks = super().whole()
        return tasks if self.holdout == "families" else split_by_functions(tasks, tasks)

    def prompt(self, task: Task) -> list[Message]:
        return [message_of(item) for item in self.package.opening(task, self.apis)]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.round = self.steps = 0
        self.made, self.toolbox.unlisted = None, {}
        if "classes" not in task.data:
            for function in () if task.data["style"] else task.data["shown"]:
                self.toolbox.add(recorded(self.package, function))
            return self.finish()  # the first turn is the last one
        classes, later = tuple(task.data["classes"]), {name for names in task.data["later"].values() for name in names}
        self.apis, self.methods = self.package.instances(task.id, task.data, self.memory), self.package.methods(classes)
        self.toolbox.offer({name: tool for name, tool in api_tools(self.package, classes).items() if name not in later})
        self.toolbox.unlisted = method_tools(self.package, classes)
        return None

    async def user_reply(self, message: Message) -> list[Message] | None:
        self.round, self.steps = self.round + 1, 0
        rounds = self.task.data["question"]
        if "classes" not in self.task.data:
            self.made = self.package.written(self.task.data, message.content)
        if self.round >= len(rounds):
            return None
        if arrived := self.task.data["later"].get(str(self.round)):
            offered = api_tools(self.package, tuple(self.task.data["classes"]))
            self.toolbox.table = {**self.toolbox.table, **{name: offered[name] for name in arrived}}
        return [message_of(item) for item in rounds[self.round]] or [
            Message("user", self.package.texts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)
        ]

    async def astep(self, action: Any) -> Any:
        self.fresh = True
        return await super().astep(action)

    def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """What the leaderboard answers to a call. The turn after too many in a round is the episode's last."""
        if self.fresh:
            self.fresh, self.steps = False, self.steps + 1
            if not self.replays and self.steps > self.package.texts.MAXIMUM_STEP_LIMIT:
                self.round += 1  # if it was the last one, the episode is judged all the same
                self.finish()
        return answer_of(self.apis.get(self.methods.get(name, "")), name, arguments)

    def error_text(self, call: ToolCall, problem: Problem) -> str:
        if problem.kind == "unknown_tool" and "classes" in self.task.data:
            return answer_of(None, call.name, {})
        return super().error_text(call, problem)

    async def conclude(self) -> None:
        if self.task.data["category"].endswith("_prereq"):
            next(iter(self.apis.values()))._flush_memory_to_local_file()

    def state(self) -> Json:
        """The public attributes of each class, and how many rounds of the user are left."""
        if "classes" not in self.task.data:
            return {"left": 0, "calls": self.made}
        apis = {name: public_state(api) for name, api in self.apis.items()} if self.task.data["scoring"] == "rounds" else {}
        return {"left": max(len(self.task.data["question"]) - self.round, 0), "apis": apis}

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        scoring, gold = task.data["scoring"], task.gold
        if scoring == "rounds":
            return round_turns(gold["rounds"])
        if scoring in ("ast", "text"):
            declared = {function["name"]: function["parameters"] for function in task.data["functions"]}
            calls = [possible_call(call, declared, task.data["language"]) for call in gold["calls"]]
            return [calling(calls) if scoring == "ast" else Message("assistant", spoken(calls, task.data["style"]))]
        if scoring == "some":
            return [calling([(task.data["functions"][0]["name"], {})])]
        said = "no function fits" if scoring == "none" else gold["answers"][0]
        return [Message("assistant", said) for _ in task.data["question"]]


def spoken(calls: Sequence[tuple[str, Mapping[str, Json]]], style: str) -> str:
    """An answer that makes the calls in a format (`ret_fmt=json&tool_call_tag=True&...`)."""
    asked = {key: values[0] for key, values in parse_qs(style).items()}
    text = FORMATS[asked["ret_fmt"]](calls)
    return f"<TOOLCALL>{text}</TOOLCALL>" if asked["tool_call_tag"] == "True" else text
