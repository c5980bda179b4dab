"""`calls.match`: how well the calls made match the expected calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from agentrl.reward import assign
from agentrl.reward.gold import ARGUMENTS, FORMS, CallRule, GoldCall, declared, gold_calls
from agentrl.reward.leaf import BY, REF, Args, Context, Leaf, Reading, UnscorableError, object_schema, or_ref
from agentrl.reward.leaves.toolrl import graded
from agentrl.reward.literals import LANGUAGES
from agentrl.reward.pairing import MANY, equal_pairs, parts
from agentrl.reward.values import NORMALIZERS, EqualityRule, brief
from agentrl.reward.view import Made, View
from agentrl.trajectory import Json, ToolCall

_CALL = {"type": "object"}
_NUMBER = {"type": "number", "minimum": 0}
_LANGUAGES = ("python", *LANGUAGES)


class CallsMatch(Leaf):
    """Pairs made and expected calls one-to-one and scores the pairs (see `formula`)."""

    kind: ClassVar[str] = "calls.match"
    formula: ClassVar[str] = (
        "M / D: M = sum of the pairs' credit under the assignment (matched: 1 for a full match; partial: "
        "(1 + correct arguments) / (1 + arguments)); D = max(made, expected) for exact, expected for superset, "
        "made for subset. credit=all: 1 if M / D is 1, else 0. assign=reuse: each expected call counts if some made call "
        "matches it, which may match others too. credit=toolrl: "
        "(r_name + r_param + r_value) / (1 + |G| + sum |keys(G_j)|)."
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "expect": or_ref({"type": "array", "items": _CALL}),
            "made": REF,
            "form": {"enum": list(FORMS)},
            "declared": or_ref({"type": "array", "items": _CALL}),
            "language": or_ref({"enum": list(_LANGUAGES)}),
            "order": {"enum": ["free", "ordered", "prefix"]},
            "compare": {"enum": ["exact", "subset", "superset"]},
            "assign": {"enum": ["optimal", "greedy", "reuse"]},
            "credit": {"enum": ["all", "matched", "partial", "toolrl"]},
            "arguments": {"enum": list(ARGUMENTS)},
            "strings": {"enum": list(NORMALIZERS)},
            "by": BY,
            "abs": _NUMBER,
            "rel": _NUMBER,
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {
        "expect": {"$": "/task/gold/calls"},
        "order": "free",
        "compare": "superset",
    }

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        self.form = str(args.get("form", "literal"))
        self.order = str(args.get("order", "free"))
        self.compare = str(args.get("compare", "exact"))
        self.assign = str(args.get("assign", "optimal"))
        self.credit = str(args.get("credit", "all"))
        self.by = str(args.get("by", "assistant"))
        strings = str(args.get("strings", "bfcl" if self.form == "bfcl" else "exact"))
        values = EqualityRule(float(args.get("abs", 0.0)), float(args.get("rel", 0.0)), NORMALIZERS[strings])
        self.rule = CallRule(self.form, str(args.get("arguments", "exact")), values)
        self.rules = {language: replace(self.rule, language=language) for language in _LANGUAGES}
        if self.form != "bfcl" and ("declared" in args or "language" in args):
            raise ValueError("declared and language are only for form: bfcl")
        if self.assign == "greedy" and self.order != "free":
            raise ValueError("assign: greedy is only for order: free")
        if self.assign == "reuse" and (
            self.order != "free" or self.compare != "superset" or self.credit not in ("all", "matched")
        ):
            raise ValueError(
                "assign: reuse asks which expected calls were made: order free, compare superset, credit all or matched"
            )
        if self.by != "assistant" and self.form == "bfcl" and "declared" not in args:
            raise ValueError("form: bfcl reads the schemas of the policy's tools; with by: user or both give declared")
        if self.credit == "toolrl" and (self.order != "free" or self.form != "literal" or "arguments" in args):
            raise ValueError("credit: toolrl needs order free and form literal, without 'arguments'")

    @classmethod
    def spreads(cls, args: Args) -> bool:
        return args.get("credit") in ("matched", "partial") and args.get("assign") != "reuse"

    def read(self, view: View, args: Args) -> Reading:
        gold = self._gold(view, args["expect"], args.get("declared"))
        made = _written(args["made"], view) if "made" in args else view.made(self.by)
        if self.credit == "toolrl":
            return graded([item.call for item in made], gold, self.rule.values, self.assign)
        pairs, credit = self._pair(made, gold, self._rule(args))
        credits = [credit(i, j) for i, j in pairs]
        value = _ratio(sum(credits), len(made), len(gold), self.compare)
        if self.credit == "all":
            # A sum of quotients may end just below 1.
            value = 1.0 if value >= 1.0 - 1e-9 else 0.0
        size = _size(len(made), len(gold), self.compare)
        shares = _shares(view, made, pairs, credits, size) if size and self.spreads(self.args) else None
        return Reading(value, _evidence(made, gold, pairs, credits), shares)

    def _rule(self, args: Args) -> CallRule:
        language = args.get("language", "python")
        if language not in self.rules:
            raise UnscorableError(f"language must be one of {', '.join(self.rules)}, not {brief(language, 80)!r}")
        return self.rules[language]

    def _gold(self, view: View, expect: Json, functions: Json = None) -> list[GoldCall]:
        """The gold calls, read once for all parts of an episode that share them."""
        # By id, since hashing the gold would cost more than it saves; the memo holds both, so ids stay unique.
        key = (self.form, self.by, id(expect), id(functions))
        if key not in view.memo:
            gold = [call for call in gold_calls(expect, self.form) if self.by in ("both", call.by or self.by)]
            known = declared(gold, functions or view.trajectory.tools) if self.form == "bfcl" else gold
            view.memo[key] = (known, expect, functions)
        calls: list[GoldCall] = view.memo[key][0]
        return calls

    def _pair(self, made: Sequence[Made], gold: Sequence[GoldCall], rule: CallRule) -> tuple[assign.Pairs, Credit]:
        n, m = len(made), len(gold)
        calls = [item.call for item in made]
        full, known = rule.full, dict[tuple[int, int], float]()

        # Remembered, because the prefix, the assignment and the evidence ask for the same pairs.
        def match(i: int, j: int) -> float:
            found = known.get((i, j))
            if found is None:
                found = known[i, j] = 1.0 if full(calls[i], gold[j]) else 0.0
            return found

        def part(i: int, j: int) -> float:
            return rule.part(calls[i], gold[j])

        if self.assign == "reuse":
            found = [(next((i for i in range(n) if match(i, j)), n), j) for j in range(m)]
            return [(i, j) for i, j in found if i < n], match
        straight = assign.prefix(match, n, m)
        if self.order == "prefix" or len(straight) == min(n, m):
            return straight, match  # no assignment is better than a full match of the shorter side
        credit = part if self.credit == "partial" else match
        if self.order == "ordered":
            return assign.in_order([[credit(i, j) for j in range(m)] for i in range(n)]), credit
        if self.credit == "partial" and self.assign == "optimal":
            return _best_parts(calls, gold, rule), credit
        if _by_key(rule, gold):  # a full match is then equality: pairs of equal calls are all there are, in any order
            return equal_pairs(calls, gold, rule.values), match
        rows = assign.by_name([call.name for call in calls])
        choices = [rows.get(call.name, []) for call in gold]
        if self.assign == "greedy":
            return assign.greedy_pairs(match, choices), match
        return assign.maximum(match, choices), match


def _written(value: Json, view: View) -> Sequence[Made]:
    """Calls that are data (an answer's, say) as if they had been made: [{"name", "arguments"}, ...], or null for none."""
    items = value or []
    if not isinstance(items, list) or not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in items):
        raise UnscorableError(f"made must be a list of calls, not {brief(value, 80)!r}")
    return [Made(view.trajectory.turns[-1], ToolCall(item["name"], item.get("arguments")), None) for item in items]


