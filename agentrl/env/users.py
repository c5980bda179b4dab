"""The user side of an episode, and scripted users; `agentrl.contrib.users` has more users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from agentrl.data.trajectory import Message, ToolCall, ToolResult, Trajectory, Turn, UserCall
from agentrl.env.toolbox import Toolbox
from agentrl.render.litellm_calls import request_of
from agentrl.reward.values import course_of, turn_places
from agentrl.utils.errors import ConfigError, EnvError

# Results as messages


def record_result(record: Trajectory, turn: Turn, result: ToolResult) -> None:
    """Add a call's result to its turn and the conversation, in the order of the turn's calls."""
    order = {call.id: place for place, call in enumerate(turn.message.tool_calls)}

    def later(call_id: str | None) -> bool:
        return order.get(call_id or "", -1) > order.get(result.call_id, len(order))

    at, place = len(record.messages), len(turn.results)
    while place and later(turn.results[place - 1].call_id):
        place -= 1
    while at and record.messages[at - 1].role == "tool" and later(record.messages[at - 1].tool_call_id):
        at -= 1
    turn.results.insert(place, result)
    record.messages.insert(at, result.message)


# Simulated users

GOLD = "gold"
"""Value of the reset option "user" that selects `ToolEnv.gold_user`."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The last words of a user who leaves, only recorded (`Trajectory.parting`): the policy does not read them."""

    text: str


Line = str | ToolCall | Sequence[ToolCall] | Message | Parting


@runtime_checkable
class User(Protocol):
    """A user who answers the policy. Its state belongs to one episode and must be copyable (for forks)."""

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """Return the user's next message (`conversation` ends with the policy's turn); None or a Parting ends the episode.

        A message of role "user" with `tool_calls` calls the user's tools: the environment makes the calls and asks again, with
        the calls and their results (role "tool") at the end of the conversation.
        """


class ScriptedUser:
    """User that says its lines in order, regardless of the conversation, and then leaves. A line of one or more calls is made to
    the user's tools, and the next line follows; a Parting ends the episode."""

    def __init__(self, lines: Sequence[Line]) -> None:
        """Raises ConfigError for one text in place of a list."""
        if isinstance(lines, str):  # it would say a letter at a time
            raise ConfigError(f"ScriptedUser: lines = {lines!r:.80} is one text. Write [{lines!r:.80}]")
        self.lines = list(lines)

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        line = self.lines.pop(0) if self.lines else None
        if line is None or isinstance(line, str | Message | Parting):
            return line
        return Message("user", "", (line,) if isinstance(line, ToolCall) else tuple(line))


class SilentUser:
    """User that says nothing and stays, for replays of gold calls without texts."""

    async def reply(self, conversation: Sequence[Message]) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class UserModel:
    """An API model that plays users (`ToolEnv.user_models`), tested once before a run: its litellm name, and the
    options of each call (`api_base`, `api_key`, ...)."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def request(
        self, messages: Sequence[Mapping[str, Any]], timeout: float = 60.0, tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the keyword arguments of a litellm call; the default temperature is 0."""
        args = {key: value for key, value in self.options.items() if key != "api_base"}
        own = {"model": self.model, "messages": list(messages), "tools": list(tools), "timeout": timeout, "temperature": 0.0}
        return request_of(own, args, self.options.get("api_base"), args_key="options", base_key="api_base")


class AsksModel:
    """Base class of users that call a model; scripted policies replace or refuse them."""


# The user's side


def user_view(record: Trajectory, before: Sequence[Message] = ()) -> list[Message]:
    """Return the conversation as the user sees it: the record's messages, `before` (the opening so far, while it is made), and in
    place the user's tool calls (role "user") with their results (role "tool", with the calls' ids)."""
    messages = [*record.messages, *before]
    if not record.user_calls:
        return messages
    places = turn_places(record)
    first = places[0] if places else len(messages)
    opened = [at for at in range(first) if messages[at].role == "user"]
    # Calls before the user's first words precede them; an opening that is still being made has no words yet.
    opening = opened[-1] if opened and record.messages else first
    found: list[Message] = []
    last = -2
    for at in range(len(messages) + 1):
        turn = -1 if at == opening else places.index(at - 1) if at - 1 in places else None
        if turn is not None:
            found += _as_messages([made for made in record.user_calls if last < made.turn <= turn])
            last = turn
        found += messages[at : at + 1]
    return found


def _as_messages(calls: Sequence[UserCall]) -> list[Message]:
    found: list[Message] = []
    for turn, step in dict.fromkeys((made.turn, made.step) for made in calls):
        same = [made for made in calls if (made.turn, made.step) == (turn, step)]
        found.append(Message("user", same[0].text, tuple(made.call for made in same)))
        found += [made.result.message for made in same if made.result is not None]
    return found


def next_step(record: Trajectory) -> int:
    """Return the index of the next message with calls in the user's answer to the current turn."""
    last = record.user_calls[-1] if record.user_calls else None
    return last.step + 1 if last is not None and last.turn == len(record.turns) - 1 else 0


async def make_call(record: Trajectory, toolbox: Toolbox, call: ToolCall, step: int, text: str = "") -> ToolResult:
    """Make and record one user call, with its index in the episode as id. It is recorded before it is answered, so that a failed
    episode's record has it. Raises EnvError (ToolTimeoutError) if the tool fails."""
    place = len(record.user_calls)
    made = UserCall(len(record.turns) - 1, step, replace(call, id=f"user_{place}"), None, text)
    record.user_calls.append(made)
    result = await toolbox.call(made.call)
    record.user_calls[place] = replace(made, result=result)
    return result


class RecordedUser:
    """User that repeats its recorded calls and words, for replays, which must call no model."""

    def __init__(self, before: int, answers: Sequence[Sequence[Message | Parting | None]]) -> None:
        """`answers`: the user's steps in the opening, then after each text of the policy: messages with calls, last its words,
        or a Parting or None if it left. `before`: the number of assistant texts in the opening."""
        self.before, self.answers = before, [list(steps) for steps in answers]
        self._at = (-1, 0)

    @classmethod
    def of(cls, record: Trajectory) -> RecordedUser:
        """Make the user of a recorded episode."""
        course = course_of(record)
        opening = record.messages[: course.opening]
        words: dict[int, list[Message]] = {-1: [message for message in opening if message.role == "user"][-1:]}
        for turn, said in zip(record.turns, course.said, strict=True):
            if not turn.message.tool_calls:
                # A user who said nothing but after whom the episode continued did not leave.
                words[turn.index] = said[:1] or ([] if turn is record.turns[-1] else [Message("user", "")])
        answers: list[list[Message | Parting | None]] = []
        for number, own in words.items():  # the user's messages with calls, then its words, or None
            calls = _as_messages([made for made in record.user_calls if made.turn == number])
            answers.append([*(message for message in calls if message.role == "user"), own[0] if own else None])
        if record.parting and answers[-1][-1] is None:
            answers[-1][-1] = Parting(record.parting)
        return cls(sum(map(_is_text, opening)), answers)

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """Return the recorded answer. Raises EnvError for a text that the record has no answer to."""
        number = sum(map(_is_text, conversation)) - self.before
        step = self._at[1] if self._at[0] == number else 0
        self._at = (number, step + 1)
        if not 0 <= number < len(self.answers) or step >= len(self.answers[number]):
            raise EnvError(f"the recorded user has no answer to text {number} of the policy (step {step})")
        answer = self.answers[number][step]
        return answer.content if isinstance(answer, Message) and not answer.tool_calls else answer


def _is_text(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls
