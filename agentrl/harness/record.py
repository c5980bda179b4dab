"""An agent's episode as turns and messages: what the policy sampled, which calls were made of it, and what was answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agentrl.backends.endpoint.session import AgentSession
from agentrl.env import ToolEnv
from agentrl.env.noting import note
from agentrl.tool import Problem
from agentrl.trajectory import Json, Message, ToolCall, ToolResult, Turn


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
        """Whether what is sampled last was cut short, so that nobody answers it."""
        self._heard: Counter[str] = Counter()

    def catch_up(self) -> None:
        """Record the turns that were sampled since the last time."""
        for turn in self._session.turns[self._taken :]:
            self._taken += 1
            self._history(turn)
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
        turn = self._newest()
        self._say_instead(turn, replace(turn.message, tool_calls=(*turn.message.tool_calls, call)))
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

    def _history(self, turn: Turn) -> None:
        """What the agent showed the policy before this turn: results of calls that were not made in the environment, and, in a
        conversation that goes on, whatever else it said."""
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

    def _result(self, message: Message) -> None:
        turn = self._calls.pop(message.tool_call_id or "", None)
        if turn is None:
            return
        call = next(call for call in turn.message.tool_calls if call.id == message.tool_call_id)
        note(self._env.trajectory, turn, ToolResult(call.id, call.name, message.content, message.content))

    def _newest(self) -> Turn:
        turns = self._env.trajectory.turns
        return turns[-1] if turns else self._add(Message("assistant"))

    def _add(self, message: Message) -> Turn:
        """A turn that the policy did not sample."""
        turn = Turn(len(self._env.trajectory.turns), message)
        self._env.record_turn(turn)
        return turn

    def _say_instead(self, turn: Turn, message: Message) -> None:
        record = self._env.trajectory
        at = next(i for i, known in enumerate(record.messages) if known is turn.message)
        record.messages[at] = turn.message = message
