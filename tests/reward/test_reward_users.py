"""Leaves that read the simulated user's calls, calls that serve several expected ones, and text beside a call."""

import itertools
from dataclasses import replace

import pytest

from agentrl.data.trajectory import ToolCall, ToolResult, UserCall
from agentrl.reward import compile_spec
from agentrl.reward.leaf import episode_view
from agentrl.utils.errors import RewardSpecError
from tests.reward.reward_episodes import call, episode, gold, leaf, spec, value


def user_call(turn, name, step=0, answer="ok", error=None, **arguments):
    made = ToolCall(name, arguments, id=f"user_{turn}_{step}_{name}")
    return UserCall(turn, step, made, ToolResult(made.id, name, answer, None, error))


def talked():
    """Opening call; round 0: the policy's f, a text, the user's press; round 1: g, a text."""
    return episode([call("f", x=1)], "press it", "user: done", [call("g", y=2)], "bye", user_calls=[
        user_call(-1, "look"), user_call(1, "press", key="a"), user_call(1, "press", step=1, key="b", error="tool_error"),
        user_call(3, "look", answer="signal 4"),
    ])  # fmt: skip


def test_calls_are_in_the_order_in_which_they_were_made():
    view = episode_view(talked())
    names = {by: [made.call.name for made in view.made(by)] for by in ("assistant", "user", "both")}
    assert names == {
        "assistant": ["f", "g"],
        "user": ["look", "press", "press", "look"],
        "both": ["look", "f", "press", "press", "g", "look"],
    }
    assert view.made("assistant") is view.calls
    rounds = [[made.call.name for made in part.made("both")] for part in view.parts("round")]
    assert rounds == [["look", "f", "press", "press"], ["g", "look"]]


def test_what_the_user_did_before_the_first_turn_is_paid_at_it_and_the_rest_at_the_turn_that_it_answers():
    """Three of four calls were made: look before the first turn, f at turn 0, press after turn 1."""
    wanted = [{"name": "look", "arguments": {}, "by": "user"}, {"name": "f", "arguments": {"x": 1}},
              {"name": "press", "arguments": {"key": "a"}, "by": "user"}, {"name": "z", "arguments": {}}]  # fmt: skip
    args = {"expect": wanted, "by": "both", "compare": "superset", "credit": "matched"}
    score = compile_spec(spec(leaf("calls.match", args, emit="step"))).score(talked())
    assert (score.value, score.turns, score.terminal) == (0.75, {0: 0.5, 1: 0.25}, 0.0)
    silent = compile_spec(spec(leaf("calls.match", args, emit="step"))).score(episode(user_calls=[user_call(-1, "look")]))
    assert (silent.value, silent.turns, silent.terminal) == (0.25, {}, 0.25), "no turn to pay it at"


BOTH = [
    {"name": "f", "arguments": {"x": 1}},
    {"name": "press", "arguments": {"key": "a"}, "by": "user"},
    {"name": "g", "arguments": {"y": 2}, "by": "assistant"},
]


@pytest.mark.parametrize(("by", "compare", "share"), [
    # By default nothing of the user counts, neither among the calls made nor among those expected.
    ("assistant", "exact", 1.0),
    ("user", "superset", 1 / 2),  # f says nobody, so it is expected of whoever is asked about
    ("user", "exact", 1 / 4),
    ("both", "superset", 1.0),
    ("both", "exact", 3 / 6),
])  # fmt: skip
def test_whose_calls_are_compared(by, compare, share):
    args = {"expect": BOTH, "by": by, "compare": compare, "credit": "matched"}
    assert value("calls.match", args, talked()) == pytest.approx(share)
    if by == "assistant":
        del args["by"]
        assert value("calls.match", args, talked()) == pytest.approx(share)


def test_an_ordered_match_and_other_leaves_of_calls_over_both_sides():
    one, order = talked(), {"expect": BOTH, "by": "both", "compare": "superset", "order": "ordered"}
    assert value("calls.match", order, one) == 1.0
    assert value("calls.match", {**order, "expect": BOTH[::-1]}, one) == 0.0
    assert value("calls.none", {"names": ["press"]}, one) == 1.0
    assert value("calls.none", {"names": ["press"], "by": "user"}, one) == 0.0
    assert value("calls.none", {"names": ["press"], "by": "both"}, one) == 0.0
    assert value("results.contains", {"expect": "signal 4"}, one) == 0.0
    assert value("results.contains", {"expect": "signal 4", "by": "user"}, one) == 1.0
    assert value("calls.schema", {"check": "parse", "by": "user", "credit": "all"}, one) == 1.0


