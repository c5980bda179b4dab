"""Properties that hold for every spec and every episode, on random ones."""

import copy
import itertools
import json
import math
import random
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory, Turn
from agentrl.reward import Scorer, call_matching, compile_spec, token_rewards
from agentrl.reward.call_matching import ARGUMENTS, CALL_FORMS, CallRule, declared_gold, gold_calls, parts
from agentrl.reward.leaf import episode_view
from agentrl.reward.spec import published_schema
from agentrl.reward.values import NORMALIZERS, EqualityRule, equality_key, same
from agentrl.utils.errors import RewardSpecError
from tests.conftest import examples
from tests.reward.reward_episodes import call, episode, gold, leaf, spec
from tests.reward.reward_reference import most, reference, whole

names = st.sampled_from(["f", "g"])
values = st.sampled_from([0, 1, 1.0, True, "a", None])
arguments = st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2)
made_calls = st.tuples(names, arguments)
gold_lists = st.lists(st.fixed_dictionaries({"name": names, "arguments": arguments}), max_size=3)
malformed = st.builds(lambda name: ToolCall(name, None, id="bad", error="not JSON"), names)
turns = st.one_of(st.lists(st.one_of(made_calls, made_calls, malformed), min_size=1, max_size=2), st.sampled_from(["a", "b", ""]))
episodes = st.lists(turns, max_size=3).map(lambda items: episode(*items))

matches = st.fixed_dictionaries(
    {
        "expect": gold_lists,
        "order": st.sampled_from(["free", "ordered", "prefix"]),
        "compare": st.sampled_from(["exact", "superset", "subset"]),
        "credit": st.sampled_from(["all", "matched", "partial"]),
    }
).filter(lambda args: args["order"] != "prefix" or args["credit"] != "partial")
leaves = st.one_of(
    st.builds(lambda args: leaf("calls.match", args), matches),
    st.builds(lambda args: leaf("calls.none", args), st.sampled_from([{}, {"names": ["f"]}])),
    st.builds(lambda text: leaf("text.equals", {"expect": text}), st.sampled_from(["a", "b", {"$": "/task/gold/no"}])),
    st.builds(lambda most: leaf("cost.calls", {"max": most}), st.integers(1, 4)),
)

tenths = st.integers(-20, 20).map(lambda n: n / 10)
pairs = st.tuples(tenths, tenths).map(lambda pair: sorted(pair))


@st.composite
def nodes(draw, depth=3, scope="episode"):
    """A random node that is valid where it stands."""
    mods = {}
    if scope == "episode" and draw(st.integers(0, 3)) == 0:
        scope = draw(st.sampled_from(["turn", "call"]))
        mods = {"scope": scope, "reduce": draw(st.sampled_from(["sum", "mean", "last", "min", "all"]))}
    for key, strategy in (
        ("scale", st.one_of(pairs, pairs.map(lambda pair: pair[::-1]))),
        ("clip", pairs),
        ("missing", st.sampled_from(["skip", 0, 1, "invalid"])),
        ("when", st.integers(0, 2).map(lambda n: {"$": "/episode/turns", "gt": n})),
        ("weight", st.integers(0, 30).map(lambda n: n / 10)),
    ):
        if draw(st.integers(0, 3)) == 0:
            mods[key] = draw(strategy)
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return {**draw(leaves), **mods}
    below = nodes(depth=depth - 1, scope=scope)
    if draw(st.integers(0, 4)) == 0:
        other = draw(st.one_of(tenths, below))
        return {"op": "gate", "if": draw(below), "gte": draw(tenths), "then": draw(below), "else": other, **mods}
    op = draw(st.sampled_from(["sum", "mean", "product", "min", "max", "all", "any"]))
    of = draw(st.lists(below, min_size=1, max_size=3))
    if op == "mean" and not any(child.get("weight", 1) > 0 for child in of):
        of[0] = {**of[0], "weight": 1}
    return {"op": op, "of": of, **mods}


