"""Leaves that score the environment's state and the tools' results, with the replays that they compare."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar, NamedTuple

from agentrl.data.trajectory import Json, Message, StopReason, ToolCall, Trajectory
from agentrl.reward.call_matching import gold_calls
from agentrl.reward.leaf import BY, EQUALITY, LEAVES, Args, Context, Leaf, Reading, View, need_replay_env, object_schema, or_ref
from agentrl.reward.leaves.answer import texts_found, wanted_texts
from agentrl.reward.replays import FrozenState, Replay, RoundEnd, RoundTurns
from agentrl.reward.values import (
    ABSENT,
    COMPARISON_SCHEMA,
    COMPARISONS,
    NORMALIZERS,
    Absent,
    EpisodeRounds,
    EqualityRule,
    UnscorableError,
    brief,
    follow,
    holder,
    leaves_of,
    parse_pointer,
    same,
    with_nfc_keys,
)
from agentrl.utils.errors import RewardSpecError

# Replays of made and expected calls


def replay(context: Context, view: View, gold: Json) -> tuple[FrozenState, FrozenState]:
    """Return the states after the calls that were made and after the gold calls.

    For an episode, the first is the trajectory's final state and `gold` the list of gold calls. For round r, `gold` is a list of
    rounds, each a list of calls, and both are replayed from the episode's start to the end of r, with the user's actions.
    Raises UnscorableError if the gold has another shape, or the replay environment refuses a gold call or fails.
    """
    wanted = gold_end(context, view, gold).state
    if view.scope == "episode":
        return FrozenState(view.trajectory.state), wanted
    if "made" not in view.memo:
        assert context.replay_env is not None
        # The record's own rounds, not copied, since environments do not change the calls.
        record, numbers = view.trajectory, view.course.rounds
        turns, rounds = list(record.turns), list[RoundTurns]()
        if turns and record.stop is not StopReason.DONE:
            # In the last turn of a truncated episode only calls with a result are replayed: one without may have timed out, and
            # would again.
            last = turns.pop()
            known = {result.call_id for result in last.results}
            calls = tuple(call for call in last.message.tool_calls if call.id in known)
            if calls or not last.message.tool_calls:
                turns.append(replace(last, message=replace(last.message, tool_calls=calls)))
        for number in range(numbers[-1] + 1 if numbers else 0):
            said = [turn.message for turn, place in zip(turns, numbers, strict=False) if place == number]
            text = said.pop() if said and not said[-1].tool_calls else None
            rounds.append(RoundTurns(said, text))
        view.memo["made"] = context.replays.play(context.replay_env, record, rounds)
    return view.memo["made"].end(view.round).state, wanted


def gold_end(context: Context, view: View, gold: Json) -> RoundEnd:
    """Return state and results after the gold calls: of an episode all, of a round those up to it. Raises as `replay`."""
    if context.replay_env is None:
        raise UnscorableError("this run provides no environment to replay on")
    by_round = view.scope != "episode"
    if by_round and (not isinstance(gold, (list, tuple)) or len(gold) <= view.round):
        raise UnscorableError(f"replay by round: there are no gold calls for round {view.round}")
    key = ("gold", by_round, id(gold))
    if key not in view.memo:
        record, rounds = view.trajectory, gold if by_round else [gold]
        calls = (call for part in rounds if isinstance(part, (list, tuple)) for call in part)
        if record.user_calls and any(isinstance(call, Mapping) and call.get("by") == "user" for call in calls):
            record = replace(record, user_calls=[])  # the gold's user calls replace the recorded ones
        opening = _answer(record, -1, [message for message in record.messages[: view.course.opening] if message.role == "user"])
        texts = _texts(record, view.course)[: len(rounds)] if by_round else [RoundTexts()]

        def user_side(repeats: bool) -> tuple[Any, ...]:
            """List the opening, then per round the texts inside it and at its end, up to the last round's calls; without the
            policy's words if the user `repeats`."""
            side: list[Any] = [opening]
            for said in texts:
                side.append(tuple(text.answer if repeats else text for text in said.inside))
                side.append(said.end.answer if said.end is not None and repeats else said.end)
            return tuple(side[:-1])

        played = context.replays.gold(context.replay_env, record, rounds, lambda: _gold_rounds(rounds, texts), user_side)
        view.memo[key] = (gold, played)  # keeps the gold alive, so that its id stays unique
    found: Replay = view.memo[key][1]
    return found.end(view.round if by_round else 0)


