"""Describe the task to an agent, sanitize its texts, order its tool calls, and record its episode."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from agentrl.contrib.agents.session import AgentSession
from agentrl.data.trajectory import Json, Message, ToolCall, ToolResult, Turn
from agentrl.env import ToolEnv
from agentrl.env.call_options import Problem
from agentrl.env.toolbox import to_text
from agentrl.env.users import record_result

MODEL = "policy"
"""Name of the model; any other name is accepted too."""
VARIABLES = {
    "OPENAI_BASE_URL": "openai_base_url", "OPENAI_API_KEY": "api_key", "ANTHROPIC_BASE_URL": "anthropic_base_url",
    "ANTHROPIC_API_KEY": "api_key", "AGENTRL_MODEL": "model", "AGENTRL_PROMPT": "prompt", "AGENTRL_MCP_URL": "mcp_url",
    "AGENTRL_USER_URL": "user_url",
}  # fmt: skip
"""Environment variables of a command, with their attributes of `Episode`."""


class ServedEpisode(Protocol):
    """An episode's services for its agent."""

    def schemas(self) -> list[dict[str, Json]]: ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...

    async def say(self, text: str) -> list[str] | None: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode for its agent, also the argument of one that is an async function: the task, the addresses of model, tools and
    user, and the environment's tools and user themselves (`call`, `say`).

    `messages`: the environment's opening messages in OpenAI's form. `tools`: its function schemas; empty for an agent with its
    own tools. `mcp_url`: its MCP server, or None; `user_url`: address of its user, or None if the agent cannot talk to one.
    """

    name: str
    messages: list[dict[str, Json]]
    tools: Sequence[Mapping[str, Json]]
    openai_base_url: str
    anthropic_base_url: str
    served: ServedEpisode = field(repr=False)
    api_key: str = field(repr=False)
    mcp_url: str | None = field(default=None, repr=False)
    user_url: str | None = field(default=None, repr=False)
    model: ClassVar[str] = MODEL

    @property
    def prompt(self) -> str:
        """The user's request: text of the last opening message."""
        return self.messages[-1]["content"] if self.messages else ""

    @property
    def task(self) -> dict[str, Json]:
        """The task as JSON."""
        return {"episode": self.name, "prompt": self.prompt, "messages": self.messages, "tools": list(self.tools)}

    def to_json(self) -> dict[str, Json]:
        """Return everything, for an agent behind a URL."""
        names = ("model", "openai_base_url", "anthropic_base_url", "api_key", "mcp_url", "user_url")
        return {**self.task, **{name: getattr(self, name) for name in names}}

    def variables(self) -> dict[str, str]:
        """Return everything as environment variables; `AGENTRL_TASK` is the whole task."""
        found = {name: value for name, attribute in VARIABLES.items() if (value := getattr(self, attribute)) is not None}
        return {**found, "AGENTRL_TASK": json.dumps(self.task, ensure_ascii=False)}

    async def call(self, name: str, arguments: Mapping[str, Json]) -> str:
        """Call a tool of the environment; returns its answer or error text."""
        return (await self.served.call(name, arguments)).content

    async def say(self, text: str) -> list[str] | None:
        """Send a message to the environment's user; returns the replies, or None if the conversation is over."""
        return await self.served.say(text)


@dataclass(slots=True)
class Outcome:
    """End of an agent's program. `output`: its answer, or None; `failure`: the reason why it failed, or None."""

    output: str | None = None
    failure: str | None = None


MASK = "[key]"


def text_of(value: str, key: str | None = None) -> str:
    """Replace `key`, if given, by `MASK`, and lone surrogates by U+FFFD."""
    return to_text(value.replace(key, MASK) if key else value)


