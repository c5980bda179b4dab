"""`state.match` and `state.assert`: the environment's state at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.errors import RewardSpecError
from agentrl.reward.frozen import FrozenState
from agentrl.reward.leaf import (
    Args,
    Context,
    Leaf,
    Reading,
    UnscorableError,
    need_replay_env,
    object_schema,
    or_ref,
)
from agentrl.reward.pointer import ABSENT, Absent, follow, parse_pointer
from agentrl.reward.predicate import COMPARISON_SCHEMA, COMPARISONS, holds
from agentrl.reward.replay import replay
from agentrl.reward.values import NORMALIZERS, EqualityRule, brief, leaves_of, same
from agentrl.reward.view import View
from agentrl.trajectory import Json

_POINTER = {"type": "string", "pattern": "^(/|$)"}


class StateMatch(Leaf):
    """Whether the final state is the expected one: a literal, or that of a replay environment after the gold calls."""

    kind: ClassVar[str] = "state.match"
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
                "strings": {"enum": list(NORMALIZERS)},
                "abs": {"type": "number", "minimum": 0},
                "rel": {"type": "number", "minimum": 0},
            }
        ),
        "oneOf": [{"required": ["expect"]}, {"required": ["replay"]}],
    }
    example: ClassVar[dict[str, Any]] = {
        "expect": {"$": "/task/gold/state"},
        "by": "fields",
        "credit": "partial",
    }
    scopes: ClassVar[tuple[str, ...]] = ("episode", "round")

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.by = args.get("by", "fields")
        only_fields = sorted({"credit", "compare", "strings", "abs", "rel"} & set(args))
        if self.by == "hash" and only_fields:
            raise ValueError(f"{only_fields[0]}: has no effect with by: hash (use by: fields)")
        need_replay_env(args, context)
        context.replays.states |= "replay" in args
        self.path = parse_pointer(args.get("path", ""))
        self.ignore = [parse_pointer(pointer) for pointer in args.get("ignore", [])]
        self.cut = (self.path, tuple(self.ignore)) if self.path or self.ignore else None
        normalize = NORMALIZERS[args.get("strings", "exact")]
        self.rule = EqualityRule(float(args.get("abs", 0.0)), float(args.get("rel", 0.0)), normalize)

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
        # `expect` says what is at `path`; a replay ends in a whole state, of which the same part is taken.
        found, wanted = self._cut(found), _without(wanted, self.ignore) if "expect" in args else self._cut(wanted)
        if self.by == "hash":
            return _by_hash(FrozenState(found), FrozenState(wanted))
        return self._by_fields(found, wanted, args)

    def _cut(self, state: Json) -> Json:
        """What of a state is compared."""
        found = follow(state, self.path)
        if isinstance(found, Absent):
            raise UnscorableError(f"path {self.args.get('path')!r} resolves to nothing in the state")
        return _without(found, self.ignore)

    def _by_fields(self, found: Json, wanted: Json, args: Args) -> Reading:
        have, need = dict(leaves_of(found)), dict(leaves_of(wanted))
        wrong = [key for key, value in need.items() if key not in have or not same(have[key], value, self.rule)]
        extra = [] if args.get("compare") == "superset" else [key for key in have if key not in need]
        total = len(need) + len(extra)
        equal = len(need) - len(wrong)
        value = equal / total if args.get("credit") == "partial" and total else float(not wrong and not extra)
        each = {key[0]: {"expected": brief(need[key]), "found": brief(have.get(key))} for key in wrong[:5]}
        places = {"wrong": brief([key[0] for key in wrong]), "extra": brief([key[0] for key in extra])}
        return Reading(value, {"fields": total, "equal": equal, "each": each, **places})


def _by_hash(found: FrozenState, wanted: FrozenState) -> Reading:
    try:
        own, gold = found.digests(wanted)
    except (ValueError, TypeError) as error:
        raise UnscorableError(f"a state is not a JSON value: {error}") from error
    return Reading(float(own == gold), {"state": own[:16], "gold": gold[:16]})


def _without(value: Json, ignore: list[tuple[str, ...]]) -> Json:
    """The value without the parts at the pointers."""
    if not ignore or not isinstance(value, (Mapping, list, tuple)):
        return value
    here = {tokens[0] for tokens in ignore if len(tokens) == 1}
    deeper = {tokens[0]: [rest[1:] for rest in ignore if len(rest) > 1 and rest[0] == tokens[0]] for tokens in ignore if tokens}
    if isinstance(value, Mapping):
        return {key: _without(item, deeper.get(key, [])) for key, item in value.items() if key not in here}
    # The same places are left out of both states, so the items after them still face each other.
    return [_without(item, deeper.get(str(i), [])) for i, item in enumerate(value) if str(i) not in here]


class StateAssert(Leaf):
    """Whether one value in the final state satisfies the comparisons."""

    kind: ClassVar[str] = "state.assert"
    formula: ClassVar[str] = "1 if every comparison holds for the value at `path`, else 0; `absent` if there is none"
    schema: ClassVar[dict[str, Any]] = {
        **object_schema(
            {
                "path": _POINTER,
                **COMPARISON_SCHEMA,
                "absent": {"enum": [0, None]},
                "strings": {"enum": list(NORMALIZERS)},
                "abs": {"type": "number", "minimum": 0},
                "rel": {"type": "number", "minimum": 0},
            },
            ("path",),
        ),
        "anyOf": [{"required": [key]} for key in (*COMPARISONS, "exists")],
    }
    example: ClassVar[dict[str, Any]] = {"path": "/orders/0/status", "eq": "shipped", "absent": 0}
    scopes: ClassVar[tuple[str, ...]] = ("episode",)

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.path = parse_pointer(args["path"])
        normalize = NORMALIZERS[args.get("strings", "exact")]
        self.rule = EqualityRule(float(args.get("abs", 0.0)), float(args.get("rel", 0.0)), normalize)

    def read(self, view: View, args: Args) -> Reading:
        if view.trajectory.state is None:
            raise UnscorableError("the environment gave no final state")
        found = follow(view.trajectory.state, self.path)
        comparison = {key: args[key] for key in (*COMPARISONS, "exists") if key in args}
        verdict = holds(found, comparison, self.rule)
        if verdict is None:
            if args.get("absent") is None:
                raise UnscorableError(f"path {args['path']!r} resolves to nothing in the state (`absent`: 0 scores that)")
            return Reading(0.0, {"path": args["path"], "absent": True, "expected": brief(comparison)})
        said = None if found is ABSENT else brief(found)
        return Reading(float(verdict), {"path": args["path"], "found": said, "expected": brief(comparison)})


class StateNumber(Leaf):
    """A number in the final state, such as the verdict of a task's tests."""

    kind: ClassVar[str] = "state.number"
    formula: ClassVar[str] = "(x - low) / (high - low), cut to [0, 1], of the number x at `path`; `absent` if there is none"
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
