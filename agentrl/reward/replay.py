"""Replays: a round's own calls and the gold calls, played on twins, give the states and answers that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentrl.plain_data import detached
from agentrl.reward.course import EpisodeRounds
from agentrl.reward.frozen import FrozenState
from agentrl.reward.gold import GoldCall, gold_calls
from agentrl.reward.leaf import Context, UnscorableError
from agentrl.reward.twins import RoundEnd, RoundTurns, TwinPass
from agentrl.reward.view import View
from agentrl.trajectory import Json, Message, StopReason, ToolCall, Trajectory, Turn


def replay(context: Context, view: View, gold: Json) -> tuple[FrozenState, FrozenState]:
    """(state after the calls made, state after the gold calls).

    For an episode the first is the trajectory's own final state and `gold` the list of gold calls. For round r, `gold` is a list
    of rounds, each a list of calls; both sides are replayed from the episode's start to the end of r, with what the user did.
    Raises UnscorableError if the gold has another shape, or the replay environment refuses a gold call or fails.
    """
    context.replays.states = True  # a leaf that reads states has said so when it was compiled
    if view.scope == "episode":
        return FrozenState(view.trajectory.state), _state(_gold_end(context, view, gold))
    wanted = _state(_gold_end(context, view, gold))
    return _state(_made(context, view).end(view.round)), wanted


def replay_answers(context: Context, view: View, gold: Json) -> list[str]:
    """The tools' answers to the gold calls (of the view's round, if the view is one).

    Raises UnscorableError as `replay` does.
    """
    return _gold_end(context, view, gold).answers


def _state(end: RoundEnd) -> FrozenState:
    assert end.state is not None
    return end.state


def _gold_end(context: Context, view: View, gold: Json) -> RoundEnd:
    """How the gold calls end: of an episode after all of them, of a round after those of the rounds up to it."""
    if context.replay_env is None:
        raise UnscorableError("this run provides no environment to replay on")
    if view.scope == "episode":
        return _gold(context, view, [gold]).end(0)
    if not isinstance(gold, (list, tuple)) or len(gold) <= view.round:
        raise UnscorableError(f"replay by round: there are no gold calls for round {view.round}")
    return _gold(context, view, gold).end(view.round)


def _gold(context: Context, view: View, rounds: Sequence[Json]) -> TwinPass:
    """The pass over the gold rounds that the record came to, or over all calls at once if there is one part only."""
    key = ("gold", id(rounds)) if view.scope == "round" else ("gold", "episode", id(rounds[0]))
    known = view.memo.get(key)
    if known is None:
        record = view.trajectory
        if any(map(_has_calls_of_the_user, rounds)) and record.user_calls:
            record = replace(record, user_calls=[])  # those of the gold are made in their place
        opening = _opening(record, view.course)
        texts = _texts(record, view.course)[: len(rounds)] if view.scope == "round" else [RoundTexts()]
        assert context.replay_env is not None
        played = context.replays.gold(
            context.replay_env,
            record,
            rounds,
            lambda: _gold_rounds(rounds, texts),
            lambda scripted: (opening, *_user_side(texts, scripted)),
        )
        known = view.memo[key] = (rounds, played)  # with what it is a replay of, so that its id stays its own
    found: TwinPass = known[1]
    return found


def _has_calls_of_the_user(part: Json) -> bool:
    return isinstance(part, (list, tuple)) and any(isinstance(call, Mapping) and call.get("by") == "user" for call in part)


def _user_side(rounds: Sequence[RoundTexts], scripted: bool) -> list[Any]:
    """What was said from the first round's calls to the last's: in turn the texts inside of a round, and the one at its end. Of a
    scripted user's episode without what the policy said."""
    side: list[Any] = []
    for texts in rounds:
        side.append(tuple(text.answer if scripted else text for text in texts.inside))
        side.append(texts.end.answer if texts.end is not None and scripted else texts.end)
    return side[:-1]


