"""Combinators, mods, scopes and emissions; and where rewards land on the tokens."""

import pytest

from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import StopReason
from agentrl.reward import Context, Score, compile_spec, token_rewards
from tests.reward.reward_episodes import call, episode, leaf, spec

ONE = leaf("format.regex", {"pattern": ".*"})
ZERO = leaf("calls.none", {"names": ["f"]})
NULL = leaf("text.equals", {"expect": {"$": "/task/gold/nothing"}})
HALF = leaf("cost.turns", {"max": 4})


def run(root, trajectory=None, **rest):
    """Scores an episode of two turns: a call of f, then an answer."""
    return compile_spec(spec(root, **rest)).score(trajectory or episode([call("f")], "end"))


def op(name, *of, **mods):
    return {"op": name, "of": list(of), **mods}


def weigh(node, weight):
    return {**node, "weight": weight}


@pytest.mark.parametrize(("root", "value"), [
    (op("sum", ONE, HALF, ZERO), 1.5),
    (op("sum", weigh(ONE, 2), weigh(HALF, -1)), 1.5),
    (op("mean", ONE, HALF, ZERO), 0.5),
    (op("mean", weigh(ONE, 3), ZERO), 0.75), (op("mean", weigh(ONE, 0), HALF), 0.5),
    (op("product", HALF, HALF), 0.25),
    (op("min", ONE, HALF), 0.5),
    (op("max", ZERO, HALF), 0.5),
    (op("all", ONE, HALF), 0), (op("all", ONE, ONE), 1),
    (op("any", ZERO, HALF), 0), (op("any", ZERO, ONE), 1),
    (op("sum", *[weigh(ONE, 1 / 3)] * 3), 1),
    ({"op": "gate", "if": HALF, "gte": 0.5, "then": ONE, "else": 7}, 1),
    ({"op": "gate", "if": HALF, "gte": 0.6, "then": ONE, "else": 7}, 7),
    ({"op": "gate", "if": HALF, "gte": 0.6, "then": ONE}, 0),
    ({"op": "gate", "if": HALF, "gte": 0.6, "then": ONE, "else": op("sum", HALF, HALF)}, 1),
    ({**HALF, "scale": [-1, 1]}, 0), ({**HALF, "scale": [1, 0]}, 0.5), ({**ONE, "scale": [-3, 3], "clip": [-1, 2]}, 2),
    ({**op("sum", ONE, ONE), "scale": [0, 5]}, 10),
])  # fmt: skip
def test_values(root, value):
    assert run(root).value == pytest.approx(value)


@pytest.mark.parametrize(("root", "value"), [
    (op("sum", ONE, NULL), None), (op("mean", ZERO, NULL), None), (op("product", ZERO, NULL), None),
    (op("min", ZERO, NULL), None), (op("all", ZERO, NULL), None), (op("any", ONE, NULL), None),
    (op("sum", ONE, {**NULL, "missing": "skip"}), 1), (op("mean", ONE, {**NULL, "missing": "skip"}), 1),
    (op("mean", ONE, {**NULL, "missing": 0}), 0.5), (op("mean", ZERO, {**NULL, "missing": 1}), 0.5),
    (op("sum", {**NULL, "missing": "skip"}), None), ({**op("sum", {**NULL, "missing": "skip"}), "missing": 0}, 0),
    ({**NULL, "missing": 1, "scale": [-3, 3]}, 3), ({**NULL, "missing": 0, "scale": [-3, 3]}, -3),
    ({**NULL, "missing": "skip"}, None),
    ({"op": "gate", "if": NULL, "then": ONE}, None), ({"op": "gate", "if": ZERO, "then": NULL, "else": 1}, 1),
    ({"op": "gate", "if": ONE, "then": NULL, "else": 1}, None),
    (op("sum", ONE, {**ONE, "when": {"$": "/episode/turns", "gt": 5}}), 1),
    (op("sum", ONE, {**ONE, "when": {"$": "/episode/turns", "gt": 1}}), 2),
    (op("sum", ONE, {**ONE, "when": {"$": "/episode/errors", "eq": 0}}), 2),
    (op("sum", ONE, {**ONE, "when": {"$": "/task/gold/none", "eq": 1}}), None),
    (op("sum", ONE, {**ONE, "when": {"$": "/task/gold/none", "exists": True}}), 1),
    (op("sum", ONE, {**ONE, "when": {"not": {"any": [{"$": "/episode/stop", "eq": "done"}]}}}), 1),
    (op("sum", ONE, {**ONE, "when": {"all": [{"$": "/episode/stop", "eq": "done"}, {"$": "/episode/calls", "lte": 1}]}}), 2),
])  # fmt: skip
def test_an_unscored_leaf_masks_the_episode_unless_the_spec_says_otherwise(root, value):
    assert run(root).value == value


