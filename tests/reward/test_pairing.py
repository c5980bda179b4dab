"""Pairs by hash and all pairs at once: the same result as the optimal assignment, pair by pair and by trying them all."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory, Turn
from agentrl.reward import Scorer, call_matching, compile_spec
from agentrl.reward.call_matching import ARGUMENTS, CALL_FORMS, CallRule, declared_gold, gold_calls, parts
from agentrl.reward.values import NORMALIZERS, EqualityRule, same
from tests.reward.reward_reference import most

VALUES = st.one_of(
    st.sampled_from([0, 1, 1.0, True, None, "a", "A", " a", float("nan")]),
    st.lists(st.sampled_from([1, True, "a"]), max_size=2),
    st.dictionaries(st.sampled_from("xy"), st.sampled_from([1, True, "a"]), max_size=2),
)
ARGS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from("fg"), ARGS), max_size=3)


def made_of(calls: list[tuple[str, dict[str, Any]]]) -> list[ToolCall]:
    return [ToolCall(name, arguments, id=str(i)) for i, (name, arguments) in enumerate(calls)]


def scored(made: list[ToolCall], want: list[Any], **args: Any) -> float | None:
    task = Task("t", 0, gold={"calls": want})
    turn = Turn(0, Message("assistant", "", tuple(made)))
    return _scorer(tuple(args.items())).score(Trajectory("T-v0", task, turns=[turn])).value


@cache
def _scorer(args: tuple[tuple[str, Any], ...]) -> Scorer:
    root = {"use": "calls.match", "args": {"expect": {"$": "/task/gold/calls"}, **dict(args)}}
    return compile_spec({"agentrl_reward": 1, "name": "pairs", "root": root})


ALL = st.lists(st.tuples(st.sampled_from("fg"), ARGS, st.none()), max_size=3)
SOME = st.lists(
    st.tuples(st.sampled_from("fg"), ARGS, st.none() | st.lists(st.sampled_from("abc"), max_size=2, unique=True)), max_size=3
)
"""Expected calls: of each the arguments that count, None for all."""


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("strings", ["exact", "bfcl"])
@pytest.mark.parametrize("expected", [ALL, SOME], ids=["all arguments count", "some count"])
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_calls_are_paired_as_the_best_of_all_assignments_pairs_them(
    at_once: bool, strings: str, expected: Any, data: Any
) -> None:
    """Equal calls by hash, unless only some of their arguments count."""
    made, wanted, rule = made_of(data.draw(CALLS)), data.draw(expected), EqualityRule(normalize=NORMALIZERS[strings])
    want: list[Any] = [{"name": n, "arguments": a, **({} if c is None else {"compare": c})} for n, a, c in wanted]

    def credit(call: ToolCall, other: Any) -> float:
        have, need = call.arguments or {}, other["arguments"]
        counted = other.get("compare", have.keys() | need.keys())
        alike = [k for k in counted if (k in have) == (k in need) and (k not in have or same(have[k], need[k], rule))]
        return (1 + len(alike)) / (1 + len(counted)) if call.name == other["name"] else 0.0

    partial = [[credit(call, other) for other in want] for call in made]
    full = [[float(one == 1.0) for one in row] for row in partial]
    size = max(len(made), len(want))
    with pytest.MonkeyPatch.context() as patch:
        if at_once:
            patch.setattr(call_matching, "MANY", 0)
        for credits, how in ((full, {"credit": "matched"}), (partial, {"credit": "partial"})):
            found = scored(made, want, **how, strings=strings)
            assert found == pytest.approx(most(credits) / size if size else 1.0)
        if expected is ALL:  # else equality is not transitive
            assert scored(made, want, credit="matched", assign="greedy", strings=strings) == scored(
                made, want, credit="matched", strings=strings
            )


FORMS = [("literal", {}), ("literal", {"absolute": 1.0}), ("sets", {}), ("bfcl", {})]


@pytest.mark.parametrize("arguments", [name for name in ARGUMENTS if name != "ignore"])
@pytest.mark.parametrize(("form", "tolerance"), FORMS, ids=["literal", "tolerance", "sets", "bfcl"])
@given(st.lists(ARGS, min_size=1, max_size=4), st.lists(ARGS, min_size=1, max_size=4), st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_credit_of_all_pairs_at_once_is_that_of_each(
    arguments: str, form: str, tolerance: Any, made: Any, want: Any, rng: random.Random
) -> None:
    if form != "literal":
        want = [{key: [value, *rng.choice([[], [""], ["a"]])] for key, value in call.items()} for call in want]
    gold = gold_calls([{"f": call} if form == "bfcl" else {"name": "f", "arguments": call} for call in want], CALL_FORMS[form])
    if form == "bfcl":
        properties = {key: {"type": rng.choice(["string", "integer", "float", "boolean", "array"])} for key in "abc"}
        gold = declared_gold(gold, [{"name": "f", "parameters": {"properties": properties, "required": rng.sample("abc", 1)}}])
    rule = CallRule(CALL_FORMS[form], arguments, EqualityRule(normalize=NORMALIZERS["fold"], **tolerance))
    calls = made_of([("f", call) for call in made])
    each = [[rule.part(call, wanted) for wanted in gold] for call in calls]
    assert parts(calls, gold, rule).tolist() == each


HOW: list[dict[str, Any]] = [
    {"order": "ordered"}, {"order": "ordered", "credit": "partial"}, {"order": "ordered", "abs": 1.0}, {"arguments": "ignore"},
    {"order": "ordered", "arguments": "superset"}, {"arguments": "subset"}, {"assign": "greedy", "abs": 1.0},
    {"credit": "toolrl"}, {"assign": "reuse", "compare": "superset", "arguments": "names"},
    {"credit": "toolrl", "abs": 0.5, "rel": 0.5}, {"credit": "toolrl", "assign": "greedy"}, {"credit": "partial", "rel": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("how", HOW, ids=str)
@given(CALLS, CALLS)
@settings(max_examples=25, deadline=None)
def test_many_calls_are_paired_as_few_are(how: dict[str, Any], calls: Any, wanted: Any) -> None:
    made, want = made_of(calls), [{"name": name, "arguments": arguments} for name, arguments in wanted]

    def score() -> Any:
        episode = Trajectory("T-v0", Task("t", 0, gold={"calls": want}), turns=[Turn(0, Message("assistant", "", tuple(made)))])
        found = _scorer(tuple({"credit": "matched", **how}.items())).score(episode)
        return found.value, found.evidence

    few = score()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_matching, "MANY", 0)
        assert score() == few


SCALARS = st.sampled_from(
    [0, 1, 1.0, 1.5, -2, True, False, None, "a", "A", "1", 2**52, 2**60, 2**60 + 1, float("nan"), float("inf")]
)
NESTED = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xy"), inner), max_leaves=5
)


@given(st.lists(NESTED, min_size=1, max_size=6), st.lists(NESTED, min_size=1, max_size=6), st.sampled_from(["exact", "fold"]))
@settings(max_examples=200, deadline=None)
def test_nested_values_are_compared_at_once_as_each_pair(made: list[Any], gold: list[Any], strings: str) -> None:
    for tolerance in ({"absolute": 0.5}, {"relative": 0.6}, {"absolute": 1.0, "relative": 1.0}):
        rule = EqualityRule(normalize=NORMALIZERS[strings], **tolerance)
        each = [[same(one, other, rule) for other in gold] for one in made]
        assert call_matching._literal_fits(made, gold, rule).tolist() == each


def test_many_calls_are_not_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 calls in order against 2,000 expected ones took half a minute; with lists and a tolerance two."""
    compared, full, fits = list[int](), CallRule.full, CallRule.value_fits
    monkeypatch.setattr(call_matching, "same", lambda *pair: compared.append(1) or same(*pair))
    monkeypatch.setattr(CallRule, "full", lambda *pair: compared.append(1) or full(*pair))
    monkeypatch.setattr(CallRule, "value_fits", lambda *pair: compared.append(1) or fits(*pair))
    made = made_of([("f", {"x": place}) for place in range(100)])
    want = [{"name": "f", "arguments": {"x": [(place + 1) % 100]}} for place in range(100)]
    lists = made_of([("f", call["arguments"]) for call in want])
    assert scored(lists, want[::-1], abs=0.1) == 1 and scored(lists, want[::-1], abs=0.1, credit="toolrl") == 1
    for how in (*HOW[:4], {"form": "sets", "assign": "greedy"}):
        scored(made, want, **{"credit": "matched", **how})
    assert len(compared) < 3_000
    monkeypatch.setattr(call_matching, "MOST_PAIRS", 9_000)
    want[0]["name"] = "g"
    assert scored(made, want, order="ordered") is scored(made, want, arguments="ignore") is None
