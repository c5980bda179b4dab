"""The shape of a conversation as a short one of probes: who spoke in which order, with or without reasoning and calls.

Chat templates decide by such things alone what they keep of earlier turns, so the answer for a shape is the answer for every
conversation of this shape.
"""

from __future__ import annotations

from collections import Counter
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
# (reasoning: none, empty or some; calls: 0, 1 or more; whether something is said)
_Turn = tuple[int, int, bool]
_Rounds = tuple[tuple[_Turn, tuple[str, ...]], ...]
Shape = tuple[tuple[str, ...], _Rounds, _Rounds]
"""Roles before the first turn, rounds that the ledger began with, rounds that were sampled in it. Hashable."""


@dataclass(frozen=True)
class Skeleton:
    """`opening`: what a ledger began with. `rounds`: what was sampled in it, and the answers."""

    opening: tuple[Message, ...]
    rounds: tuple[Round, ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.opening, *(message for turn, answers in self.rounds for message in (turn, *answers)))


def shape_of(earlier: Sequence[Message], begun: int, message: Message, following: Sequence[Message]) -> Shape:
    """Of a ledger that began with the first `begun` messages of `earlier`, before `message` was sampled."""
    lead, opening = _rounds(earlier[:begun])
    _, sampled = _rounds([*earlier[begun:], message, *following])
    return lead or ("user",), opening, sampled


def skeleton(shape: Shape) -> Skeleton:
    """A conversation of probes in this shape."""
    lead, opening, sampled = shape
    began = [Message("system" if role == "system" else "user", "Question") for role in lead]
    began += [item for turn, answers in map(_probe, opening) for item in (turn, *answers)]
    return Skeleton(tuple(began), tuple(map(_probe, sampled)))


def _rounds(messages: Sequence[Message]) -> tuple[tuple[str, ...], _Rounds]:
    """The roles before the first turn, and the rounds."""
    lead: list[str] = []
    rounds: list[tuple[_Turn, list[str]]] = []
    for message in messages:
        if message.role == "assistant":
            reasoning = 2 if message.reasoning else 1 if message.reasoning is not None else 0
            rounds.append(((reasoning, min(len(message.tool_calls), 2), bool(message.content)), []))
            continue
        roles = rounds[-1][1] if rounds else lead
        if not roles or roles[-1] != message.role:
            roles.append(message.role)
    kept: list[tuple[_Turn, tuple[str, ...]]] = []
    seen: Counter[tuple[_Turn, tuple[str, ...]]] = Counter()
    for index, (turn, roles) in enumerate(rounds):
        item = (turn, tuple(roles))
        seen[item] += 1
        if seen[item] <= _EQUAL_ROUNDS or index == len(rounds) - 1:
            kept.append(item)
    return tuple(lead), tuple(kept)


def _probe(item: tuple[_Turn, tuple[str, ...]]) -> Round:
    (reasoning, calls, said), roles = item
    turn = Message(
        "assistant", "Said" if said or not calls else "", (CALL, SECOND)[:calls], reasoning=(None, "", "Thought")[reasoning]
    )
    answers: list[Message] = []
    for role in roles:
        if role == "tool":
            answers += (ANSWER, SECOND_ANSWER)[: max(1, calls)]
        else:
            answers.append(Message("system" if role == "system" else "user", "More"))
    return turn, tuple(answers)