def _gold_rounds(rounds: Sequence[Json], texts: Sequence[RoundTexts]) -> tuple[list[RoundTurns], UnscorableError | None]:
    """The rounds to play; and what is wrong with the gold after them, if it is. What was said inside of a round is said after its
    gold calls, because nothing tells between which of them."""
    found: list[RoundTurns] = []
    count = 0
    for part, said in zip(rounds, texts, strict=False):
        try:
            calls = [_gold_turn(call, count + place) for place, call in enumerate(gold_calls(part, "literal"))]
        except UnscorableError as error:
            return found, error
        count += len(calls)
        inside = [Message("assistant", text.said) for text in said.inside]
        found.append(RoundTurns([*calls, *inside], None if said.end is None else Message("assistant", said.end.said)))
    return found, None


def _gold_turn(gold: GoldCall, number: int) -> Message | ToolCall:
    """A gold call as a turn of the policy's, or as a call of the user's own."""
    call = ToolCall(gold.name, detached(dict(gold.arguments)), id=f"gold-{number}")
    return call if gold.by == "user" else Message("assistant", "", (call,))


def _made(context: Context, view: View) -> TwinPass:
    """The pass over the record's own turns; one for all leaves and all rounds."""
    if "made" not in view.memo:
        assert context.replay_env is not None
        rounds = _made_rounds(view.trajectory, view.course)
        view.memo["made"] = context.replays.made(context.replay_env, view.trajectory, rounds)
    found: TwinPass = view.memo["made"]
    return found


def _made_rounds(record: Trajectory, course: EpisodeRounds) -> list[RoundTurns]:
    turns = _answered(record)
    found = [RoundTurns([]) for _ in range(course.rounds[-1] + 1 if course.rounds else 0)]
    for number in range(len(found)):
        here = [turn for turn, place in zip(turns, course.rounds, strict=False) if place == number]
        text = here[-1].message if here and not here[-1].message.tool_calls else None
        found[number] = RoundTurns([_again(turn) for turn in (here if text is None else here[:-1])], text)
    return found


def _answered(record: Trajectory) -> Sequence[Turn]:
    """The turns; of the last one of an episode that was cut only the calls that got an answer: another may have used up the time,
    and would again."""
    turns = record.turns
    if not turns or record.stop is StopReason.DONE:
        return turns
    last, known = turns[-1], {result.call_id for result in turns[-1].results}
    calls = tuple(call for call in last.message.tool_calls if call.id in known)
    if len(calls) == len(last.message.tool_calls):
        return turns
    return [*turns[:-1], *([replace(last, message=replace(last.message, tool_calls=calls))] if calls else [])]


def _again(turn: Turn) -> Message:
    """The turn's message with arguments of its own: what a twin does to them is not done to the record."""
    said = turn.message
    calls = tuple(ToolCall(c.name, detached(c.arguments), c.id, c.raw, c.error) for c in said.tool_calls)
    return Message(said.role, said.content, calls, said.tool_call_id, said.name, said.reasoning)


class Text(NamedTuple):
    """A text of the policy's, and what its user then did and said."""

    said: str
    answer: tuple[str, ...]


class RoundTexts(NamedTuple):
    """The texts of a round: those to which the user said nothing, and the one at its end, None if that is a turn with calls."""

    inside: Sequence[Text] = ()
    end: Text | None = None


def _texts(record: Trajectory, course: EpisodeRounds) -> list[RoundTexts]:
    """Of each round."""
    found: list[RoundTexts] = []
    inside: list[Text] = []
    for turn, said, now, after in zip(record.turns, course.said, course.rounds, (*course.rounds[1:], None), strict=False):
        text = None if turn.message.tool_calls else Text(turn.message.content, _answer(record, turn.index, said))
        if now != after:
            found.append(RoundTexts(inside, text))
            inside = []
        elif text is not None:
            inside.append(text)
    return found or [RoundTexts()]


def _opening(record: Trajectory, course: EpisodeRounds) -> tuple[str, ...]:
    """What the user did and said before the first turn."""
    return _answer(record, -1, [message for message in record.messages[: course.opening] if message.role == "user"])


def _answer(record: Trajectory, turn: int, said: Sequence[Message]) -> tuple[str, ...]:
    did = (f"{made.call.name} {made.call.arguments}" for made in record.user_calls if made.turn == turn)
    return (*did, *(message.content for message in said))