def _gold_rounds(rounds: Sequence[Json], texts: Sequence[RoundTexts]) -> tuple[list[RoundTurns], UnscorableError | None]:
    """Return the rounds to play and the fault of the gold after them, if any. Texts inside a round follow its gold calls, since
    their positions between these are unknown."""
    found: list[RoundTurns] = []
    numbers = count()
    for part, said in zip(rounds, texts, strict=False):
        turns: list[Message | ToolCall] = []
        try:
            for gold in gold_calls(part, to_make=True):
                call = ToolCall(gold.name, dict(gold.arguments), id=f"gold-{next(numbers)}")
                turns.append(call if gold.by == "user" else Message("assistant", "", (call,)))
        except UnscorableError as error:
            return found, error
        turns += [Message("assistant", text.said) for text in said.inside]
        found.append(RoundTurns(turns, None if said.end is None else Message("assistant", said.end.said)))
    return found, None


class Text(NamedTuple):
    """A text of the policy, and the user's calls and texts that followed."""

    said: str
    answer: tuple[str, ...]


class RoundTexts(NamedTuple):
    """The texts of a round: `inside` those that the user did not answer, `end` the last, None if a turn with calls ends it."""

    inside: Sequence[Text] = ()
    end: Text | None = None


def _texts(record: Trajectory, course: EpisodeRounds) -> list[RoundTexts]:
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


def _answer(record: Trajectory, turn: int, said: Sequence[Message]) -> tuple[str, ...]:
    did = (f"{made.call.name} {made.call.arguments}" for made in record.user_calls if made.turn == turn)
    return (*did, *(message.content for message in said))


# State

_POINTER = {"type": "string", "pattern": "^(/|$)"}


@LEAVES.register("state.match")
class StateMatch(Leaf):
    """Compare the final state with the expected one: a literal, or that of a replay environment after the gold calls."""

    formula: ClassVar[str] = (
        "by=hash: 1 if the canonical states are equal; by=fields: 1 if all fields are equal (credit=all), or "
        "equal fields / fields of either state (credit=partial); `ignore`: pointers left out on both sides"
    )
    schema: ClassVar[dict[str, Any]] = {
        **object_schema(
            {
                "expect": {},
                "replay": or_ref({"type": "array", "items": {"type": ["object", "array"]}}),
                "path": _POINTER,
                "by": {"enum": ["hash", "fields"]},
                "credit": {"enum": ["all", "partial"]},
                "compare": {"enum": ["exact", "superset"]},
                "ignore": {"type": "array", "items": _POINTER},
                **EQUALITY,
            }
        ),
        "oneOf": [{"required": ["expect"]}, {"required": ["replay"]}],
    }
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/state"}, "by": "fields", "credit": "partial"}
    scopes: ClassVar[tuple[str, ...]] = ("episode", "round")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.by = args.get("by", "fields")
        only_fields = sorted({"credit", "compare", "strings", "abs", "rel"} & set(args))
        if self.by == "hash" and only_fields:
            raise ValueError(f"{only_fields[0]}: has no effect with by: hash (use by: fields)")
        need_replay_env(args, context)
        self.path = parse_pointer(args.get("path", ""))
        self.ignore = [parse_pointer(pointer) for pointer in args.get("ignore", [])]
        self.cut = (self.path, tuple(self.ignore)) if self.path or self.ignore else None
        self.rule = EqualityRule.of(args)

    def blocks(self) -> bool:
        return "replay" in self.args

    def read(self, view: View, args: Args) -> Reading:
        if "replay" in args:
            own, gold = replay(self.context, view, args["replay"])
            if self.by == "hash" and not own.empty:
                wanted_part = gold.part(self.cut, self._cut)
                return _by_hash(wanted_part if own.same(gold) else own.part(self.cut, self._cut), wanted_part)
            found, wanted = own.value, gold.value
        else:
            if view.scope != "episode":
                raise UnscorableError("the state at the end of a round is only known from a replay")
            found, wanted = view.trajectory.state, args["expect"]
        if found is None:
            raise UnscorableError("the environment gave no final state")
        # `expect` is the value at `path`; a replay ends in a whole state, which is cut to `path` too.
        found, wanted = self._cut(found), _without(wanted, self.ignore) if "expect" in args else self._cut(wanted)
        if self.by == "hash":
            return _by_hash(FrozenState(found), FrozenState(wanted))
        have, need = dict(leaves_of(found)), dict(leaves_of(wanted))
        wrong = [key for key, value in need.items() if key not in have or not same(have[key], value, self.rule)]
        extra = [] if args.get("compare") == "superset" else [key for key in have if key not in need]
        total, equal = len(need) + len(extra), len(need) - len(wrong)
        value = equal / total if args.get("credit") == "partial" and total else float(not wrong and not extra)
        each = {key[0]: {"expected": brief(need[key]), "found": brief(have.get(key))} for key in wrong[:5]}
        places = {"wrong": brief([key[0] for key in wrong]), "extra": brief([key[0] for key in extra])}
        return Reading(value, {"fields": total, "equal": equal, "each": each, **places})

    def _cut(self, state: Json) -> Json:
        """Return the compared part of a state."""
        found = follow(state, self.path)
        if isinstance(found, Absent):
            raise UnscorableError(f"path {self.args.get('path')!r} resolves to nothing in the state")
        return _without(found, self.ignore)