@pytest.mark.parametrize("stop", [stop for stop in StopReason if stop.infrastructure])
def test_no_leaf_runs_after_an_infrastructure_failure(stop):
    def never(view, args):
        raise AssertionError("a leaf ran")

    compiled = compile_spec(
        spec(leaf("python", {"name": "f"}), metrics=[{**HALF, "id": "m"}]), context=Context(python={"f": never})
    )
    score = compiled.score(episode("x", stop=stop))
    assert score.value is None
    assert score.metrics == {"m": None}
    assert stop.value in score.evidence["unscored"]


def test_metrics_are_measured_and_not_rewarded():
    score = run({**HALF, "id": "a"}, metrics=[{**NULL, "id": "b"}, {**ONE, "id": "c"}])
    assert score.value == 0.5
    assert score.metrics == {"a": 0.5, "b": None, "c": 1}


def test_a_value_that_is_no_finite_number_is_null():
    huge = {**ONE, "weight": 1e308}
    assert run(op("sum", huge, huge)).value is None


# -- scopes ----------------------------------------------------------------------------------------

FOUR = (["f"], ["f", "g"], ["g"], [])
PER_TURN = leaf("calls.none", {"names": ["g"]}, scope="turn")


def four_turns():
    turns = [[call(name) for name in names] if names else "end" for names in FOUR]
    return episode(*turns)


@pytest.mark.parametrize(
    ("reduce", "value", "steps"),
    [("sum", 2, {0: 1, 3: 1}), ("mean", 0.5, {0: 0.25, 3: 0.25}), ("last", 1, {3: 1}), ("min", 0, {}), ("all", 0, {})],
)
def test_reduce_and_emit_by_turn(reduce, value, steps):
    """No call of g in turns 0 and 3."""
    whole = run({**PER_TURN, "reduce": reduce}, four_turns())
    assert (whole.value, whole.turns, whole.terminal) == (value, {}, value)
    stepwise = run({**PER_TURN, "reduce": reduce, "emit": "step"}, four_turns())
    assert (stepwise.value, stepwise.turns) == (value, steps)


def test_by_call_each_call_counts_at_its_turn():
    """Calls f, f, g, g in turns 0, 1, 1, 2; f earns 1."""
    node = leaf("calls.none", {"names": ["g"]}, scope="call", reduce="sum", emit="step")
    assert run(node, four_turns()).turns == {0: 1, 1: 1}


def test_by_round():
    trajectory = episode("yes", "user: and?", [call("f")], "no")
    node = leaf("text.equals", {"expect": "yes"}, scope="round", reduce="mean")
    assert run(node, trajectory).value == 0.5
    answers = leaf("text.equals", {"expect": {"$": "/task/gold/answers", "at": "round"}}, scope="round", reduce="all")
    trajectory = episode("a", "user: and?", "b", task_gold={"answers": ["a", "b"]})
    assert run(answers, trajectory).value == 1
    short = episode("a", "user: and?", "b", task_gold={"answers": ["a"]})
    assert run(answers, short).value is None


def test_a_combinator_with_a_scope_sees_one_turn_at_a_time():
    node = op("product", leaf("calls.none", {"names": ["g"]}), leaf("calls.none", {"names": ["f"]}), scope="turn", reduce="sum")
    assert run(node, four_turns()).value == 1  # only the last turn calls neither


def test_nothing_of_a_scope_is_null():
    node = leaf("calls.none", scope="call", reduce="mean")
    assert run(node, episode("end")).value is None
    assert run({**node, "missing": 0}, episode("end")).value == 0
    assert run(op("sum", ONE, {**node, "missing": "skip"}), episode("end")).value == 1
    assert run(leaf("calls.none", scope="turn", reduce="sum"), episode()).value is None


def test_when_chooses_turns():
    node = {**PER_TURN, "reduce": "mean", "when": {"$": "/turn/calls", "ne": []}}
    assert run(node, four_turns()).value == pytest.approx(1 / 3)


def test_emissions_keep_their_share_through_sum_mean_gate_and_scale():
    step = {**PER_TURN, "reduce": "sum", "emit": "step"}  # 1 at turn 0 and at turn 3
    root = op("sum", weigh(op("mean", weigh(step, 3), ONE), 2), weigh(HALF, 0.5), scale=[1, 3])
    score = run(root, four_turns())
    # mean = (3 * 2 + 1) / 4; the sum = 2 * 7/4 + .5 * 1; scaled 1 + 2 * 4
    assert score.value == pytest.approx(9)
    assert score.turns == pytest.approx({0: 2 * 2 * 0.75, 3: 2 * 2 * 0.75})
    assert score.terminal == pytest.approx(9 - 6)
    gate = {"op": "gate", "if": ONE, "then": step}
    assert run(gate, four_turns()).turns == {0: 1, 3: 1}
    assert run({**gate, "if": HALF, "gte": 2}, four_turns()).turns == {}


