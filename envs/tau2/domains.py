"""A domain of tau2-bench as its own modules give it: tasks, tools, databases, texts. Everything is read in place."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.contrib.suites.benchmarks import import_in_place, published_tool
from agentrl.contrib.suites.suite import SuiteTask
from agentrl.contrib.toolkit import branches as branch
from agentrl.env import Tool
from agentrl.utils.errors import ConfigError, ToolError
from agentrl.utils.parsing import module_of

NAMES = ("mock", "airline", "retail", "telecom")
SPLITS = {"train": "train", "test": "heldout"}
CHECKED = {
    "ENV_ASSERTION": "env_assertions", "ACTION": "actions", "COMMUNICATE": "communicate_info", "NL_ASSERTION": "nl_assertions",
}  # fmt: skip
"""Of each basis of a reward, what of the criteria it checks."""


@contextlib.contextmanager
def named_if_missing(suite: str) -> Iterator[None]:
    """Turn a benchmark's error about a missing file into a ConfigError with the file's name."""
    try:
        yield
    except FileNotFoundError as missing:
        raise ConfigError(f"{suite}: {missing.filename} is missing") from missing


@cache
def text_constant(file: Path, name: str) -> str:
    """The text that a module's source assigns to a name at its top level: the longest string in the assigned expression, with
    white space around it removed. Nothing is run. Raises ConfigError without one."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing")
    for node in module_of(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
            inside = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            texts = [text for text in inside if isinstance(text, str)]
            if texts:
                return max(texts, key=len).strip()
    raise ConfigError(f"{file} assigns no text to {name}: is it the version that this suite reads?")


def load_module(source: Path, name: str) -> ModuleType:
    """`tau2.NAME` of the checkout. Its log has every tool call, and is turned off."""
    with contextlib.suppress(ImportError):
        importlib.import_module("loguru").logger.disable("tau2")
    return import_in_place(f"tau2.{name}", source / "src" / "tau2", extra="tau2")


@dataclass(frozen=True, eq=False)
class Domain:
    """`module`: its `environment`; `types`: those of tasks; `pristine`: one environment, which no episode touches; both sides'
    tools."""

    module: ModuleType
    types: ModuleType
    call: Any
    pristine: Any
    tools: Mapping[str, Tool]
    user_tools: Mapping[str, Tool]

    def begin(self, start: Any) -> Any:
        """An environment at a task's start, with databases of its own."""
        users = {} if self.pristine.user_tools is None else {"user_db": branch.branch(self.pristine.user_tools.db)}
        world = self.module.get_environment(db=branch.branch(self.pristine.tools.db), **users)
        begun = self.types.InitialState.model_validate(start or {})
        world.set_state(begun.initialization_data, begun.initialization_actions, begun.message_history or [])
        return world

    def changes(self, world: Any) -> dict[str, dict[str, str] | None]:
        """What of both databases is not as it was before every start; equal if and only if their hashes are."""
        pairs = zip((world.tools, world.user_tools), (self.pristine.tools, self.pristine.user_tools), strict=True)
        agent, user = (None if now is None else branch.changed_texts(was.db, now.db) for now, was in pairs)
        return {"agent": agent, "user": user}


@cache
def domain(source: Path, name: str) -> Domain:
    """A domain, loaded once per process. Raises ConfigError for a file that is missing, and as `import_in_place`."""
    module, call = load_module(source, f"domains.{name}.environment"), load_module(source, "data_model.message").ToolCall
    with named_if_missing("tau2"):
        pristine = module.get_environment()
    plain = type(pristine).sync_tools is load_module(source, "environment.environment").Environment.sync_tools
    sides = {"assistant": pristine.get_tools(), "user": [] if pristine.user_tools is None else pristine.get_user_tools()}
    tools = {
        by: {one.name: _tool(one, call, by, plain and not pristine._is_mutating_tool(one.name)) for one in of}
        for by, of in sides.items()
    }
    return Domain(module, load_module(source, "data_model.tasks"), call, pristine, tools["assistant"], tools["user"])


def _tool(theirs: Any, make: Any, by: str, only_reads: bool) -> Tool:
    """Their tool; its errors are shown as theirs."""

    def call(self: Any, /, **arguments: Any) -> str:
        with branch.looking() if only_reads else contextlib.nullcontext():
            answer = self.world.get_response(make(name=theirs.name, arguments=arguments, requestor=by))
        if answer.error:
            raise ToolError(answer.content)
        self.limited()
        return str(answer.content)

    return published_tool(theirs.openai_schema["function"], call, inline=True, max_output=1_000_000, read_only=only_reads, by=by)


def load_tasks(source: Path, name: str, full: bool) -> Iterator[SuiteTask]:
    """The tasks of a domain; those of its `base` set, or with `full` all of them, of which the others are the split "rest".
    Raises ConfigError for a file that is missing."""
    here = domain(source, name)
    with named_if_missing("tau2"):
        tasks, splits = here.module.get_tasks(None), here.module.get_tasks_split()
    own = {task: ours for theirs, ours in SPLITS.items() for task in splits.get(theirs, ())}
    base = set(splits["base"])
    for task in tasks:
        if task.id in base or full:
            kind = task.id[1:].partition("]")[0] if task.id.startswith("[") else ""
            # Without defaults, among which are messages' times: the same task in each process.
            start = task.initial_state.model_dump(mode="json", exclude_unset=True) if task.initial_state is not None else None
            data = {"domain": name, "scenario": str(task.user_scenario), "start": start}
            split = own.get(task.id) if task.id in base else "rest"
            yield SuiteTask(f"{name}/{task.id}", f"{name}/{kind}" if kind else name, data, _gold(here, task, start), split)


def _gold(here: Domain, task: Any, start: Any) -> dict[str, Any]:
    """The criteria by the leaf of the spec that reads them; `checks`: those that decide this task and have something to check."""
    found = {} if task.evaluation_criteria is None else task.evaluation_criteria.model_dump(mode="json")
    basis = set(found.get("reward_basis") or ())
    if found.get("actions") is None and found.get("env_assertions") is None:
        basis -= {"DB", "ENV_ASSERTION"}
    basis -= {name for name, key in CHECKED.items() if not found.get(key)}
    calls = []
    for one in found.get("actions") or []:
        some = {} if one["compare_args"] is None else {"compare": one["compare_args"]}
        calls.append({"name": one["name"], "arguments": one["arguments"], "by": one["requestor"], **some})
    say, assertions, outcomes = (found.get(key) or [] for key in ("communicate_info", "env_assertions", "nl_assertions"))
    writes = list(_writes(here, start, calls)) if "DB" in basis else []
    return {
        "calls": calls, "writes": writes, "say": say, "assertions": assertions, "outcomes": outcomes, "checks": sorted(basis),
    }  # fmt: skip


def _writes(here: Domain, start: Any, calls: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The gold calls that decide the databases: no calls that only read, and none that the tool refuses without a trace. Gold
    calls of both kinds fail (a wrong address, a card without enough on it), and tau2 passes over those."""
    world = here.begin(start)
    for call in (call for call in calls if here.pristine._is_mutating_tool(call["name"])):
        before = here.changes(world)
        made = here.call(name=call["name"], arguments=copy.deepcopy(call["arguments"]), requestor=call["by"])
        if not world.get_response(made).error or here.changes(world) != before:
            yield call
