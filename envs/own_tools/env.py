"""Tasks that bring their own tools: each row of a file declares those of its episode, and how they answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.contrib.toolkit.chat_forms import declaration
from agentrl.contrib.toolkit.taskdata import TaskSet, load_tasks, tasks_path
from agentrl.data.trajectory import Json
from agentrl.env import Message, Options, Task, Tool, ToolCall, ToolEnv
from agentrl.reward.values import same
from agentrl.utils.errors import ConfigError, ToolError
from agentrl.utils.search_path import function_named

from .rows import ROW, ToolUse, check_task, messages, settled

HERE = Path(__file__).parent
SYSTEM = "Do what the user asks with the tools. End with a message that states the answer."


class OwnTools(ToolEnv):
    """The tools of an episode are those of its task: declared in the row and answered by a function of the run's or by what was
    recorded, or chosen by name among the run's own (`[tools]`: sets, MCP servers)."""

    id = "agentrl/OwnTools-v0"
    host_params = frozenset({"tasks", "functions"})
    reward = "own_tools"
    summary = "tasks from a file that bring their own tools, answered by your functions, an MCP server or recorded answers"
    shared = frozenset({"tasks", "uses", "functions", "targets", "system", "splits"})

    def __init__(
        self,
        *,
        tasks: str | None = None,
        functions: Mapping[str, str] | None = None,
        system: str = SYSTEM,
        **base: Any,
    ) -> None:
        """`tasks`: JSONL, Parquet, or a folder (see the README; default: the packaged ones). `functions`: a tool's name ->
        "module:function", which gets the arguments by name, and the Task if it has a parameter `task`; a row cannot name a
        function. `system`: the first message, unless a row has `messages`. Raises ConfigError, TaskDataError."""
        super().__init__(**base)
        self.targets = dict(functions or {})
        for name, target in self.targets.items():
            if not isinstance(target, str):
                raise ConfigError(f"own_tools: functions.{name} = {target!r}; expected 'module:function'")
        made = {name: function_named(f"env.params.functions.{name}", target) for name, target in self.targets.items()}
        for name, one in made.items():
            if isinstance(one, Tool) and one.options != Options():
                raise ConfigError(f"own_tools: functions.{name}: options of @tool have no effect here. Leave them out")
        self.functions = {name: one.function if isinstance(one, Tool) else one for name, one in made.items()}  # with @tool
        self.system = system
        self.tasks, self.uses = _read(tasks_path(tasks, HERE / "tasks.jsonl"), frozenset(self.functions))
        self.uses.check_functions(self.functions)
        self.splits = self.tasks.splits  # type: ignore[misc]  # the splits in the file
        self.made: list[dict[str, Json]] = []

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        return self.tasks.task(rng_seed, split)

    def task_count(self, split: str) -> int | None:
        return self.tasks.count(split)

    def prompt(self, task: Task) -> list[Message]:
        if "messages" in task.data:
            return messages(task.data["messages"])
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, Message("user", task.data["prompt"])]

    # -- the episode -------------------------------------------------------------------------------

    def hidden(self, task: Task) -> Mapping[str, Any]:
        return {"task": task}

    async def setup(self, task: Task) -> None:
        self.made = []
        known, offered = self.toolbox.table, dict[str, Tool]()
        # Of all rows, before the first episode: the run's tools are known only now, and the row at fault may come up late.
        self.uses.check(known)
        if "tools" not in task.data:
            return  # all of the run's
        for entry in task.data["tools"]:
            if isinstance(entry, str):
                offered[entry] = known[entry]
                continue
            whole = declaration(entry, "tools")
            name = whole["function"]["name"]
            offered[name] = _tool(json.dumps(whole), self.functions.get(name))
        self.toolbox.table = offered

    def state(self) -> Json:
        return {"made": list(self.made)}

    def recorded(self, name: str, arguments: dict[str, Json]) -> str:
        """The recorded answer to a call: the n-th for the n-th such call, then the last again. Raises ToolError if there is none
        or it is an error."""
        call = {"name": name, "arguments": arguments}
        before = sum(same(one, call) for one in self.made)
        self.made.append(call)
        found = [item for item in self.task.data["answers"] if item["name"] == name and same(item["arguments"], arguments)]
        if not found:
            raise ToolError("there is no answer for these arguments")
        answer = found[min(before, len(found) - 1)]
        if answer.get("error"):
            raise ToolError(answer["content"])
        return str(answer["content"])

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        calls = [Message("assistant", tool_calls=(ToolCall(c["name"], c["arguments"]),)) for c in task.gold.get("calls", ())]
        return [*calls, Message("assistant", str(task.gold.get("answer", "Done.")))]


@lru_cache(maxsize=4096)
def _tool(text: str, function: Callable[..., Any] | None) -> Tool:
    """The tool of a declaration; many tasks have the same. Without a function its episode's recorded answers are its own."""
    whole = json.loads(text)
    name, parameters = whole["function"]["name"], whole["function"]["parameters"]
    if function is not None:
        wants = "task" in inspect.signature(function).parameters and "task" not in parameters.get("properties", {})
        return Tool.from_declaration(whole, function, hidden=("task",) if wants else ())

    async def answer(env: OwnTools, /, **arguments: Json) -> str:
        return env.recorded(name, arguments)

    return replace(Tool.from_declaration(whole, answer, Options(parallel=False)), method=True)


def _read(path: Path, functions: frozenset[str]) -> tuple[TaskSet, ToolUse]:
    """The tasks of a file or folder, read again only if it changed: a run builds many environments."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return _read_once(path, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files), functions)


@lru_cache(maxsize=16)
def _read_once(path: Path, stamp: tuple[tuple[Path, int, int], ...], functions: frozenset[str]) -> tuple[TaskSet, ToolUse]:
    def to_task(row: Mapping[str, Json]) -> tuple[Mapping[str, Json], Mapping[str, Json]]:
        return {key: row[key] for key in ("prompt", "messages", "tools", "answers") if key in row}, row["gold"]

    tasks = load_tasks(path, schema=ROW, to_task=to_task, settle=settled)
    for rows in tasks.rows.values():
        for row in rows:
            check_task(row.where, row.data, row.gold, functions)
    return tasks, ToolUse.of(row for rows in tasks.rows.values() for row in rows)
