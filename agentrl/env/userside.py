"""The user's side of an episode: what the simulated user hears, and the calls that it makes to its own tools before it speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from agentrl.env.noting import as_message
from agentrl.env.users import Parting, User
from agentrl.errors import EnvError, UserLimitError
from agentrl.reward.course import course_of, turn_places
from agentrl.tool import Toolbox
from agentrl.trajectory import Json, Message, ToolCall, ToolResult, Trajectory, UserCall


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
        found += [as_message(result) for result in answers]
    return found


def _steps(record: Trajectory, turn: int, words: Sequence[Message]) -> list[Message | Parting | None]:
    """What the user did after a turn: its messages with calls, and its words, or None if it said none."""
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
    """What the user says next; the calls that it makes before are made and recorded one after the other, in its order. `noted` is
    called after each. None: the user leaves; its last words are in the record.

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