@pytest.mark.parametrize(("kind", "args", "says"), [
    ("calls.match", {"expect": [], "by": "them"}, "assistant"),
    ("calls.match", {"expect": [], "by": "user", "form": "bfcl"}, "give declared"),
    ("calls.schema", {"by": "user"}, "check: parse"),
    ("results.contains", {"replay": {"$": "/task/gold/calls"}, "by": "user"}, "replay"),
    ("calls.match", {"expect": [], "assign": "reuse"}, "compare: superset"),
    ("calls.match", {"expect": [], "assign": "reuse", "compare": "superset", "order": "ordered"}, "order: free"),
    ("calls.match", {"expect": [], "assign": "reuse", "compare": "superset", "credit": "partial"}, "credit: all or matched"),
    ("calls.none", {"by": "user", "scope": "call"}, "/args/by: with scope: call"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(kind, args, says):
    mods = {"scope": args.pop("scope"), "reduce": "mean"} if "scope" in args else {}
    with pytest.raises(RewardSpecError, match=says):
        compile_spec(spec(leaf(kind, args, **mods)))


def test_a_gold_of_another_shape_is_unscored():
    for item in ({"by": "agent"}, {"compare": "x"}, {"compare": [1]}):
        expect = [{"name": "f", "arguments": {}, **item}]
        assert compile_spec(spec(leaf("calls.match", {"expect": expect}))).score(talked()).value is None


def test_one_call_serves_several_equal_gold_calls_if_the_spec_says_so():
    """Every list of at most three calls of two kinds against every other, by a plain loop."""
    kinds = [("f", {"x": 1}), ("f", {"x": 2})]
    lists = [list(items) for size in range(4) for items in itertools.product(kinds, repeat=size)]
    args = {"expect": {"$": "/task/gold/calls"}, "compare": "superset", "assign": "reuse"}
    every, share = (compile_spec(spec(leaf("calls.match", {**args, **more}))) for more in ({}, {"credit": "matched"}))
    for made, wanted in itertools.product(lists, lists):
        found = [any(one == other for other in made) for one in wanted]
        one = episode(*[made] * bool(made), "end", task_gold={"calls": gold(*wanted)})
        assert every.score(one).value == float(all(found))
        assert share.score(one).value == pytest.approx(sum(found) / len(found) if found else 1.0)


@pytest.mark.parametrize(("compare", "made", "full", "partial"), [
    (None, {"x": 1, "note": "u"}, 0, 2 / 3), ([], {"x": 9}, 1, 1), (["x"], {"x": 1, "note": "other"}, 1, 1),
    (["x"], {"note": "other"}, 0, 1 / 2), (["x", "note"], {"x": 1, "note": "other"}, 0, 2 / 3),
    (["x", "absent"], {"x": 1}, 1, 1), (["absent"], {"absent": 1}, 0, 1 / 2),
])  # fmt: skip
def test_only_the_arguments_count_that_a_gold_call_names(compare, made, full, partial):
    wanted = {"name": "f", "arguments": {"x": 1, "note": "v"}, **({} if compare is None else {"compare": compare})}
    one = episode([call("f", **made)], "end")
    assert value("calls.match", {"expect": [wanted]}, one) == full
    assert value("calls.match", {"expect": [wanted], "credit": "partial"}, one) == pytest.approx(partial)


def test_text_beside_a_call_is_said_where_a_spec_says_so():
    one = episode([call("f")], "end")
    one.turns[0].message = one.messages[1] = replace(one.turns[0].message, content="It costs 1,234 euros.")
    said = {where: value("text.contains", {"expect": ["1234"], "where": where, "strings": "tau"}, one)
            for where in ("answer", "replies", "all")}  # fmt: skip
    assert said == {"answer": 0.0, "replies": 0.0, "all": 1.0}
