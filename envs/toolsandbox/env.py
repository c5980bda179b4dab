"""ToolSandbox: stateful, conversational tool use on a phone's databases, judged by the milestones of its scenarios."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentrl.contrib.suites.benchmarks import calling, groups, mean_row, message_of, published_tool
from agentrl.contrib.suites.foreign import ForeignSuite
from agentrl.contrib.suites.suite import SuiteTask, within
from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Json
from agentrl.env import Message, Task, Tool, ToolCall
from agentrl.env.official import OfficialRow, Played
from agentrl.env.users import ScriptedUser, UserModel
from agentrl.utils.errors import ToolError

from .together import CallsTogether

log = logging.getLogger(__name__)

FATAL = frozenset({"unknown_tool", "malformed_call"})
SCRAMBLED = frozenset(
    f"{what}_SCRAMBLED" for what in ("TOOL_NAME", "TOOL_DESCRIPTION", "ARG_DESCRIPTION", "ARG_TYPE", "ARG_NAME")
)


class ToolSandbox(ForeignSuite):
    """An episode is ToolSandbox's own execution context, as bytes; each turn is played by its code, in its own Python."""

    id = "agentrl/ToolSandbox-v0"
    host_params = ForeignSuite.host_params | {"user_options"}
    reward = "toolsandbox"
    summary = "Apple's ToolSandbox: stateful tools, a user, milestones and minefields; read from your checkout"
    suite = "toolsandbox"
    obtain = "git clone https://github.com/apple/ToolSandbox"
    files = ("tool_sandbox/**/*.py",)
    required = ("tool_sandbox/common/evaluation.py", "tool_sandbox/scenarios/__init__.py", "tool_sandbox/tools/__init__.py")
    beside = ForeignSuite.beside | {"user", "user_options", "now", "parallel"}
    shared = ForeignSuite.shared | {"user_model", "user_options", "parallel", "network"}
    script = Path(__file__).with_name("inside.py")
    # In 208 of the 808 scenarios that need no network (those of INSUFFICIENT_INFORMATION without a milestone) silence is right.
    idle_share = 0.3

    def __init__(
        self,
        *,
        user: str = "scripted",
        user_options: Mapping[str, Any] | None = None,
        network: bool = False,
        now: str = "2025-06-11T10:00:00",
        parallel: int = 4,
        **base: Any,
    ) -> None:
        """`user`: "scripted" (says to go on, and leaves after as many texts as the milestones want) or a model's name for
        litellm, which plays the user by ToolSandbox's own instruction; `user_options` go to litellm. `network`: also the
        scenarios that cannot be solved without RapidAPI's services. `now`: when every episode begins, in UTC, or "machine" for
        the machine's clock (then an episode cannot be repeated). `parallel` (1..5): calls in one turn, which ToolSandbox makes
        in every order; more are refused.

        Raises ConfigError for a number outside its range, and if ToolSandbox cannot be loaded by that interpreter."""
        self.user_model, self.user_options, self.network, self.now = user, dict(user_options or {}), network, now
        self.parallel = within(parallel, 1, 5, "toolsandbox: parallel")
        super().__init__(**base)
        self.context, self.calls = "", CallsTogether(())
        self.verdict: dict[str, Json] | None = None

    def arguments(self) -> tuple[str, ...]:
        return (str(self.source), self.now)

    # -- tasks -------------------------------------------------------------------------------------

    def load(self) -> Iterable[SuiteTask]:
        rows = self.first("catalog")
        offline = [row for row in rows if self.network or not row["network"]]
        if left := len(rows) - len(offline):
            log.warning("toolsandbox: %d of %d scenarios need RapidAPI and are left out (params.network = true)", left, len(rows))
        for row in offline:
            yield SuiteTask(f"toolsandbox/{row['name']}", row["family"], {**row, "suite": self.suite}, {})

    def prompt(self, task: Task) -> list[Message]:
        return [message_of(item) for item in task.data["messages"]]

    # -- the episode -------------------------------------------------------------------------------

    async def setup(self, task: Task) -> None:
        declared = (await self._ask("start"))["tools"]
        offered = {one["function"]["name"]: _offered(json.dumps(one)) for one in declared}
        self.verdict, self.calls = None, CallsTogether(offered)
        self.toolbox.offer(offered)
        self.user = self.gold_user(task) if self.user_model == "scripted" else TheirUser(self)

    def user_models(self) -> Sequence[UserModel]:
        return () if self.user_model == "scripted" else (UserModel(self.user_model, self.user_options),)

    async def _ask(self, function: str, **values: Json) -> dict[str, Any]:
        """What ToolSandbox does next; it may end the episode (`end_conversation`, its most messages)."""
        held = {} if function == "start" else {"context": self.context}
        done: dict[str, Any] = await self.inside.call(function, name=self.task.data["name"], **held, **values)
        self.context = done.get("context", self.context)
        if done.get("over"):
            self.finish()
        return done

    async def answers(self, made: Sequence[ToolCall]) -> list[str]:
        """What ToolSandbox answers to the calls of a turn, all at once: if they fail in any order, they fail."""
        if self._stopped() or len(made) > self.parallel:
            raise ToolError(self._stopped() or f"{len(made)} calls in one turn; at most {self.parallel} can be made")
        asked = [{"name": one.name, "arguments": one.arguments} for one in made]
        return [answer["content"] for answer in (await self._ask("calls", calls=asked))["answers"]]

    async def user_reply(self, message: Message) -> list[Message] | None:
        if self._stopped() or (await self._ask("say", text=message.content, by="agent"))["over"]:
            return None
        text = await self.ask_user()
        if text is None:
            await self._ask("leave")
            return None
        return None if (await self._ask("say", text=text, by="user"))["over"] else [Message("user", text)]

    def _stopped(self) -> str:
        """Why ToolSandbox would have stopped the scenario with an exception and a similarity of 0, or ""."""
        errors = [result for turn in self.trajectory.turns for result in turn.results if result.error in FATAL]
        if errors:
            self.finish()
        return f"{errors[0].error} {errors[0].name!r}" if errors else ""

    async def conclude(self) -> None:
        self.verdict = await self._ask("verdict")
        if stopped := self._stopped():
            self.verdict = {**self.verdict, "similarity": 0.0, "least": 0.0, "stopped": stopped}

    def state(self) -> Json:
        return {"verdict": self.verdict}

    # -- scripted policies, official metrics -------------------------------------------------------

    def gold_user(self, task: Task) -> ScriptedUser:
        return ScriptedUser(["OK, go on."] * (task.data["says"] - 1))

    def gold_turns(self, task: Task) -> list[Message]:
        turns = self.inside.ask("gold", name=task.data["name"])
        if turns is None:
            raise NotImplementedError(f"{task.id}: its milestones do not determine turns with full similarity")
        return [Message("assistant", turn) if isinstance(turn, str) else calling([turn]) for turn in turns]

    @classmethod
    def official(cls, episodes: Sequence[Played]) -> Sequence[OfficialRow]:
        """ToolSandbox's own table: the mean similarity by category, over all categories that a scenario has. A scrambled one,
        which is built on THREE_DISTRACTION_TOOLS, does not count for that."""
        found = groups(episodes, lambda one: [*_counted(one.data["categories"]), "ALL_CATEGORIES"])
        return [mean_row(name, played, value=lambda one: one.value) for name, played in sorted(found.items())]


def _counted(categories: Sequence[str]) -> list[str]:
    scrambled = bool(SCRAMBLED & set(categories))
    return [name for name in categories if not (scrambled and name == "THREE_DISTRACTION_TOOLS")]


class TheirUser(ModelUser):
    """The user that ToolSandbox simulates: its instruction, its examples, and its tool to end the conversation."""

    def __init__(self, env: ToolSandbox) -> None:
        super().__init__(model=env.user_model, system="", stop=(), **env.user_options)  # `shown` has theirs
        self.env = env

    async def shown(self, conversation: Sequence[Message]) -> list[dict[str, Any]]:
        view: Any = await self.env.inside.call("user_view", context=self.env.context)
        self.tools = view["tools"]
        return list(view["messages"])

    def leaves(self, said: Message) -> bool:
        return bool(said.tool_calls)


@lru_cache(maxsize=4096)
def _offered(declared: str) -> Tool:
    """A tool as ToolSandbox shows it."""
    body = json.loads(declared)["function"]

    async def run(env: ToolSandbox, /, **arguments: Json) -> str:
        return await env.calls.answer(env, body["name"], arguments, env.answers)

    return published_tool(body, run, timeout=600.0, max_output=100_000, on_error="stop")