Credit = Callable[[int, int], float]


def _plain(gold: Sequence[GoldCall]) -> bool:
    return all(call.compare is None for call in gold)


def _by_key(rule: CallRule, gold: Sequence[GoldCall]) -> bool:
    """Whether a full match is plain equality, so that a hash finds it."""
    return rule.form == "literal" and rule.arguments == "exact" and rule.values.strict and _plain(gold)


def _best_parts(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: CallRule) -> assign.Pairs:
    """The pairs of most partial credit.

    Equal calls are paired first, since some best assignment contains them all: 1 - credit is then a metric (the share of
    differing arguments among those that either call has, the name counted in), so that for a equal to b
    credit(x, b) + credit(a, y) <= 1 + credit(x, y).
    """
    sure = equal_pairs(made, gold, rule.values) if _by_key(rule, gold) else []
    taken, met = {i for i, _ in sure}, {j for _, j in sure}
    rows = [i for i, call in enumerate(made) if i not in taken and call.arguments is not None]
    columns = [j for j in range(len(gold)) if j not in met]

    def block(here: Sequence[int], there: Sequence[int]) -> assign.Weights:
        calls, wanted = [made[rows[i]] for i in here], [gold[columns[j]] for j in there]
        if len(calls) * len(wanted) < MANY or rule.arguments == "ignore" or not _plain(wanted):
            return [[rule.part(call, other) for other in wanted] for call in calls]
        return parts(calls, wanted, rule)

    rest = assign.optimal_by_name([made[i].name for i in rows], [gold[j].name for j in columns], block)
    return sorted([*sure, *((rows[i], columns[j]) for i, j in rest)])


def _ratio(total: float, made: int, gold: int, compare: str) -> float:
    """Matched share; no calls made earn nothing unless none were expected."""
    size = _size(made, gold, compare)
    if size == 0:
        return 1.0 if gold == 0 else 0.0
    return min(total / size, 1.0)


def _size(made: int, gold: int, compare: str) -> int:
    return {"exact": max(made, gold), "superset": gold, "subset": made}[compare]


def _shares(view: View, made: Sequence[Made], pairs: assign.Pairs, credits: Sequence[float], size: int) -> dict[int, float]:
    """Each turn's share of the value: the credit of the pairs that its calls are in. A gold call is in one pair at most, so the
    same call made again earns nothing. What the user did before the first turn counts to it, as in `View.made`."""
    shares: dict[int, float] = {}
    for (i, _), credit in zip(pairs, credits, strict=True):
        if credit and view.turns:
            turn = max(made[i].turn.index, view.turns[0].index)
            shares[turn] = shares.get(turn, 0.0) + credit / size
    return shares


def _evidence(made: Sequence[Made], gold: Sequence[GoldCall], pairs: assign.Pairs, credits: Sequence[float]) -> dict[str, Any]:
    paired_made, paired_gold = {i for i, _ in pairs}, {j for _, j in pairs}
    return {
        "made": len(made),
        "expected": len(gold),
        "pairs": [[i, j, round(credit, 6)] for (i, j), credit in zip(pairs, credits, strict=True)],
        "missing": [call.name[:100] for j, call in enumerate(gold) if j not in paired_gold],
        "extra": [item.call.name[:100] for i, item in enumerate(made) if i not in paired_made],
    }