def _by_hash(found: FrozenState, wanted: FrozenState) -> Reading:
    try:
        gold = wanted.digest
        own = gold if found.same(wanted) else found.digest
    except (ValueError, TypeError) as error:
        raise UnscorableError(f"a state is not a JSON value: {error}") from error
    return Reading(float(own == gold), {"state": own[:16], "gold": gold[:16]})


def _without(value: Json, ignore: list[tuple[str, ...]]) -> Json:
    if not ignore or not isinstance(value, (Mapping, list, tuple)):
        return value
    here = {tokens[0] for tokens in ignore if len(tokens) == 1}
    deeper = {tokens[0]: [rest[1:] for rest in ignore if len(rest) > 1 and rest[0] == tokens[0]] for tokens in ignore if tokens}
    if isinstance(value, Mapping):
        return {key: _without(item, deeper.get(key, [])) for key, item in with_nfc_keys(value).items() if key not in here}
    # The same positions are removed from both states, so later items are still aligned.
    return [_without(item, deeper.get(str(i), [])) for i, item in enumerate(value) if str(i) not in here]


@LEAVES.register("state.assert")
class StateAssert(Leaf):
    """Score 1 if one value in the final state satisfies the comparisons."""

    formula: ClassVar[str] = "1 if every comparison holds for the value at `path`, else 0; `absent` without a value"
    schema: ClassVar[dict[str, Any]] = {
        **object_schema({"path": _POINTER, **COMPARISON_SCHEMA, "absent": {"enum": [0, None]}, **EQUALITY}, ("path",)),
        "anyOf": [{"required": [key]} for key in (*COMPARISONS, "exists")],
    }
    example: ClassVar[dict[str, Any]] = {"path": "/orders/0/status", "eq": "shipped", "absent": 0}
    scopes: ClassVar[tuple[str, ...]] = ("episode",)

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.path = parse_pointer(args["path"])
        self.rule = EqualityRule.of(args)

    def read(self, view: View, args: Args) -> Reading:
        if view.trajectory.state is None:
            raise UnscorableError("the environment gave no final state")
        found = follow(view.trajectory.state, self.path)
        comparison = {key: args[key] for key in (*COMPARISONS, "exists") if key in args}
        verdict = holder(comparison, self.rule)(found)
        if verdict is None:
            if args.get("absent") is None:
                raise UnscorableError(f"path {args['path']!r} resolves to nothing in the state (`absent`: 0 scores that)")
            return Reading(0.0, {"path": args["path"], "absent": True, "expected": brief(comparison)})
        said = None if found is ABSENT else brief(found)
        return Reading(float(verdict), {"path": args["path"], "found": said, "expected": brief(comparison)})


