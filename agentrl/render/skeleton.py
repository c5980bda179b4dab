"""The shape of a conversation as a short one of probes: who spoke in which order, with or without reasoning and calls.

Chat templates decide by such things alone what they keep of earlier turns, so the answer for a shape is the answer for every
conversation of this shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.trajectory import Message, ToolCall

MARK = "Qmarkq"
"""A word that no template is likely to contain, and with nothing in it that JSON or a filter would escape."""
CALL = ToolCall("probe_tool", {"key": MARK}, id="probecall")
SECOND = ToolCall("probe_tool", {"key": MARK}, id="probecal2")
QUESTION = Message("user", "Question")
ANSWER = Message("tool", "result", tool_call_id="probecall", name="probe_tool")
SECOND_ANSWER = Message("tool", "result", tool_call_id="probecal2", name="probe_tool")
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
Round = tuple[Message, tuple[Message, ...]]
"""An assistant's turn and what followed it."""
# Of equal rounds this many are kept, and the last one: a template may treat the first one of a kind differently.
_EQUAL_ROUNDS = 2


@dataclass(frozen=True)
class Skeleton:
    """`opening`: what a ledger began with. `rounds`: what was sampled in it, and the answers."""

    opening: tuple[Message, ...]
    rounds: tuple[Round, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.opening, *(message for turn, answers in self.rounds for message in (turn, *answers)))


def skeleton(earlier: Sequence[Message], begun: int, message: Message, following: Sequence[Message]) -> Skeleton:
    """Of a ledger that began with the first `begun` messages of `earlier`, before `message` was sampled."""
    if not begun:
        return Skeleton((QUESTION,), _rounds([*_from_turn(earlier), message, *following])[1])
    lead, rounds = _rounds(earlier[:begun])
    opening = (*lead, *(item for turn, answers in rounds for item in (turn, *answers)))
    return Skeleton(opening, _rounds([*_from_turn(earlier[begun:]), message, *following])[1])


def _from_turn(messages: Sequence[Message]) -> Sequence[Message]:
    first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
    return messages[first:]


def _rounds(messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Round, ...]]:
    """What comes before the first turn, and the rounds, as probes."""
    lead: list[Message] = []
    rounds: list[tuple[Message, list[str]]] = []
    for message in messages:
        if message.role == "assistant":
            rounds.append((_probe(message), []))
        elif not rounds:
            lead.append(Message(message.role, "Question"))
        elif not rounds[-1][1] or rounds[-1][1][-1] != message.role:
            rounds[-1][1].append(message.role)
    probes = [(turn, _answers(turn, roles)) for turn, roles in rounds]
    last = len(probes) - 1
    kept = [item for i, item in enumerate(probes) if i == last or probes[:i].count(item) < _EQUAL_ROUNDS]
    return tuple(lead), tuple(kept)


def _probe(message: Message) -> Message:
    reasoning = "Thought" if message.reasoning else message.reasoning
    calls = (CALL, SECOND)[: len(message.tool_calls)]
    return Message("assistant", "Said" if message.content or not calls else "", calls, reasoning=reasoning)


def _answers(turn: Message, roles: Sequence[str]) -> tuple[Message, ...]:
    answers: list[Message] = []
    for role in roles:
        if role == "tool":
            answers += (ANSWER, SECOND_ANSWER)[: max(1, len(turn.tool_calls))]
        else:
            answers.append(Message("system" if role == "system" else "user", "More"))
    return tuple(answers)
