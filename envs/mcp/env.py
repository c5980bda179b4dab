"""Any Model Context Protocol server as an environment: its tools, and a file of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, cast, get_args

from agentrl.config.schema import McpServerConfig
from agentrl.contrib.mcp.client import McpSource
from agentrl.contrib.toolkit.taskdata import CALL_SCHEMA, TaskSet, load_tasks, tasks_path
from agentrl.data.trajectory import Blame, Json, StopReason
from agentrl.env import Message, Snapshot, Task, Tool, ToolCall, ToolEnv
from agentrl.env.spaces import run_sync
from agentrl.env.toolbox import as_text
from agentrl.utils.errors import ConfigError, EnvError, ToolError
from agentrl.utils.event_loop import within

HERE = Path(__file__).parent
SYSTEM = "Do what the user asks with the tools. End with a message that states the answer."
CALLS: dict[str, Json] = {"type": "array", "items": CALL_SCHEMA}
ROW: dict[str, Json] = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "split": {"type": "string"},
        "weight": {"type": "number", "exclusiveMinimum": 0},
        "level": {"type": "integer", "minimum": 1},
        "prompt": {"type": "string", "minLength": 1},
        "setup": CALLS,
        "gold": {
            "type": "object",
            "properties": {"answer": {"type": ["string", "number"]}, "calls": CALLS, "state": {}},
            "minProperties": 1,
            "additionalProperties": False,
        },
    },
    "required": ["prompt", "gold"],
    "additionalProperties": False,
}


class Mcp(ToolEnv):
    """Each episode has its own session; a fork is a new session after the same calls."""

    id = "agentrl/Mcp-v0"
    host_params = frozenset({"command", "url", "tasks", "variables"})
    reward = "mcp"
    summary = "use the tools of any MCP server, on tasks from a file"
    shared = frozenset({"tasks", "allowed", "state_tool", "system", "splits", "private", "_opened"})

    def __init__(
        self,
        *,
        command: Sequence[str] | None = None,
        url: str | None = None,
        tasks: str | None = None,
        level: int | Sequence[int] | None = None,
        tools: Sequence[str] | None = None,
        state_tool: str | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        late: str = "infrastructure",
        system: str = SYSTEM,
        **base: Any,
    ) -> None:
        """The server: the `command` that starts it (with environment `variables`), or its `url`; with neither,
        the packaged stock server, inside this process. `tasks`: JSONL, Parquet, or a folder (see the README).
        `level`: a number or [lowest, highest], only tasks of these levels. `tools`: those that the policy may use
        (default: all but `state_tool` and those of the tasks' `setup`). `state_tool`: its answer at the end of
        an episode is the final state. `timeout`: seconds for the start and each call. `late`: who is responsible for
        a call by the policy that times out, as in `McpServerConfig`. Raises ConfigError, TaskDataError, and
        DependencyError without the MCP SDK."""
        super().__init__(**base)
        own = command is not None or url is not None
        if own and tasks is None:
            raise ConfigError("mcp: your own server needs its own tasks: set tasks to a file or folder")
        self.state_tool = state_tool if own else state_tool or "dump"
        self.allowed = None if tools is None else tuple(tools)
        self.system = system
        self.tasks = _of_levels(_read(tasks_path(tasks, HERE / "tasks.jsonl")), level)
        self.splits = self.tasks.splits  # type: ignore[misc]  # the splits in the file
        self.private: dict[str, Tool] = {}
        self.final: Json = None
        if late not in get_args(Blame):
            raise ConfigError(f"mcp: late = {late!r}; expected {' or '.join(map(repr, get_args(Blame)))}")
        self.timeout = timeout
        blame = cast(Blame, late)
        # Only what an episode uses: a tool whose schema cannot be used does no harm to those that are not among them.
        setup = {call["name"] for rows in self.tasks.rows.values() for row in rows for call in row.data.get("setup", ())}
        used = None if tools is None else sorted({*tools, *setup, *([self.state_tool] if self.state_tool else [])})
        config = McpServerConfig(
            command=list(command or ()), url=url, env=dict(variables or {}), tools=used, timeout=timeout, late=blame
        )
        self.add_source(McpSource("server", config, None if own else _packaged))

    # -- tasks -------------------------------------------------------------------------------------

    def make_task(self, rng_seed: int, split: str) -> Task:
        return self.tasks.task(rng_seed, split)

    def task_count(self, split: str) -> int | None:
        return self.tasks.count(split)

    def prompt(self, task: Task) -> list[Message]:
        opening = [Message("system", self.system)] if self.system else []
        return [*opening, Message("user", task.data["prompt"])]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        self.final = None
        await self._prepare(task)

    async def _prepare(self, task: Task) -> None:
        """Hide the tools that are not for the policy, and bring the server to the task's initial state."""
        setup = task.data.get("setup", [])
        if self.allowed is None:
            hidden = {self.state_tool, *(call["name"] for call in setup)}
        else:
            hidden = set(self.toolbox.names) - set(self.allowed)
        wanted = [*(self.allowed or ()), *(call["name"] for call in setup), *([self.state_tool] if self.state_tool else [])]
        for name in wanted:
            if name not in self.toolbox:
                raise EnvError(f"{self.id}: the server has no tool {name!r}; it has {', '.join(self.toolbox.names)}")
        self.private = {item.name: item for item in self.toolbox if item.name in hidden}
        everything = {item.name: item for item in self.toolbox}
        for name in self.private:
            self.toolbox.remove(name)
        for call in setup:
            await self._own_call(everything[call["name"]], call["arguments"])

    async def _own_call(self, item: Tool, arguments: Mapping[str, Json]) -> str:
        """A call by the environment, not the policy: any failure is the environment's fault."""
        try:
            answer = await within(self.timeout, item.invoke(None, arguments), f"{self.id}: {item.name}")
            return as_text(item.name, answer)
        except ToolError as refusal:
            raise EnvError(f"{self.id}: the server refused {item.name}: {refusal}") from refusal
        except EnvError:
            raise
        except Exception as fault:  # the SDK's errors have no common base
            raise EnvError(f"{self.id}: {item.name} failed: {type(fault).__name__}: {fault}") from fault

    async def aclose(self) -> None:
        """As ToolEnv.aclose, after asking the server for the final state."""
        try:
            if self.is_open and self.state_tool and not self.trajectory.stop.infrastructure:
                item = self.private.get(self.state_tool) or self.toolbox[self.state_tool]
                self.final = _as_json(await self._own_call(item, {}))
        except EnvError as fault:
            record = self.trajectory
            record.stop, record.error = StopReason.ENV_ERROR, str(fault)
            record.terminated = record.truncated = False
            raise
        finally:
            await super().aclose()

    def state(self) -> Json:
        return self.final

    # -- forks: a server's state cannot be copied, but it can be reached again ---------------------------

    def fork(self) -> Self:
        """A copy on a new session, brought to the same state by the same calls. Raises EnvError if the server
        answers them differently, RuntimeError inside a running event loop."""
        forked = super().fork()
        forked._opened, forked.private = [], {}
        if forked.is_open:
            run_sync(forked._or_fail(forked._replay()))
        return forked

    def restore(self, snapshot: Snapshot) -> None:
        """As ToolEnv.restore, on a new session with the same calls; raises like `fork`."""
        opened, self._opened = self._opened, []
        for item in opened:
            run_sync(item.close())
        super().restore(snapshot)
        if self.is_open:
            run_sync(self._or_fail(self._replay()))

    async def _replay(self) -> None:
        record = self.trajectory
        self.toolbox.table = self._tools_before
        await self._open_sessions()
        await self._prepare(record.task)
        for turn in record.turns:
            answers = await self.toolbox.call_all(turn.message.tool_calls)
            for was, now in zip(turn.results, answers, strict=True):
                if was.content != now.content:
                    raise EnvError(
                        f"{self.id}: the server is not deterministic, so this episode cannot be forked: "
                        f"{was.name} said {was.content[:80]!r}, now {now.content[:80]!r}"
                    )

    # -- scripted policies -------------------------------------------------------------------------

    def gold_turns(self, task: Task) -> list[Message]:
        return list(gold_turns(self.id, task))


def gold_turns(env_id: str, task: Task) -> Iterator[Message]:
    """One turn per gold call, then the answer. Raises NotImplementedError for a task without gold calls."""
    if "calls" not in task.gold:
        raise NotImplementedError(f"{env_id}: task {task.id!r} has no gold calls")
    for call in task.gold["calls"]:
        yield Message("assistant", tool_calls=(ToolCall(call["name"], call["arguments"]),))
    yield Message("assistant", str(task.gold.get("answer", "Done.")))


def _packaged() -> Any:
    # Imported here, so that the file loads without the SDK and McpSource can say what is missing.
    from .server import build

    return build()


def _read(path: Path) -> TaskSet:
    """The tasks of a file or folder, read again only if it changed: a run builds many environments."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return _read_once(path, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=16)
def _read_once(path: Path, stamp: tuple[tuple[Path, int, int], ...]) -> TaskSet:
    return load_tasks(path, schema=ROW, to_task=_to_task)


def _to_task(row: Mapping[str, Json]) -> tuple[Mapping[str, Json], Mapping[str, Json]]:
    return {name: row[name] for name in ("prompt", "level", "setup") if name in row}, row["gold"]


def _of_levels(tasks: TaskSet, level: int | Sequence[int] | None) -> TaskSet:
    if level is None:
        return tasks
    low, high = (level, level) if isinstance(level, int) else (level[0], level[-1])
    rows = {split: [row for row in rows if low <= row.data.get("level", 0) <= high] for split, rows in tasks.rows.items()}
    if empty := [split for split, kept in rows.items() if not kept]:
        raise ConfigError(f"mcp: level = {level!r}: {tasks.name} has no such task in split {empty[0]!r}")
    return TaskSet(tasks.name, rows)


def _as_json(text: str) -> Json:
    try:
        return json.loads(text)
    except ValueError:
        return text