@settings(max_examples=examples(300), deadline=None)
@given(nodes(), episodes)
def test_the_compiled_spec_agrees_with_the_reference_evaluator(root, trajectory):
    score = compile_spec(spec(root)).score(trajectory)
    expected = reference(root, whole(trajectory))
    if expected is None or expected == "skip":
        assert score.value is None
    else:
        assert score.value == pytest.approx(float(expected), abs=1e-9)


EDITOR = jsonschema.Draft202012Validator(published_schema())
odd_values = st.sampled_from(
    [None, True, -1, 1.5, "", "turn", "x", [], [1, 2], {}, {"$": "/task"}, {"$": 3}, {"use": "x"}, float("nan")]
)


def paths_of(value, path=()):
    """Every place in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths_of(item, (*path, key))


@st.composite
def damaged(draw):
    """A valid spec with one place replaced, dropped or renamed."""
    broken = json.loads(json.dumps(spec(draw(nodes(depth=2)))))
    path = draw(st.sampled_from(list(paths_of(broken))))
    if not path:
        return draw(odd_values)
    target = broken
    for key in path[:-1]:
        target = target[key]
    how = draw(st.sampled_from(["replace", "drop", "rename"]))
    if how == "rename" and isinstance(target, dict):
        target[str(path[-1])[:-1] or "q"] = target.pop(path[-1])
    elif how == "drop":
        del target[path[-1]]
    else:
        target[path[-1]] = draw(odd_values)
    return broken


@settings(max_examples=examples(300), deadline=None)
@given(damaged(), episodes)
def test_a_damaged_spec_is_refused_with_its_place_or_scores_without_a_crash(broken, trajectory):
    try:
        compiled = compile_spec(broken)
    except RewardSpecError as error:
        assert "at " in str(error) or isinstance(broken, str)  # a text is taken for a path
        return
    assert EDITOR.is_valid(broken)  # what load_spec takes, an editor takes too
    score = compiled.score(trajectory)
    assert score.value is None or math.isfinite(score.value)


@settings(max_examples=examples(200), deadline=None)
@given(nodes(), episodes)
def test_scores_stay_in_the_declared_range_and_evidence_is_json(root, trajectory):
    compiled = compile_spec(spec(root))
    score = compiled.score(trajectory)
    low, high = compiled.range
    assert low <= high
    if score.value is not None:
        assert math.isfinite(score.value)
        assert low - 1e-9 <= score.value <= high + 1e-9
    json.dumps(score.evidence, allow_nan=False)
    assert compiled.score(trajectory) == score  # scoring changes nothing


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(made_calls, min_size=1, max_size=3), st.sampled_from(["sum", "mean", "last", "min", "all"]), tenths, tenths)
def test_emissions_and_the_rest_add_up_to_the_value(calls, reduce, weight, low):
    step = leaf("calls.none", {"names": ["f"]}, scope="turn", reduce=reduce, emit="step", weight=weight, scale=[low, 1])
    trajectory = episode(*[[made] for made in calls], "a")
    score = compile_spec(spec({"op": "sum", "of": [step, leaf("text.equals", {"expect": "a"})]})).score(trajectory)
    assert sum(score.turns.values()) + score.terminal == pytest.approx(score.value)
    assert score.terminal == pytest.approx(1.0)
    columns = token_rewards(trajectory, score)
    assert sum(column.sum() for column in columns) == pytest.approx(score.value, abs=1e-5)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 1), st.sampled_from([0.0, 1.0, math.nan, "a", "A", " a"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("xy"), inner, max_size=2)),
    max_leaves=4,
)


@given(json_values, json_values, st.sampled_from(sorted(NORMALIZERS)))
def test_canonical_keys_are_equal_exactly_where_values_are(a, b, strings):
    rule = EqualityRule(normalize=NORMALIZERS[strings])
    assert rule.strict
    for x, y in ((a, b), (a, copy.deepcopy(a))):
        assert (equality_key(x, rule.normalize) == equality_key(y, rule.normalize)) == same(x, y, rule)


@given(
    st.lists(st.one_of(made_calls, made_calls, malformed), max_size=4),
    gold_lists,
    st.sampled_from([{}, {"abs": 1}, {"strings": "fold"}]),
)
@settings(max_examples=examples(300), deadline=None)
def test_toolrl_is_the_best_of_all_assignments(made, want, rule):
    """Equal calls are paired before the rest is assigned; trying all assignments shows that nothing is lost."""
    args = {"expect": want, "credit": "toolrl", **rule}
    trajectory = episode(made or "nothing")
    found = compile_spec(spec(leaf("calls.match", args))).score(trajectory).value
    assert found == pytest.approx(toolrl_by_trying(calls_of(trajectory), want, rule.get("abs", 0)))


def calls_of(trajectory):
    return [call for turn in trajectory.turns for call in turn.message.tool_calls]


def toolrl_by_trying(made, want, tolerance):
    """The paper's formula over every assignment, with no code of the leaf."""
    if not made and not want:
        return 1.0

    def close(a, b):
        if isinstance(a, bool) or isinstance(b, bool) or not isinstance(a, (int, float)):
            return type(a) is type(b) and a == b
        return isinstance(b, (int, float)) and abs(a - b) <= tolerance

    def pair(call, wanted):
        if call.name != wanted["name"] or call.arguments is None:
            return 0.0
        have, need = call.arguments, wanted["arguments"]
        either = have.keys() | need.keys()
        keys = len(have.keys() & need.keys()) / len(either) if either else 1.0
        return keys + sum(1 for key in need if key in have and close(have[key], need[key]))

    best = most([[pair(call, wanted) for wanted in want] for call in made])
    have, need = Counter(call.name for call in made), Counter(wanted["name"] for wanted in want)
    name = (have & need).total() / (have | need).total()
    return (name + best) / (1 + len(want) + sum(len(wanted["arguments"]) for wanted in want))


