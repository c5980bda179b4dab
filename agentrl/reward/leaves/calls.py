"""Leaves that score tool calls: schema, none, match, and the graded reward of ToolRL."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from agentrl.data.trajectory import Json, Message, ToolCall, Turn
from agentrl.reward import call_matching as assign
from agentrl.reward.call_matching import (
    ARGUMENTS,
    CALL_FORMS,
    CallForm,
    CallRule,
    GoldCall,
    declared_gold,
    equal_pairs,
    gold_calls,
    parts,
)
from agentrl.reward.leaf import BY, EQUALITY, LEAVES, REF, Args, Context, Leaf, Made, Reading, View, object_schema, or_ref
from agentrl.reward.values import EqualityRule, UnscorableError, brief, exact, same, with_nfc_keys
from agentrl.utils.parsing import TwiceError, own_name
from agentrl.utils.schemas import BadSchemaError, checked_validator, first_fault, own_names


@LEAVES.register("calls.schema")
class CallsSchema(Leaf):
    """Score the share of calls that name an available tool and match its parameters' JSON Schema."""

    formula: ClassVar[str] = (
        "valid calls / calls (credit=partial), or 1 if all are valid (credit=all); `empty` if there "
        "is no call; check=parse only requires that the arguments are a JSON object"
    )
    schema: ClassVar[dict[str, Any]] = object_schema(
        {
            "check": {"enum": ["schema", "parse"]},
            "credit": {"enum": ["partial", "all"]},
            "empty": {"enum": [0, 1, None]},
            "by": BY,
        }
    )
    example: ClassVar[dict[str, Any]] = {"credit": "all"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        if args.get("by", "assistant") != "assistant" and args.get("check", "schema") == "schema":
            raise ValueError("the record has the schemas of the policy's tools only; with by: user or both give check: parse")

    def read(self, view: View, args: Args) -> Reading:
        calls = view.made(args.get("by", "assistant"))
        if not calls:
            empty = args.get("empty", 0)
            return Reading(None if empty is None else float(empty), {"calls": 0})
        schemas: dict[str, Json] | None = None
        if args.get("check", "schema") == "schema":
            tools = [tool.get("function") for tool in view.trajectory.tools]
            schemas = {tool["name"]: tool.get("parameters", {}) for tool in tools if isinstance(tool, Mapping) and "name" in tool}
            if not schemas:
                raise UnscorableError("the trajectory has no tool schemas")
        # Cached by name within the episode, since a key of the shared cache is the whole schema as JSON.
        validators: dict[str, Any] = {}
        errors: list[Json] = []
        for index, made in enumerate(calls):
            fault = _fault(made.call, schemas, validators)
            if fault is not None:
                errors.append({"call": index, "name": made.call.name[:100], "fault": fault})
        valid = len(calls) - len(errors)
        value = valid / len(calls) if args.get("credit", "partial") == "partial" else float(not errors)
        return Reading(value, {"calls": len(calls), "valid": valid, "faults": errors[:20]})


@LEAVES.register("calls.none")
class CallsNone(Leaf):
    """Score 1 if no call was made (or, with `names`, no call of these tools)."""

    formula: ClassVar[str] = "1 if no call (of `names`, if given) was made, else 0"
    schema: ClassVar[dict[str, Any]] = object_schema(
        {"names": {"type": "array", "items": {"type": "string"}, "minItems": 1}, "by": BY}
    )
    example: ClassVar[dict[str, Any]] = {"names": ["delete_account"]}

    def read(self, view: View, args: Args) -> Reading:
        names = set(map(exact, args.get("names", ())))
        calls = view.made(args.get("by", "assistant"))
        made = [made.call.name for made in calls if not names or exact(made.call.name) in names]
        return Reading(float(not made), {"made": brief(made)})


def _fault(call: ToolCall, schemas: Mapping[str, Json] | None, validators: dict[str, Any]) -> str | None:
    if call.arguments is None:
        return str(brief(call.error or "malformed"))
    if schemas is None:
        return None
    if (name := own_name(call.name, schemas)) not in schemas:
        return "no such tool"
    if name not in validators:
        validators[name] = _validator(json.dumps(schemas[name], default=repr))
    try:
        error = first_fault(validators[name], own_names(call.arguments, schemas[name]))
    except TwiceError as twice:
        return str(twice)
    except TimeoutError as late:
        raise UnscorableError(str(late)) from late
    return None if error is None else str(brief(error.message))


@lru_cache(maxsize=4096)  # bounded, since an environment may generate tools for each task
def _validator(schema: str) -> Any:
    """Build the validator of a JSON Schema text; cached, since building takes longer than most validations."""
    try:
        return checked_validator(json.loads(schema))
    except BadSchemaError as error:
        raise UnscorableError(f"a tool's parameters are not a JSON Schema: {error}") from error


# The graded call reward of ToolRL (Qian et al. 2025, arXiv 2504.13958, section 3.3), scaled to [0, 1]


def grade_calls(made: Sequence[ToolCall], gold: Sequence[GoldCall], rule: EqualityRule, how: str) -> Reading:
    """Compute R_max / S_max of the paper; `scale: [-3, 3]` gives its R_correct = 6 R_max / S_max - 3.

    r_name = |names made and expected| / |names made or expected| (as multisets), r_param = sum over the
    expected calls of the Jaccard index of the parameter names, r_value = number of parameters with the
    correct value, S_max = 1 + |G| + sum of |keys(G_j)|. Only calls with the same name pair.
    """
    names_made, names_gold = Counter(call.name for call in made), Counter(call.name for call in gold)
    both = sum(min(count, names_gold[name]) for name, count in names_made.items())
    either = len(made) + len(gold) - both
    if either == 0:
        return Reading(1.0, {"made": 0, "expected": 0})
    name = both / either
    # Pairs of maximum total weight: first equal calls by hash, then the others by cubic-time assignment.
    #
    # Some optimal assignment contains all equal pairs: if a equals b, any x and y have weight(x, b) + weight(a, y) <=
    # weight(a, b) + weight(x, y), since 1 - Jaccard index is a metric and so is, over the arguments of a, the number of values
    # that differ. Pairs (x, b), (a, y) can thus be exchanged for (a, b), (x, y) without loss. With a tolerance, equality is not
    # transitive, so there is no hash.
    equal = equal_pairs(made, gold, rule) if rule.strict and how != "greedy" else []
    weights = partial(_weights, rule)
    others = _greedy(made, gold, weights) if how == "greedy" else assign.pair_rest(made, gold, equal, weights)
    scores = [_pair_scores(made[i], gold[j], rule) for i, j in others]
    keys = len(equal) + sum(key for key, _ in scores)
    values = sum(len(gold[j].arguments) for _, j in equal) + sum(value for _, value in scores)
    top = 1.0 + len(gold) + sum(len(call.arguments) for call in gold)
    evidence = {
        "made": len(made),
        "expected": len(gold),
        "pairs": [list(pair) for pair in sorted([*equal, *others])],
        "r_name": name,
        "r_param": keys,
        "r_value": values,
        "s_max": top,
    }
    return Reading((name + keys + values) / top, evidence)


def _greedy(made: Sequence[ToolCall], gold: Sequence[GoldCall], weights: assign.BlockWeights) -> assign.Pairs:
    """Assign the best remaining call with its name to each expected call in turn (ties: the first)."""
    table, pairs = np.array(assign.all_weights(made, gold, weights), dtype=np.float64), list[tuple[int, int]]()
    for j in range(len(gold) if made else 0):
        row = int(table[:, j].argmax())
        if table[row, j] > 0:
            pairs.append((row, j))
            table[row] = 0.0
    return pairs


def _weights(rule: EqualityRule, made: Sequence[ToolCall], gold: Sequence[GoldCall]) -> assign.Weights:
    """Compute the summed scores of names and values for all pairs of calls of one function."""
    if len(made) * len(gold) < assign.MANY:
        return [[sum(_pair_scores(a, b, rule)) if a.name == b.name else 0.0 for b in gold] for a in made]
    shared, fitting, _ = assign.shared_arguments(made, gold, CallRule(values=rule))
    own, wanted = (np.array([float(len(call.arguments or ())) for call in calls]) for calls in (made, gold))
    either = own[:, None] + wanted - shared
    same_names: assign.Matrix = np.divide(shared, either, out=np.ones_like(shared), where=either > 0)
    return same_names + fitting


def _pair_scores(call: ToolCall, gold: GoldCall, rule: EqualityRule) -> tuple[float, int]:
    """Return the Jaccard index of the parameter names (1 if both have none) and the number of correct values."""
    made, wanted = call.arguments, gold.arguments
    if made is None:
        return 0.0, 0
    names = 1.0 if made.keys() == wanted.keys() else len(made.keys() & wanted.keys()) / len(made.keys() | wanted.keys())
    return names, sum(key in made and same(made[key], value, rule) for key, value in wanted.items())


# `calls.match`

_CALL = {"type": "object"}


@LEAVES.register("calls.match")
class CallsMatch(Leaf):
    """Pair made and expected calls one-to-one and score the pairs (see `formula`)."""

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
            "form": {"enum": list(CALL_FORMS)},
            "declared": or_ref({"type": "array", "items": _CALL}),
            "language": or_ref({"type": "string"}),
            "order": {"enum": ["free", "ordered", "prefix"]},
            "compare": {"enum": ["exact", "subset", "superset"]},
            "assign": {"enum": ["optimal", "greedy", "reuse"]},
            "credit": {"enum": ["all", "matched", "partial", "toolrl"]},
            "arguments": {"enum": list(ARGUMENTS)},
            "by": BY,
            **EQUALITY,
        },
        ("expect",),
    )
    example: ClassVar[dict[str, Any]] = {"expect": {"$": "/task/gold/calls"}, "order": "free", "compare": "superset"}

    def __init__(self, args: Args, context: Context) -> None:
        super().__init__(args, context)
        name = str(args.get("form", "literal"))
        self.form = CALL_FORMS.entry(name).make
        self.order = str(args.get("order", "free"))
        self.compare = str(args.get("compare", "exact"))
        self.assign = str(args.get("assign", "optimal"))
        self.credit = str(args.get("credit", "all"))
        self.by = str(args.get("by", "assistant"))
        self.rule = CallRule(self.form, str(args.get("arguments", "exact")), EqualityRule.of(args, self.form.strings))
        self.rules = {language: replace(self.rule, language=language) for language in self.form.languages or ("python",)}
        if not self.form.languages and ("declared" in args or "language" in args):
            raise ValueError(f"form: {name} reads no declarations, so declared and language have no effect (form: bfcl does)")
        if isinstance(language := args.get("language"), str) and language not in self.rules:
            raise ValueError(f"language must be one of {', '.join(self.rules)}, not {language!r}")
        if self.assign == "greedy" and self.order != "free":
            raise ValueError("assign: greedy is only for order: free")
        if self.assign == "reuse" and (
            self.order != "free" or self.compare != "superset" or self.credit not in ("all", "matched")
        ):
            raise ValueError("assign: reuse needs order: free, compare: superset, and credit: all or matched")
        if self.by != "assistant" and self.form.languages and "declared" not in args:
            raise ValueError(f"form: {name} reads the schemas of the policy's tools; with by: user or both give declared")
        if self.credit == "partial" and (self.assign == "greedy" or self.order == "prefix"):
            raise ValueError("credit: partial needs assign: optimal and order: free or ordered")
        if self.credit == "toolrl" and (self.order != "free" or self.form is not CallForm or "arguments" in args):
            raise ValueError("credit: toolrl needs order free and form literal, without 'arguments'")

    @classmethod
    def spreads(cls, args: Args) -> bool:
        return args.get("credit") in ("matched", "partial") and args.get("assign") != "reuse"

    def read(self, view: View, args: Args) -> Reading:
        gold = self._gold(view, args["expect"], args.get("declared"))
        made = view.made(self.by)
        if "made" in args:  # calls as data, for example from an answer, scored as if made; null for none
            items = args["made"] or []
            if not isinstance(items, list) or not all(
                isinstance(x, dict) and isinstance(x.get("name"), str) and isinstance(x.get("arguments"), dict | None)
                for x in items
            ):
                raise UnscorableError(f"made must be a list of calls (name: text, arguments: object), not {brief(items, 80)!r}")
            turn = next(reversed(view.trajectory.turns), Turn(-1, Message("assistant")))
            made = [Made(turn, ToolCall(x["name"], x.get("arguments")), None) for x in items]
        declared = {call.name: call.schema or {} for call in gold} if self.form.languages else None
        made = [_with_own_names(one, declared) for one in made]
        if self.credit == "toolrl":
            return grade_calls([item.call for item in made], gold, self.rule.values, self.assign)
        if (language := args.get("language", "python")) not in self.rules:
            raise UnscorableError(f"language must be one of {', '.join(self.rules)}, not {brief(language, 80)!r}")
        pairs, credit = self._pair(made, gold, self.rules[language])
        credits = [credit(i, j) for i, j in pairs]
        size = {"exact": max(len(made), len(gold)), "superset": len(gold), "subset": len(made)}[self.compare]
        # Without calls the value is 0, unless none were expected.
        value = min(sum(credits) / size, 1.0) if size else float(not gold)
        if self.credit == "all":
            # A sum of quotients may be just below 1.
            value = 1.0 if value >= 1.0 - 1e-9 else 0.0
        shares: dict[int, float] | None = None  # of each turn: the credit of its calls' pairs
        if size and self.spreads(self.args):
            # A gold call is in at most one pair, so repeating a call earns nothing. User calls before the first turn belong to
            # that turn, as in `View.made`.
            shares = {}
            for (i, _), earned in zip(pairs, credits, strict=True):
                if earned and view.turns:
                    number = max(made[i].turn.index, view.turns[0].index)
                    shares[number] = shares.get(number, 0.0) + earned / size
        paired_made, paired_gold = {i for i, _ in pairs}, {j for _, j in pairs}
        evidence = {
            "made": len(made),
            "expected": len(gold),
            "pairs": [[i, j, round(credit, 6)] for (i, j), credit in zip(pairs, credits, strict=True)],
            "missing": [call.name[:100] for j, call in enumerate(gold) if j not in paired_gold],
            "extra": [item.call.name[:100] for i, item in enumerate(made) if i not in paired_made],
        }
        return Reading(value, evidence, shares)

    def _gold(self, view: View, expect: Json, functions: Json = None) -> list[GoldCall]:
        """Read the gold calls once for all parts of an episode that share them."""
        # Keyed by id, since hashing the gold would cost more than it saves; the memo keeps both alive, so ids stay unique.
        key = (self.form, self.by, id(expect), id(functions))
        if key not in view.memo:
            gold = [call for call in gold_calls(expect, self.form) if self.by in ("both", call.by or self.by)]
            known = declared_gold(gold, functions or view.trajectory.tools) if self.form.languages else gold
            view.memo[key] = (known, expect, functions)
        calls: list[GoldCall] = view.memo[key][0]
        return calls

    def _pair(self, made: Sequence[Made], gold: Sequence[GoldCall], rule: CallRule) -> tuple[assign.Pairs, Credit]:
        calls = [item.call for item in made]
        match: Credit = lambda i, j: 1.0 if rule.full(calls[i], gold[j]) else 0.0  # noqa: E731
        n, m = len(calls), len(gold)
        if self.assign == "reuse":
            fits = _tabulate(rule, calls, gold, match)
            found = [(next((i for i in range(n) if fits(i, j)), n), j) for j in range(m)]
            return [(i, j) for i, j in found if i < n], match
        # Equal positions from the start, up to the first pair that is not a full match.
        straight = [(i, i) for i in takewhile(lambda i: match(i, i), range(min(n, m)))]
        if self.order == "prefix" or len(straight) == min(n, m):
            return straight, match  # no assignment is better than a full match of the shorter side
        partly = self.credit == "partial"
        credit, credits = (lambda i, j: rule.part(calls[i], gold[j]) if partly else match(i, j)), partial(_credits, rule, partly)
        if self.order == "ordered":
            return assign.in_order(assign.all_weights(calls, gold, credits)), credit
        # If a full match is plain equality, hashing finds all. Some best assignment of partial credit has them too, as above:
        # 1 - credit is a metric (the share of differing arguments among those of either call, counting the name).
        plain = rule.form is CallForm and rule.arguments == "exact" and rule.values.strict
        by_key = plain and all(call.compare is None for call in gold)
        sure = equal_pairs(calls, gold, rule.values) if by_key else []
        if by_key and not partly:
            return sure, match
        if self.assign == "greedy":
            # Each expected call in turn takes the first free full match, and no choice is revised: this is how the Berkeley
            # leaderboard pairs parallel calls, which may miss a complete matching.
            fits, greedy = _tabulate(rule, calls, gold, match), dict[int, int]()
            rows = assign.by_name([call.name for call in calls])
            for j, wanted in enumerate(gold):
                row = next((i for i in rows.get(wanted.name, ()) if i not in greedy and fits(i, j)), None)
                if row is not None:
                    greedy[row] = j
            return sorted(greedy.items()), match
        return sorted([*sure, *assign.pair_rest(calls, gold, sure, credits)]), credit