class Gate:
    """A readers-writer lock in order of arrival: calls of parallel tools share it, other calls hold it alone."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def hold(self, shared: bool) -> AsyncIterator[None]:
        """Hold the lock, with other `shared` holders or alone."""
        async with self._turn:  # also while waiting, so that an exclusive call is not overtaken forever
            if not shared:
                await self._empty.wait()
                yield
                return
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()


class Record:
    """Synchronizes the environment's record with the endpoint's session.

    A turn is one generation of the policy. Its results are those of the agent's calls in the environment; for other calls of the
    turn, the results that the agent showed the policy. A call that the policy did not sample (by the agent itself, or by code
    that the policy wrote) is added to the preceding turn.
    """

    def __init__(self, env: ToolEnv, session: AgentSession) -> None:
        self._env, self._session = env, session
        self._taken = 0
        self._read: Counter[int] = Counter()  # per ledger: messages of its conversation that are recorded
        self._calls: dict[str, Turn] = {}  # by id, calls that the agent has not made yet
        self._own = 0
        self.cut = False
        """True if the last sampled turn was truncated, so that its calls are not answered."""
        self.heard: Counter[str] = Counter()  # replies of the user, which the agent will pass on to the policy

    def catch_up(self) -> None:
        """Record the turns sampled since the last call."""
        for turn in self._session.turns[self._taken :]:
            self._taken += 1
            # The conversation before this turn: results of calls outside of the environment, and, in a continued conversation,
            # other messages of the agent.
            conversation = self._session.conversations[turn.ledger]
            fresh = self._read[turn.ledger] == 0
            at = len(conversation) - 1  # the turn itself: this runs before another turn of this ledger is requested
            for message in conversation[self._read[turn.ledger] : at]:
                if message.role == "tool":
                    self._result(message)
                elif message.role != "assistant" and not fresh:
                    if self.heard[message.content] > 0:
                        self.heard[message.content] -= 1
                    else:
                        self._env.trajectory.messages.append(message)
            self._read[turn.ledger] = at + 1
            self._env.record_turn(turn)
            for call in turn.message.tool_calls:
                if self.cut:
                    continue
                if call.arguments is None:  # the agent does not see it as a call
                    problem = Problem("malformed_call", call.error or "the call is not valid JSON")
                    text = self._env.toolbox.refusal(call, problem)
                    turn.results.append(ToolResult(call.id, call.name, text, None, problem.kind))
                else:
                    self._calls[call.id] = turn

    def match_call(self, name: str, arguments: dict[str, Json]) -> tuple[Turn, ToolCall]:
        """Find the sampled call that the agent makes, and its turn: the newest turn first, equal arguments before the same tool.
        Returns the call with the agent's arguments."""
        waiting = [
            (turn, call)
            for turn in reversed(self._env.trajectory.turns)
            for call in turn.message.tool_calls
            if call.id in self._calls and call.name == name
        ]
        for turn, call in [pair for pair in waiting if pair[1].arguments == arguments] + waiting:
            del self._calls[call.id]
            return turn, replace(call, arguments=arguments)
        call = ToolCall(name, arguments, id=f"own_{self._own}")
        self._own += 1
        record = self._env.trajectory
        turn = record.turns[-1] if record.turns else self._add(Message("assistant"))
        at = next(i for i, known in enumerate(record.messages) if known is turn.message)
        record.messages[at] = turn.message = replace(turn.message, tool_calls=(*turn.message.tool_calls, call))
        return turn, call

    def record_message(self, text: str) -> Turn:
        """Return the turn of a message to the user: the newest one if it has this text, else a new one."""
        turns = self._env.trajectory.turns
        if turns and turns[-1].message.content.strip() == text.strip() and not turns[-1].message.tool_calls:
            return turns[-1]
        return self._add(Message("assistant", text))

    def answer(self, output: str | None) -> Turn | None:
        """Return the turn that ends the episode: the newest, or one with `output` if that differs; None if the agent stopped
        after a call."""
        turns = self._env.trajectory.turns
        last = turns[-1].message
        if output is not None and (last.tool_calls or last.content.strip() != output.strip()):
            return self._add(Message("assistant", output))
        return None if last.tool_calls else turns[-1]

    def _result(self, message: Message) -> None:
        turn = self._calls.pop(message.tool_call_id or "", None)
        if turn is None:
            return
        call = next(call for call in turn.message.tool_calls if call.id == message.tool_call_id)
        record_result(self._env.trajectory, turn, ToolResult(call.id, call.name, message.content, message.content))

    def _add(self, message: Message) -> Turn:
        """Add a turn that the policy did not sample."""
        turn = Turn(len(self._env.trajectory.turns), message)
        self._env.record_turn(turn)
        self._session.added += 1  # later tokens have later turn numbers
        return turn
