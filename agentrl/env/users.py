"""Simulated users, and the user's side of an episode."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol

import regex

from agentrl.data.trajectory import Json, Message, ToolCall, ToolResult, Trajectory, Turn, UserCall
from agentrl.env.toolbox import Toolbox
from agentrl.render.litellm_calls import (
    address_arguments,
    answer_row,
    load_litellm,
    read_answer,
    request_of,
    said_of,
)
from agentrl.reward.values import course_of, turn_places
from agentrl.utils.errors import DependencyError, EnvError, UserLimitError
from agentrl.utils.schemas import compile_pattern, within_seconds
from agentrl.utils.threads import by_size, in_thread

# Results as messages


def note(record: Trajectory, turn: Turn, result: ToolResult) -> None:
    """Add a call's result to its turn and to the conversation, both in the order of the turn's calls, in whatever order they
    end."""
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

PATTERN_S = 1.0
"""Seconds that a rule's pattern may take on what the policy said."""

GOLD = "gold"
"""In place of a user in a reset's options: that of the environment's gold solution (`ToolEnv.gold_user`)."""

Complete = Callable[[Sequence[Mapping[str, Any]]], Awaitable["str | Message"]]


NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Parting:
    """The last words of a user who leaves: the record has them (`Trajectory.parting`), and nobody reads them."""

    text: str


Line = str | ToolCall | Sequence[ToolCall] | Message | Parting


class User(Protocol):
    """Answers the policy. Its state belongs to one episode and must be copyable (for forks)."""

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """The user's next message (`conversation` ends with the policy's turn); None, or a Parting, ends the episode.

        A message of role "user" with `tool_calls` makes calls to the user's own tools instead: the environment makes them, and
        asks again with the calls and their results (messages of role "tool") at the end of the conversation.
        """
        ...


class ScriptedUser:
    """Says its lines in order, regardless of the conversation, and then leaves. A line that is a call, or several, is made to the
    user's own tools, and the next line follows; a Parting ends the
    episode."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = list(lines)

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        line = self.lines.pop(0) if self.lines else None
        if line is None or isinstance(line, str | Message | Parting):
            return line
        return Message("user", "", (line,) if isinstance(line, ToolCall) else tuple(line))


class SilentUser:
    """Says nothing and stays: for replays of gold calls, in which nobody talks."""

    async def reply(self, conversation: Sequence[Message]) -> str:
        return ""


class RuleUser:
    """Answers by rules: the first one whose pattern is found in the policy's turn.

    `rules`: (regular expression, answer); the answer None ends the episode. `otherwise`: the answer if no
    rule matches. After `patience` of those in a row the user leaves.
    """

    def __init__(self, rules: Sequence[tuple[str, str | None]], *, otherwise: str = "I do not know.", patience: int = 3) -> None:
        self.rules = [(compile_pattern(pattern, regex.IGNORECASE), answer) for pattern, answer in rules]
        self.otherwise, self.patience = otherwise, patience
        self.lost = 0

    async def reply(self, conversation: Sequence[Message]) -> str | None:
        said = conversation[-1].content
        found = await by_size(len(said), self._first, said)
        if found is not None:
            self.lost = 0
            return self.rules[found][1]
        self.lost += 1
        return None if self.lost > self.patience else self.otherwise

    def _first(self, said: str) -> int | None:
        """The number of the first rule that fits; one whose pattern takes longer than `PATTERN_S` does not."""
        for number, (pattern, _) in enumerate(self.rules):
            with contextlib.suppress(TimeoutError):
                if within_seconds(pattern.search, said, PATTERN_S):
                    return number
        return None


INSTRUCTIONS = """You play a user who talks to an assistant. Your goal and what you know:
{goal}
Say only what the user would say next, in one or two sentences. Reveal what you know only when asked. \
Do not help the assistant and do not invent facts. When your goal is reached, or cannot be, say {stop}."""


@dataclass(frozen=True, slots=True)
class UserModel:
    """A model behind an API that plays users, as an environment names it (`ToolEnv.user_models`), so that it is asked once before
    a run: litellm's name of it, and what each of its calls gets (`api_base`, `api_key`, ...)."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)