Credit = Callable[[int, int], float]


def _tabulate(rule: CallRule, calls: Sequence[ToolCall], gold: Sequence[GoldCall], match: Credit) -> Credit:
    """Return `match`, backed by a table for many literal calls; other forms are slow per pair and need few pairs."""
    if len(calls) * len(gold) < assign.MANY or rule.form is not CallForm or any(call.compare is not None for call in gold):
        return match
    table = np.asarray(assign.all_weights(calls, gold, partial(_credits, rule, False))).tolist()
    return lambda i, j: float(table[i][j])


def _with_own_names(made: Made, declared: Mapping[str, Mapping[str, Json]] | None) -> Made:
    """Normalize a call's names like those of gold calls: to NFC, or to the `declared` spelling."""
    call = made.call
    if declared is None:
        if call.name.isascii() and "".join(call.arguments or ()).isascii():
            return made
        name, arguments = exact(call.name), call.arguments and dict(with_nfc_keys(call.arguments))
    else:
        name, arguments = own_name(call.name, declared), call.arguments
        with suppress(TwiceError):
            arguments = own_names(arguments, declared.get(name, {}))
        if name == call.name and arguments is call.arguments:
            return made
    return made._replace(call=replace(call, name=name, arguments=arguments))


def _credits(rule: CallRule, part: bool, calls: Sequence[ToolCall], wanted: Sequence[GoldCall]) -> assign.Weights:
    """Compute `rule.part` (`part`), or 1 per full match, for all pairs of calls of one function."""
    alone = not part and rule.form.languages and rule.arguments == "exact"  # the form checks all arguments together
    if len(calls) * len(wanted) >= assign.MANY and rule.arguments == "ignore":
        return np.ones((len(calls), len(wanted)))
    if alone or len(calls) * len(wanted) < assign.MANY or any(other.compare is not None for other in wanted):
        return [[rule.part(call, other) if part else float(rule.full(call, other)) for other in wanted] for call in calls]
    return parts(calls, wanted, rule) if part else parts(calls, wanted, rule) == 1.0
