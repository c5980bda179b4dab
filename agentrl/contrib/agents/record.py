"""Brief an agent, clean what it writes, order its tool calls, and record its episode."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from agentrl.contrib.agents.session import AgentSession
from agentrl.data.trajectory import Json, Message, ToolCall, ToolResult, Turn
from agentrl.env import ToolEnv
from agentrl.env.call_options import Problem
from agentrl.env.toolbox import to_text
from agentrl.env.users import record_result

MODEL = "policy"
"""The name of the model; any other name means the same one."""


class ServedEpisode(Protocol):
    """The services of an episode for its agent."""

    def schemas(self) -> list[dict[str, Json]]: ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...

    async def say(self, text: str) -> list[str] | None: ...


@dataclass(frozen=True, slots=True)
class Brief:
    """One episode: its task as the environment puts it, and where the model, the tools and the user are.

    `messages`: the environment's opening messages. `tools`: its function schemas, of which an agent with tools of its own gets
    none. `tools_url`: the MCP server, None without one; `user_url`: where to talk with the user, None if the agent cannot.
    """

    episode: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Json]]
    openai_url: str
    anthropic_url: str
    key: str = field(repr=False)
    tools_url: str | None = field(default=None, repr=False)
    user_url: str | None = field(default=None, repr=False)

    @property
    def prompt(self) -> str:
        """The user's request: the text of the last opening message."""
        return self.messages[-1].content if self.messages else ""

    def task(self) -> dict[str, Json]:
        """The task as JSON: `prompt`, `messages` in OpenAI's form, and `tools`."""
        return {
            "episode": self.episode,
            "prompt": self.prompt,
            "messages": [{"role": message.role, "content": message.content} for message in self.messages],
            "tools": list(self.tools),
        }

    def to_json(self) -> dict[str, Json]:
        """Everything, as an agent behind a URL gets it."""
        urls = {"openai_base_url": self.openai_url, "anthropic_base_url": self.anthropic_url, "api_key": self.key}
        return {**self.task(), "model": MODEL, **urls, "mcp_url": self.tools_url, "user_url": self.user_url}

    def variables(self) -> dict[str, str]:
        """Everything, as environment variables; those of the task in full are `AGENTRL_TASK`."""
        found = {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.key,
            "AGENTRL_MODEL": MODEL,
            "AGENTRL_PROMPT": self.prompt,
            "AGENTRL_TASK": json.dumps(self.task(), ensure_ascii=False),
            "AGENTRL_MCP_URL": self.tools_url,
            "AGENTRL_USER_URL": self.user_url,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(slots=True)
class Outcome:
    """End of an agent's program. `output`: what it gives as its answer, None if nothing; `failure`: why it counts as failed,
    None if it ended as it should."""

    output: str | None = None
    failure: str | None = None


MASK = "[key]"


def text_of(value: str, key: str | None = None) -> str:
    """A text with `key`, None for none, as `MASK`, and each lone surrogate as U+FFFD."""
    return to_text(value.replace(key, MASK) if key else value)


class Gate:
    """Calls of parallel tools share it; any other call has it for itself. In the order in which they came."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def hold(self, shared: bool) -> AsyncIterator[None]:
        """Inside, only other `shared` holders are there too, or nobody."""
        async with self._turn:  # held while waiting, so that a call that wants to be alone is not overtaken for ever
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
    """Keeps the environment's record abreast of the endpoint's session.

    A turn is what the policy sampled once. Its results are those of the calls that the agent made of it in the environment;
    of any other call of the turn, what the agent showed the policy as its answer. A call that the policy did not sample (one of
    the agent's own, or of code that the policy wrote) is added to the turn after which it was made.
    """

    def __init__(self, env: ToolEnv, session: AgentSession) -> None:
        self._env, self._session = env, session
        self._taken = 0
        self._read: Counter[int] = Counter()  # of each ledger's conversation, so many messages are in the record
        self._calls: dict[str, Turn] = {}  # by id, those that the agent has not made yet
        self._own = 0
        self.cut = False
        """Return True if the last sampled turn was cut short, so that nobody answers it."""
        self._heard: Counter[str] = Counter()

    def catch_up(self) -> None:
        """Record the turns that were sampled since the last time."""
        for turn in self._session.turns[self._taken :]:
            self._taken += 1
            # The conversation before this turn: results of calls that were not made in the environment, and, in a conversation
            # that goes on, whatever else the agent said.
            conversation = self._session.conversations[turn.ledger]
            fresh = self._read[turn.ledger] == 0
            at = len(conversation) - 1  # the turn itself: another one of this ledger is asked for only after this was called
            for message in conversation[self._read[turn.ledger] : at]:
                if message.role == "tool":
                    self._result(message)
                elif message.role != "assistant" and not fresh:
                    if self._heard[message.content] > 0:
                        self._heard[message.content] -= 1
                    else:
                        self._env.trajectory.messages.append(message)
            self._read[turn.ledger] = at + 1
            turn.index = len(self._env.trajectory.turns)
            self._env.record_turn(turn)
            for call in turn.message.tool_calls:
                if self.cut:
                    continue
                if call.arguments is None:  # no agent gets to see it as a call
                    problem = Problem("malformed_call", call.error or "the call is not valid JSON")
                    text = self._env.toolbox.refusal(call, problem)
                    turn.results.append(ToolResult(call.id, call.name, text, None, problem.kind))
                else:
                    self._calls[call.id] = turn

    def asked_for(self, name: str, arguments: dict[str, Json]) -> tuple[Turn, ToolCall]:
        """The turn that a call belongs to, and the call as the policy sampled it, with the arguments as they came: those of the
        newest turn first, an equal call before one of the same tool."""
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

    def said(self, text: str) -> Turn:
        """The turn that says this to the user: the newest, if it is what the policy just said, else one of its own."""
        turns = self._env.trajectory.turns
        if turns and turns[-1].message.content.strip() == text.strip() and not turns[-1].message.tool_calls:
            return turns[-1]
        return self._add(Message("assistant", text))

    def heard(self, replies: Sequence[Message]) -> None:
        """The user said this; the agent will pass it on to the policy."""
        self._heard.update(message.content for message in replies)

    def answer(self, output: str | None) -> Turn | None:
        """The turn that ends the episode: the newest, or one with `output` if that is something else; None if the agent stopped
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
        """A turn that the policy did not sample."""
        turn = Turn(len(self._env.trajectory.turns), message)
        self._env.record_turn(turn)
        return turn