class ModelUser:
    """A language model plays the user (through litellm: any provider, or a local server by `api_base`).

    It sees the conversation with the roles swapped, its own calls with their results, and never those of the policy.
    """

    def __init__(
        self,
        goal: str = "",
        *,
        model: str = "",
        system: str | None = None,
        stop: str | Sequence[str] = "###STOP###",
        tools: Sequence[Mapping[str, Any]] = (),
        complete: Complete | None = None,
        timeout: float = 60.0,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """`system`: the whole system prompt, in place of the one that is made of `goal`. `stop`: the words, or one of several,
        with which the model ends the conversation; a message that makes calls does not. `tools`: schemas of the user's own tools
        (`env.user_toolbox.schemas()`). `complete` replaces litellm. `options` go to `litellm.acompletion`, as does `seed`;
        temperature is 0 by default, and `drop_params` leaves out what the model does not take. Raises DependencyError if there is
        neither `complete` nor litellm, ValueError without a stop word that a system prompt made of `goal` could name, and for an
        empty one, which every text contains."""
        if complete is None and find_spec("litellm") is None:
            raise DependencyError("a model as user needs litellm: pip install 'agentrl[litellm]'")
        self.stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(self.stops) or (system is None and not self.stops):
            raise ValueError(f"stop = {stop!r}: expected a word with which the model ends the conversation, or several")
        self.system = INSTRUCTIONS.format(goal=goal, stop=self.stops[0]) if system is None else system
        self.goal, self.model, self.timeout = goal, model, timeout
        self.tools = [dict(schema) for schema in tools]
        self.options = {**({} if seed is None else {"seed": seed}), **options}
        address_arguments(options.get("api_base"), "api_base")  # so that one that cannot be asked is refused now
        self.complete = complete
        self.came: dict[str, dict[str, Any]] = {}

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """With a stop word it leaves, and what else it said are its last words. Raises EnvError if the model does not answer: the
        episode is then unscored."""
        answer = await self._complete(await self.shown(conversation))
        said = answer if isinstance(answer, Message) else Message("user", answer)
        if self.leaves(said):
            text = said.content
            for stop in self.stops:
                text = text.replace(stop, "")
            return Parting(text.strip()) if text.strip() else None
        if said.tool_calls:
            return said
        if not said.content.strip():
            raise EnvError(f"the model that plays the user ({self.model}) said nothing")
        return said.content.strip()

    async def shown(self, conversation: Sequence[Message]) -> list[dict[str, Any]]:
        """The conversation that the model reads, in OpenAI's form. A benchmark with a form of its own overrides this, and may
        set `tools`."""
        return [{"role": "system", "content": self.system}, *turn_roles(conversation, self.came)]

    def leaves(self, said: Message) -> bool:
        """Return True if a message ends the conversation."""
        return not said.tool_calls and any(stop in said.content for stop in self.stops)

    async def _complete(self, messages: Sequence[Mapping[str, Any]]) -> str | Message:
        if self.complete is not None:
            return await self.complete(messages)
        litellm = await in_thread("load", load_litellm)
        request = user_call(self.model, messages, self.options, self.timeout, self.tools)
        try:
            answer = await litellm.acompletion(**request)
        except Exception as fault:  # litellm's exceptions have no common base class
            why = said_of(fault, request.get("api_base"))
            raise EnvError(f"the model that plays the user ({self.model}): {why}") from fault
        if not answer.choices:
            raise EnvError(f"the model that plays the user ({self.model}): the response has no choices")
        content, reasoning, calls = read_answer(answer.choices[0].message)
        said = Message("user", content, calls, reasoning=reasoning)
        if calls:
            self.came[_calls_key(said)] = answer_row(self.model, answer.choices[0].message, calls)
        return said


def user_call(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    timeout: float = 60.0,
    tools: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The keyword arguments of a call of litellm's by a user whose `options` these are; its temperature is 0 by default."""
    args = {key: value for key, value in options.items() if key != "api_base"}
    own = {"model": model, "messages": list(messages), "tools": list(tools), "timeout": timeout, "temperature": 0.0}
    return request_of(own, args, options.get("api_base"), args_key="options", base_key="api_base")


def turn_roles(conversation: Sequence[Message], came: Mapping[str, Mapping[str, Any]] = NOTHING) -> list[dict[str, Any]]:
    """The conversation as the model that plays the user gets it, in OpenAI's form: what the policy said as role "user", what the
    user said and called as "assistant", the results of its calls as "tool"; nothing of the policy's calls. `came`: messages with
    calls as the model wrote them, by `_called`."""
    # Late: an environment whose user is no model needs no parser.
    from agentrl.render.tool_calls import sendable, write_call

    ids: dict[str | None, str] = {}
    found: list[dict[str, Any]] = []
    for message in conversation:
        if message.role == "assistant" and message.content and not message.tool_calls:
            found.append({"role": "user", "content": message.content})
        elif message.role == "user" and message.tool_calls:
            calls = [write_call(sendable(call)) for call in message.tool_calls]
            written: dict[str, Any] = {"role": "assistant", "content": message.content or None, "tool_calls": calls}
            row = came.get(_calls_key(message)) or written
            ids |= {call.id: item["id"] for call, item in zip(message.tool_calls, row["tool_calls"], strict=True)}
            found.append(dict(row))
        elif message.role == "user" and message.content:
            found.append({"role": "assistant", "content": message.content})
        elif message.role == "tool" and message.tool_call_id in ids:
            found.append({"role": "tool", "tool_call_id": ids[message.tool_call_id], "content": message.content})
    return found


def _calls_key(message: Message) -> str:
    """The key of a message with calls, whatever ids these have."""
    return json.dumps([message.content, [(call.name, call.raw) for call in message.tool_calls]])


# The user's side


def heard(record: Trajectory, before: Sequence[Message] = ()) -> list[Message]:
    """The conversation as the user has it: the record's messages, `before` (of an opening that is being made), and where it made
    them its own calls (messages of role "user") with their results (of role "tool", by the calls' ids)."""
    messages = [*record.messages, *before]
    if not record.user_calls:
        return messages
    places = turn_places(record)
    first = places[0] if places else len(messages)
    opened = [at for at in range(first) if messages[at].role == "user"]
    # What the user did before its first words stands before them; an opening that is being made has none yet.
    opening = opened[-1] if opened and record.messages else first
    found: list[Message] = []
    done = 0
    for at in range(len(messages) + 1):
        turn = -1 if at == opening else places.index(at - 1) if at - 1 in places else None
        if turn is not None:
            end = done
            while end < len(record.user_calls) and record.user_calls[end].turn <= turn:
                end += 1
            found += _as_messages(record.user_calls[done:end])
            done = end
        found += messages[at : at + 1]
    return found


def _as_messages(calls: Sequence[UserCall]) -> list[Message]:
    found: list[Message] = []
    for turn, step in dict.fromkeys((made.turn, made.step) for made in calls):
        same = [made for made in calls if (made.turn, made.step) == (turn, step)]
        found.append(Message("user", same[0].text, tuple(made.call for made in same)))
        answers = [made.result for made in same if made.result is not None]
        found += [result.message for result in answers]
    return found


def _steps(record: Trajectory, turn: int, words: Sequence[Message]) -> list[Message | Parting | None]:
    """The user's steps after a turn: its messages with calls, and its words, or None if it said none."""
    calls = _as_messages([made for made in record.user_calls if made.turn == turn])
    return [*(message for message in calls if message.role == "user"), words[0] if words else None]


async def ask(
    user: User,
    record: Trajectory,
    toolbox: Toolbox,
    limit: int,
    before: Sequence[Message] = (),
    noted: Callable[[], None] = lambda: None,
) -> str | None:
    """Ask the user for its next message; the calls that it makes before are made and recorded one after the other, in its
    order. `noted` is called after each. None: the user leaves; its last words are in the record.

    Raises UserLimitError if it would make more than `limit` calls without a word, EnvError if its answer is neither a text, None
    nor a message of role "user", or one of its tools fails.
    """
    turn, made = len(record.turns) - 1, 0
    for step in count(next_step(record)):
        answer = await user.reply(heard(record, before))
        if isinstance(answer, Parting):
            record.parting = answer.text
            return None
        if answer is None or isinstance(answer, str):
            return answer
        if not isinstance(answer, Message) or answer.role != "user":
            raise EnvError(
                f"a user answers a text, None, or a Message of role 'user' with its calls, or a Parting, not {answer!r:.200}"
            )
        if not answer.tool_calls:
            return answer.content
        made += len(answer.tool_calls)
        if made > limit:
            raise UserLimitError(f"the user made {made} calls in one answer, without a word (user_call_limit = {limit})")
        for place, call in enumerate(answer.tool_calls):
            await make_call(record, toolbox, call, turn, step, "" if place else answer.content)
            noted()
    raise AssertionError("a count has no end")


def next_step(record: Trajectory) -> int:
    """The number of the next message with calls in the user's answer to the current turn."""
    last = record.user_calls[-1] if record.user_calls else None
    return last.step + 1 if last is not None and last.turn == len(record.turns) - 1 else 0


async def make_call(record: Trajectory, toolbox: Toolbox, call: ToolCall, turn: int, step: int, text: str = "") -> ToolResult:
    """Make one call of the user's and record it, already before it is answered: the record of a failed episode has what failed.
    Its id is its number in the episode. Raises EnvError (ToolTimeoutError) if the tool fails."""
    place = len(record.user_calls)
    made = UserCall(turn, step, replace(call, id=f"user_{place}"), None, text)
    record.user_calls.append(made)
    result = await toolbox.call(made.call)
    record.user_calls[place] = replace(made, result=result)
    return result


class RecordedUser:
    """The user of a recorded episode once more: to the same text of the policy, the same calls and the same words. For replays,
    which must ask no model. An answer that the record lacks is an EnvError."""

    def __init__(self, before: int, answers: Sequence[Sequence[Message | Parting | None]]) -> None:
        """`answers`: what the user did when it opened the conversation, and then after each text of the policy: messages with
        calls, and at last its words, or a Parting or None if it left. `before`: texts of role "assistant" in the opening."""
        self.before, self.answers = before, [list(steps) for steps in answers]
        self._at = (-1, 0)

    @classmethod
    def of(cls, record: Trajectory) -> RecordedUser:
        """The user of an episode."""
        course = course_of(record)
        opening = record.messages[: course.opening]
        answers = [_steps(record, -1, [message for message in opening if message.role == "user"][-1:])]
        for turn, said in zip(record.turns, course.said, strict=True):
            if not turn.message.tool_calls:
                # A user who said nothing, and after whose silence the episode went on, did not leave.
                silence = [] if turn is record.turns[-1] else [Message("user", "")]
                answers.append(_steps(record, turn.index, said[:1] or silence))
        if record.parting and answers[-1][-1] is None:
            answers[-1][-1] = Parting(record.parting)
        return cls(sum(map(_is_text, opening)), answers)

    async def reply(self, conversation: Sequence[Message]) -> str | Message | Parting | None:
        """Raises EnvError for a text that the record has no answer to."""
        number = sum(map(_is_text, conversation)) - self.before
        step = self._at[1] if self._at[0] == number else 0
        self._at = (number, step + 1)
        if not 0 <= number < len(self.answers) or step >= len(self.answers[number]):
            raise EnvError(f"the recorded user has no answer to text {number} of the policy (step {step})")
        answer = self.answers[number][step]
        return answer.content if isinstance(answer, Message) and not answer.tool_calls else answer

    def row(self) -> dict[str, Json]:
        """As JSON; `of_row` is the inverse."""
        rows = [[_line_row(message) for message in steps] for steps in self.answers]
        return {"before": self.before, "answers": rows}

    @classmethod
    def of_row(cls, row: Mapping[str, Json]) -> RecordedUser:
        """Inverse of `row`."""
        return cls(row["before"], [list(map(_line_of_row, steps)) for steps in row["answers"]])


def _line_row(message: Message | Parting | None) -> Json:
    if message is None:
        return None
    if isinstance(message, Parting):
        return {"parting": message.text}
    return {"text": message.content, "calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]}


def _line_of_row(row: Json) -> Message | Parting | None:
    if row is None or "parting" in row:
        return row and Parting(row["parting"])
    return Message("user", row["text"], tuple(ToolCall(call["name"], call["arguments"]) for call in row["calls"]))


def _is_text(message: Message) -> bool:
    return message.role == "assistant" and not message.tool_calls