@LEAVES.register("state.number")
class StateNumber(Leaf):
    """Score a number in the final state, such as the verdict of a task's tests."""

    formula: ClassVar[str] = "(x - low) / (high - low), cut to [0, 1], of the number x at `path`; `absent` without one"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"path": _POINTER, "low": {"type": "number"}, "high": {"type": "number"}, "absent": {"enum": [0, None]}}, ("path",)
    )
    example: ClassVar[dict[str, Any]] = {"path": "/verdict/reward", "low": 0, "high": 1, "absent": 0}
    scopes: ClassVar[tuple[str, ...]] = ("episode",)

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.path = parse_pointer(args["path"])
        self.low, self.high = float(args.get("low", 0.0)), float(args.get("high", 1.0))
        if not self.low < self.high:
            raise RewardSpecError(f"state.number: low = {self.low:g} is not below high = {self.high:g}")

    def read(self, view: View, args: Args) -> Reading:
        if view.trajectory.state is None:
            raise UnscorableError("the environment gave no final state")
        found = follow(view.trajectory.state, self.path)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            if args.get("absent") is None:
                raise UnscorableError(f"path {args['path']!r} has no number in the state (`absent`: 0 scores that)")
            return Reading(0.0, {"path": args["path"], "found": None if found is ABSENT else brief(found)})
        value = min(max((found - self.low) / (self.high - self.low), 0.0), 1.0)
        return Reading(value, {"path": args["path"], "found": found})


# Results of tools


@LEAVES.register("results.contains")
class ResultsContains(Leaf):
    """Score the expected texts, or the results of the gold calls, by their occurrence in the tools' results."""

    formula: ClassVar[str] = (
        "expect: as text.contains, over the answers to the calls made (without errors). replay: 1 if every "
        "answer to the gold calls on a replay environment also occurs here (as a multiset; in a round: up to its end), "
        "credit=partial: the share of them that does"
    )
    schema: ClassVar[dict[str, Any]] = {
        **object_schema(
            {
                "expect": or_ref({"type": ["string", "number", "array"], "items": {"type": ["string", "number"]}}),
                "replay": or_ref({"type": "array", "items": {"type": ["object", "array"]}}),
                "mode": {"enum": ["all", "any"]},
                "credit": {"enum": ["all", "partial"]},
                "strings": {"enum": list(NORMALIZERS)},
                "word": {"type": "boolean"},
                "by": BY,
            }
        ),
        "oneOf": [{"required": ["expect"]}, {"required": ["replay"]}],
    }
    example: ClassVar[dict[str, Any]] = {"expect": "booking confirmed", "strings": "fold"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("credit") == "partial" and args.get("mode") == "any":
            raise ValueError("credit: partial counts all expected texts, so it cannot be used with mode: any")
        need_replay_env(args, context)
        if "replay" in args and ("mode" in args or "word" in args):
            raise ValueError("replay: compares whole answers; mode and word have no effect")
        if "replay" in args and args.get("by", "assistant") != "assistant":
            raise ValueError("replay: compares the results of the policy's calls, so by has no effect. Leave it out")

    def blocks(self) -> bool:
        return "replay" in self.args

    def read(self, view: View, args: Args) -> Reading:
        if "replay" not in args:
            # Without error results, which may repeat the arguments: calling with the expected text is not finding it.
            made = view.made(args.get("by", "assistant"))
            answers = [m.result.content for m in made if m.result is not None and m.result.error is None]
            return texts_found(answers, wanted_texts(args["expect"]), args)
        fold = NORMALIZERS[args.get("strings", "exact")]
        wanted = [fold(text) for text in gold_end(self.context, view, args["replay"]).answers]
        upto = view.turns[-1].index if view.turns else -1
        # Results of earlier rounds count too, since the policy still has them in its context.
        turns = view.trajectory.turns if view.scope == "round" else view.turns
        got = Counter([fold(r.content) for turn in turns if turn.index <= upto for r in turn.results])
        missing = []
        for text in wanted:
            if got[text] > 0:
                got[text] -= 1
            else:
                missing.append(text)
        share = 1.0 - len(missing) / len(wanted) if wanted else 1.0
        value = share if args.get("credit") == "partial" else float(not missing)
        return Reading(value, {"expected": len(wanted), "missing": brief(missing)})