def total(pairs, weights):
    assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
    return sum(weights[i][j] for i, j in pairs)


def test_assignments_against_trying_them_all():
    """On problems of every small size, and on many large enough that wrong prices in the Hungarian method do show."""
    rng = random.Random(1)
    for n, m in [*itertools.product(range(6), repeat=2), *rng.choices([(5, 5), (5, 6), (6, 5)], k=200)]:
        weights = [[rng.choice([0, 0.25, 0.5, 0.75, 1, rng.random()]) for _ in range(m)] for _ in range(n)]
        assert total(call_matching.optimal(weights), weights) == pytest.approx(most(weights))
        monotone = call_matching.in_order(weights)
        assert total(monotone, weights) == pytest.approx(most(weights, ordered=True))
        assert monotone == sorted(monotone)
        assert [j for _, j in monotone] == sorted(j for _, j in monotone)
        full = [[float(weight >= 1 - 1e-12) for weight in row] for row in weights]
        assert len(call_matching.optimal(np.array(full).reshape(n, m))) == most(full)


@settings(max_examples=examples(100), deadline=None)
@given(episodes)
def test_views_cut_an_episode_without_loss(trajectory):
    view = episode_view(trajectory)
    assert [made for part in view.parts("turn") for made in part.calls] == list(view.calls)
    assert [part.calls[0] for part in view.parts("call")] == list(view.calls)
    assert [turn for part in view.parts("round") for turn in part.turns] == list(trajectory.turns)


def test_scoring_from_many_threads_is_the_same():
    from concurrent.futures import ThreadPoolExecutor

    compiled = compile_spec(spec(leaf("calls.match", {"expect": gold(call("f", x=1), call("f", x=2)), "credit": "partial"})))
    rng = random.Random(0)
    many = [episode([call("f", x=rng.randint(1, 3)) for _ in range(4)], "x") for _ in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(compiled.score, many)) == [compiled.score(trajectory) for trajectory in many]


# -- pairs by hash and all pairs at once: as the optimal assignment, pair by pair and by trying them all

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