SHARED = leaf("calls.match", {"expect": {"$": "/task/gold/calls"}, "compare": "superset", "credit": "matched"}, emit="step")


def test_matched_calls_are_paid_once_at_the_turns_that_made_them():
    """Gold f(1), f(2), g(3), g(4); made f(2) and h, then f(2) again and g(3), then f(1): three of four are there, each a quarter,
    and what was made again earns nothing."""
    wanted = [{"name": name, "arguments": {"x": x}} for name, x in (("f", 1), ("f", 2), ("g", 3), ("g", 4))]
    turns = [[call("f", x=2), call("h")], [call("f", x=2), call("g", x=3)], "on", [call("f", x=1)], "end"]
    trajectory = episode(*turns, task_gold={"calls": wanted})
    assert run({**SHARED, "emit": "terminal"}, trajectory).turns == {}
    score = run(op("sum", weigh(SHARED, 0.5), {"use": "text.equals", "args": {"expect": "end"}, "weight": 0.5}), trajectory)
    assert score.value == 0.875 and score.turns == {0: 0.125, 1: 0.125, 3: 0.125} and score.terminal == 0.5
    # The share of a partly right call, and a value that `scale` turns round: f(x=9) has one of name and x right.
    partly = {**SHARED, "args": {**SHARED["args"], "credit": "partial", "compare": "exact"}, "scale": [0, -2]}
    short = episode([call("f", x=9)], [call("f", x=1)], task_gold={"calls": wanted[:1]})
    assert (run(partly, short).value, run(partly, short).turns) == (-1.0, {1: -1.0})
    half = episode([call("f", x=9)], "end", task_gold={"calls": wanted[:1]})
    assert (run(partly, half).value, run(partly, half).turns) == (-1.0, {0: -1.0})
    # The same leaf twice in a spec, once with its turns and once without.
    both = op("sum", SHARED, {**SHARED, "emit": "terminal"})
    assert run(both, trajectory).turns == {0: 0.25, 1: 0.25, 3: 0.25} and run(both, trajectory).terminal == 0.75


# -- credit ----------------------------------------------------------------------------------------


def test_rewards_go_to_the_ledger_of_their_turn():
    trajectory = episode([call("f")], "end")
    second = TokenLedger()
    second.append_context([1] * 4, 1)
    second.append_sampled([2, 3], [-1.0, -1.0], [0, 0], 1)
    trajectory.ledgers.append(second)
    trajectory.turns[1].ledger, trajectory.turns[1].end = 1, 5
    first, other = token_rewards(trajectory, Score(1.5, {0: 0.5}))
    assert (first[trajectory.turns[0].end], first.sum()) == (0.5, 0.5)
    assert (other[5], other.sum()) == (1.0, 1.0)


def test_a_turn_that_sampled_nothing_loses_no_reward():
    trajectory = episode([call("f")], [call("f")], "end")
    ends = [turn.end for turn in trajectory.turns]
    trajectory.turns[1].ledger = trajectory.turns[1].end = -1
    (column,) = token_rewards(trajectory, Score(0.5, {1: 0.5}))
    assert column[ends[2]] == 0.5
    trajectory.turns[2].ledger = trajectory.turns[2].end = -1
    (column,) = token_rewards(trajectory, Score(0.5, {1: 0.5}))
    assert column[ends[0]] == 0.5


def test_what_has_no_token_is_refused():
    with pytest.raises(ValueError, match="unscored"):
        token_rewards(episode("x"), Score(None))
    with pytest.raises(ValueError, match="no turn"):
        token_rewards(episode(), Score(1.0))
    assert [column.sum() for column in token_rewards(episode(), Score(0.0))] == [0]
    lost = episode("x")
    lost.turns[0].end = 99
    with pytest.raises(ValueError, match="token 99"):
        token_rewards(lost, Score(1.0))
    context = episode("x")
    context.turns[0].end = 0
    with pytest.raises(ValueError, match="not a sampled token"):
        token_rewards(context, Score(1.0))


def test_a_part_that_may_be_skipped_may_count_as_nothing_in_the_range():
    far = {**HALF, "scale": [2, 3]}
    for more in ({"missing": "skip"}, {"when": {"$": "/episode/turns", "gt": 1}}):
        assert compile_spec(spec(op("sum", ONE, {**far, **more}))).range == (0, 4)
        assert compile_spec(spec(op("product", ONE, {**far, **more}))).range == (0, 3)
    assert compile_spec(spec(op("sum", ONE, far))).range == (2, 4)
