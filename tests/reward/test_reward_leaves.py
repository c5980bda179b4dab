"""Each leaf on episodes small enough to score by hand, bad data included."""

import json
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, ToolResult, Trajectory, Turn
from agentrl.reward import compile_spec
from agentrl.reward.values import as_number, parse_pointer
from agentrl.utils.errors import RewardSpecError
from tests.reward.reward_episodes import SHELF, call, episode, gold, leaf, spec, tool_schema, value


def why(kind, args, trajectory, context=None):
    score = compile_spec(spec(leaf(kind, args)), context=context).score(trajectory)
    assert score.value is None
    return score.evidence["root"]["unscored"]


# -- calls.match -----------------------------------------------------------------------------------


def match(made, want, **args):
    return value("calls.match", {"expect": gold(*want), **args}, episode(made, "end"))


@pytest.mark.parametrize(("arguments", "exact", "subset", "superset", "names", "ignore"), [
    ({"a": 1, "b": 2}, 1, 1, 1, 1, 1),
    ({"a": 1}, 0, 1, 0, 0, 1),
    ({"a": 1, "b": 2, "c": 3}, 0, 0, 1, 0, 1),
    ({"a": 1, "b": 9}, 0, 0, 0, 1, 1),
    ({}, 0, 1, 0, 0, 1),
    ({"a": 1, "c": 2}, 0, 0, 0, 0, 1),
])  # fmt: skip
def test_arguments(arguments, exact, subset, superset, names, ignore):
    made, want = [call("f", **arguments)], [call("f", a=1, b=2)]
    hits = {"exact": exact, "subset": subset, "superset": superset, "names": names, "ignore": ignore}
    assert {how: match(made, want, arguments=how) for how in hits} == hits


def test_numbers_and_texts_compare_by_rule():
    want = [call("f", n=100.0, s="New  York")]
    assert match([call("f", n=100, s="New  York")], want) == 1  # 100 is 100.0
    assert match([call("f", n=101, s="New  York")], want, abs=1) == 1
    assert match([call("f", n=101, s="New  York")], want, rel=0.001) == 0
    assert match([call("f", n=101, s="New  York")], want, rel=0.01) == 1
    assert match([call("f", n=100, s="new york ")], want, strings="fold") == 1
    assert match([call("f", n=100, s="new york ")], want) == 0
    assert match([call("f", n=True, s="New  York")], [call("f", n=1, s="New  York")]) == 0
    assert match([call("f", n=float("nan"))], [call("f", n=1)], abs=5) == 0


def test_allowed_values():
    want = [{"name": "f", "arguments": {"city": ["NYC", "New York"], "unit": ["C", ""]}}]
    trajectory = episode([call("f", city="New York")], "end")
    assert value("calls.match", {"expect": want, "form": "sets"}, trajectory) == 1
    assert value("calls.match", {"expect": want, "form": "sets"}, episode([call("f", city="LA")])) == 0


def test_a_malformed_call_counts_as_made_and_matches_nothing():
    broken = ToolCall("f", None, id="c9", error="not JSON")
    assert match([call("f", x=1), broken], [call("f", x=1)], credit="matched") == 0.5


@pytest.mark.parametrize("shape", [
    None,
    "f",
    7,
    {"name": "f"},
    [7],
    [{"nam": "f"}],
    [{"name": "f", "args": {"x": 1}}],
    [{"name": 1, "arguments": {}}],
    [{"name": "f", "arguments": []}],
])  # fmt: skip
def test_gold_calls_of_another_shape_are_null(shape):
    trajectory = episode([call("f")], task_gold={"calls": shape})
    assert "expected call" in why("calls.match", {"expect": {"$": "/task/gold/calls"}}, trajectory)
    nothing = why("calls.match", {"expect": {"$": "/task/gold/call"}}, trajectory)
    assert nothing == "'/task/gold/call' resolves to nothing"


@pytest.mark.parametrize("arguments", [{}, [1], "x", 3])
def test_made_calls_that_are_data_of_another_shape_are_null(arguments):
    trajectory = episode(state=[{"name": "f", "arguments": arguments}])
    made = {"expect": gold(call("f")), "made": {"$": "/episode/state"}}
    if isinstance(arguments, dict):
        assert value("calls.match", made, trajectory) == 1  # also of an episode without a turn
    else:
        assert "arguments: object" in why("calls.match", made, trajectory)


@pytest.mark.parametrize(("form", "wanted"), [("bfcl", "{name: {argument: [values]}}"), ("literal", '{"name", "arguments"}')])
def test_gold_calls_of_another_shape_say_which_shape_was_wanted(form, wanted):
    trajectory = episode([call("f")], task_gold={"calls": [{"f": 1, "g": 2}]})
    text = why("calls.match", {"expect": {"$": "/task/gold/calls"}, "form": form}, trajectory)
    assert text.startswith(f"expected call 0 must be {wanted}, not ")


def test_whole_numbers_of_1200_bits_and_more_are_no_decimals():
    """They have 361 digits; texts of more than 400 characters are none either."""
    assert as_number(2**1199 - 1) == 2**1199 - 1 and as_number(2**1199) is None is as_number(-(2**1199))


def test_a_condition_reads_the_names_of_the_offered_tools():
    trajectory = episode("end", tools=TOOLS)
    for name, wanted in (("get", 1), ("put", None)):
        node = {**leaf("episode.stopped"), "when": {"$": "/episode/tools", "contains": name}}
        assert compile_spec(spec(node)).score(trajectory).value == wanted


# -- calls.schema, calls.none ----------------------------------------------------------------------

TOOLS = [tool_schema("get", key="string"), tool_schema("l\u00ed", **{"caf\u00e9": "string"})]


@pytest.mark.parametrize(("made", "partial", "every"), [
    ([call("get", key="a")], 1, 1),
    ([call("get", key="a"), call("get", key=3)], 0.5, 0),
    ([call("get", key="a"), call("put", key="a")], 0.5, 0),
    ([call("get", key="a", more=1)], 0, 0),
    ([ToolCall("get", None, id="x", error="not JSON")], 0, 0),
    ([ToolCall("li\u0301", {"cafe\u0301": "a"}, id="x")], 1, 1),  # the same names, in Unicode's other spelling
    ([], 0, 0),
])  # fmt: skip
def test_calls_schema(made, partial, every):
    trajectory = episode(made, "end", tools=TOOLS)
    assert value("calls.schema", {}, trajectory) == partial
    assert value("calls.schema", {"credit": "all"}, trajectory) == every


def test_calls_schema_of_nothing():
    quiet = episode("end", tools=TOOLS)
    assert value("calls.schema", {"empty": 1}, quiet) == 1
    assert value("calls.schema", {"empty": None}, quiet) is None
    assert "no tool schemas" in why("calls.schema", {}, episode([call("get", key="a")]))
    odd = [{"function": {"name": "get", "parameters": {"type": "strng"}}}]
    assert "not a JSON Schema" in why("calls.schema", {}, episode([call("get")], tools=odd))


# -- state -----------------------------------------------------------------------------------------

STATE = {"orders": [{"id": 1, "total": 10}, {"id": 2, "total": 20}], "note": "Hi", "log": [1, 2]}


def with_state(state, **rest):
    return episode("end", state=state, **rest)


def test_state_match_by_hash_and_by_fields():
    same = {"log": [1, 2], "note": "Hi", "orders": [{"total": 10.0, "id": 1}, {"id": 2, "total": 20}]}
    for by in ("hash", "fields"):
        assert value("state.match", {"expect": STATE, "by": by}, with_state(same)) == 1
        assert value("state.match", {"expect": STATE, "by": by}, with_state({**same, "note": "hi"})) == 0
    assert value("state.match", {"expect": STATE, "strings": "fold"}, with_state({**same, "note": "hi"})) == 1


def test_state_match_partial_counts_fields_of_either_side():
    """7 fields in the gold; one of them differs and one more is there: 6 / 8."""
    found = {**STATE, "note": "no", "more": 1}
    assert value("state.match", {"expect": STATE, "credit": "partial"}, with_state(found)) == pytest.approx(6 / 8)
    superset = {"expect": STATE, "credit": "partial", "compare": "superset"}
    assert value("state.match", superset, with_state(found)) == pytest.approx(6 / 7)


def test_state_match_within_a_path_and_without_some():
    args = {"expect": [{"id": 1, "total": 10}, {"id": 2, "total": 20}], "path": "/orders"}
    assert value("state.match", args, with_state(STATE)) == 1
    ignore = {"expect": {**STATE, "log": []}, "ignore": ["/log"]}
    assert value("state.match", ignore, with_state(STATE)) == 1
    deep = {"expect": STATE, "ignore": ["/orders/1/total"], "by": "hash"}
    assert value("state.match", deep, with_state({**STATE, "orders": [STATE["orders"][0], {"id": 2, "total": 9}]})) == 1
    assert "resolves to nothing" in why("state.match", {"expect": 1, "path": "/no"}, with_state(STATE))


def test_no_state_and_a_state_that_is_no_json_are_null():
    assert "no final state" in why("state.match", {"expect": STATE}, with_state(None))
    assert "not a JSON" in why("state.match", {"expect": {"a": 1}, "by": "hash"}, with_state({"a": float("nan")}))
    assert "no final state" in why("state.assert", {"path": "/a", "eq": 1}, with_state(None))
    assert "no final state" in why("state.number", {"path": "/v"}, with_state(None))
    with pytest.raises(RewardSpecError, match="low = 2 is not below high = 1"):
        value("state.number", {"path": "/v", "low": 2}, with_state({"v": 1}))
    assert value("state.match", {"expect": {"a": 1}}, with_state({"a": float("nan")})) == 0


@pytest.mark.parametrize(("comparison", "truth"), [
    ({"path": "/orders/1/total", "eq": 20}, 1), ({"path": "/orders/1/total", "eq": "20"}, 0),
    ({"path": "/orders/1/total", "gte": 20, "lt": 21}, 1), ({"path": "/orders/1/total", "gt": 20}, 0),
    ({"path": "/note", "in": ["Hi", "Ho"]}, 1), ({"path": "/note", "ne": "Hi"}, 0),
    ({"path": "/note", "contains": "i"}, 1), ({"path": "/log", "contains": 2}, 1), ({"path": "/log", "contains": 3}, 0),
    ({"path": "/note", "type": "string"}, 1), ({"path": "/log", "type": "object"}, 0),
    ({"path": "/none", "exists": False}, 1), ({"path": "/note", "exists": False}, 0), ({"path": "/none", "exists": True}, 0),
    ({"path": "/none", "eq": 1}, None), ({"path": "/none", "eq": 1, "absent": 0}, 0), ({"path": "/orders/7", "eq": 1}, None),
    ({"path": "/note", "eq": "hi", "strings": "fold"}, 1), ({"path": "/orders/0/total", "eq": 11, "abs": 1}, 1),
    ({"path": "/note", "lt": 5}, 0), ({"path": "", "type": "object"}, 1),
    ({"path": "/orders/1/total", "eq": {"$": "/task/gold/total"}}, 1),
])  # fmt: skip
def test_state_assert(comparison, truth):
    assert value("state.assert", comparison, with_state(STATE, task_gold={"total": 20})) == truth


@pytest.mark.parametrize(("state", "args", "worth"), [
    ({"v": {"r": 0.25}}, {"path": "/v/r"}, 0.25), ({"v": {"r": 1}}, {"path": "/v/r"}, 1.0),
    ({"v": {"r": 7}}, {"path": "/v/r"}, 1.0), ({"v": {"r": -2}}, {"path": "/v/r"}, 0.0),
    ({"v": {"r": 5}}, {"path": "/v/r", "low": 1, "high": 9}, 0.5),
    ({"v": None}, {"path": "/v/r"}, None), ({"v": None}, {"path": "/v/r", "absent": 0}, 0.0),
    ({"v": {"r": "1"}}, {"path": "/v/r"}, None), ({"v": {"r": True}}, {"path": "/v/r", "absent": 0}, 0.0),
    ({"v": {"r": float("nan")}}, {"path": "/v/r", "absent": 0}, 0.0),
])  # fmt: skip
def test_state_number(state, args, worth):
    assert value("state.number", args, with_state(state)) == worth


# -- text, numbers, results ------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "said", "truth"), [
    ({"expect": "york"}, "New York", 0), ({"expect": "york", "strings": "fold"}, "New York", 1),
    ({"expect": ["a", "b"]}, "a c", 0), ({"expect": ["a", "b"], "mode": "any"}, "a c", 1),
    ({"expect": ["a", "b"], "credit": "partial"}, "a c", 0.5), ({"expect": []}, "x", 1),
    ({"expect": "cat", "word": True}, "concatenate", 0), ({"expect": "cat", "word": True}, "concat, cat.", 1),
    ({"expect": 17}, "It is 170", 1), ({"expect": 17, "word": True}, "It is 170", 0),
    ({"expect": "room 5", "word": True}, "room 5,000", 0), ({"expect": "Total: 5", "word": True}, "Total: 5.5", 0),
    ({"expect": "2 cats", "word": True}, "1.2 cats", 0), ({"expect": "room 5", "word": True}, "room 5, door 2", 1),
    ({"expect": " "}, "x", None), ({"expect": ["a", "..."], "strings": "bfcl_said"}, "a", None),
    ({"expect": [], "mode": "any"}, "x", None), ({"expect": {"$": "/task/gold/odd"}}, "x", None),
    ({"expect": "00501", "word": True}, "the postcode 00501.", 1), ({"expect": "00501", "word": True}, "501", 0),  # a name
    ({"expect": "50%", "word": True}, "50 of them", 0), ({"expect": "50%", "word": True}, "50 percent", 1),
])  # fmt: skip
def test_text_contains(args, said, truth):
    assert value("text.contains", args, episode([call("f")], said, task_gold={"odd": {"a": 1}})) == truth


def test_text_of_which_turns():
    trajectory = episode("first a", "user: more", [call("f")], "last b")
    assert value("text.contains", {"expect": "first"}, trajectory) == 0
    assert value("text.contains", {"expect": "first", "where": "replies"}, trajectory) == 1
    assert value("text.equals", {"expect": ["x", "last b"]}, trajectory) == 1
    assert value("text.contains", {"expect": "last"}, episode([call("f")])) == 0  # a call is not an answer
    assert value("text.contains", {"expect": "last"}, episode()) == 0  # nor is nothing


NUMBERS = {
    5: ("5", "5.", "It is 5, I think", "+5", "$5", "5 %", "5!", "(5)", "5.0", "5-ish", "x = 5", "Answer:5",
        "答案是5。", "답은 5입니다", "ตอบ5บาท", "是5千克", "５", "10-5", "- 5", "5°", "#5", "10/2", "\\frac{10}{2}", "5e0", "€ 5",
        "**5**"),
    -5: ("minus 5", "is negative 5", "-5", "\u22125", "\uff0d5", "-$5", "$-5", "-5.0", "x = - 5", "(-5)", "\u20135", "答案是-5"),
    1234: ("1,234", "1234", "1 234", "1\u202f234", "1'234", "1{,}234", "1\\,234", "$1,234.00", "1.234e3", "1.234 × 10^3",
        "1,\\!234", "1,\\! 234"),
    0.5: ("1/2", "½", "\\frac{1}{2}", "\\frac12", ".5", "0.5", "50e-2", "1 / 2", "5⁄10"),
    1.5: ("1 1/2", "1½", "3/2", "1\\frac{1}{2}", "1-1/2"),
    5_000_000: (
        "5 million", "5 Million people", "5-million", "$5 million", "5M", "$5m", "5 mln", "5.0 million", "**5** million",
        "5\\text{ million}", "5 thousand thousand", "5e6", "5 (in millions)", "50 lakh", "5 M€", "5 млн",
    ),
    5000: ("5k", "5K", "5 k", "5 thousand", "5 thousands", "$5k", "50 hundred", "5 Tsd."),
    0.05: ("5 hundredths", "0.05", "50 thousandths"),
    60: ("5 dozen", "60 km", "60 m", "60 K", "60 B", "60 Millionaires"),
    7: ("minus 12, not: 7", "9 minus 7", "x minus 7"),
}  # fmt: skip
NEITHER = (
    "±5", "∓5", "5/2", "2/5", "3.5", "5.7", "5,000", "5,7", "15", "5k", "5th", "v5", "x5", "5x", "5³", "5^2", "2^5",
    "x^{5}", "x_{5}", "5,\\!000", "10,\\!005",
    "5:30", "12:5", "√5", "5√2", "\\sqrt{5}", "1.2.5", "5.0.1", "12/5/2024", "2024-05-05", "2*5", "5π", "5万", "5억",
    "三5百", "1/5", "5 1/2", "5½", "0.5", "5,12", "5_000", "0x5", "5e3", "\\frac{1}{5}", "\\frac{x}{5}", "1'005", "5 000", "10⁵",
    "%5B", "5 million", "5 Million", "5-thousand", "5 billion", "$5M", "5 bn", "5 dozen", "5 and a half", "5 squared",
    "5‰", "5 万", "5 tenths", "5 hundred thousand", "**5** million", "5 (thousand)", "5~million", "5 crore",
)  # fmt: skip


@pytest.mark.parametrize(("number", "said"), [(number, said) for number, texts in NUMBERS.items() for said in texts])
def test_a_number_is_read_as_people_write_it(number, said):
    assert value("number.close", {"expect": number}, episode(said)) == 1
    assert value("number.close", {"expect": -number}, episode(said)) == 0
    assert value("text.contains", {"expect": str(number), "word": True}, episode(said)) == 1, "gold as text"


@pytest.mark.parametrize("said", NEITHER)
def test_a_part_of_a_number_is_not_that_number(said):
    for number in (5, -5):
        for which in ("last", "any"):
            assert value("number.close", {"expect": number, "which": which}, episode(said)) == 0
        for strings in ("exact", "fold"):
            args = {"expect": str(number), "word": True, "strings": strings}
            assert value("text.contains", args, episode(said)) == 0
            assert value("results.contains", args, episode([(call("f"), said)], "")) == 0


@pytest.mark.parametrize(("gold", "said", "truth"), [
    ("Paris", "答案是Paris。", 1), ("北京", "答案是北京市", 1), ("서울", "서울입니다", 1),
    ("กรุงเทพ", "คำตอบคือกรุงเทพครับ", 1), ("東京", "東京です", 1),
    ("Paris", "Parisian", 0), ("café", "cafés", 0), ("cafe", "cafe\u0301", 0), ("cat", "cat's", 1),
    ("Москва", "Москвач", 0),
    ("10³", "103", 0), ("103", "10³", 0), ("1½", "11/2", 0), ("H2O", "H₂O", 0), ("x²", "x2", 0), ("51", "5①", 0),
])  # fmt: skip
def test_words_of_any_script_are_bounded_as_that_script_does(gold, said, truth):
    assert value("text.contains", {"expect": gold, "word": True, "strings": "fold"}, episode(said)) == truth


@pytest.mark.parametrize(("one", "other"), [("10³", "103"), ("1½", "11/2"), ("a₂", "a2"), ("x²y", "x2y"), ("5①", "51")])
def test_folding_makes_no_other_number(one, other):
    assert value("text.equals", {"expect": one, "strings": "fold"}, episode(other)) == 0
    assert value("text.equals", {"expect": one, "strings": "fold"}, episode(one)) == 1
    assert value("text.equals", {"expect": "Ｗｏｒｄ １２", "strings": "fold"}, episode("word 12")) == 1


@pytest.mark.parametrize(("args", "said", "truth"), [
    ({"which": "last"}, "first 3, then 17", 1), ({"which": "last"}, "17, not 3", 0),
    ({"which": "any"}, "17, not 3", 1), ({"which": "only"}, "17, not 3", 0), ({"which": "only"}, "17 = 17.0", 1),
    ({}, "$17", 1), ({}, "17%", 1), ({}, "(17)", 1), ({}, "x=17", 1), ({}, "5-17", 1), ({}, "17km", 0),
    ({}, "1.7e1", 1), ({}, "17.0.1", 0), ({}, "0017", 1), ({}, "+17", 1), ({}, "017.50", 0),
    ({"expect": str(2**63)}, str(2**63), 1), ({"expect": str(2**63)}, str(2**63 + 1), 0),  # exactly
    ({"expect": "1,234,567"}, "It is 1,234,567.", 1),
    ({"abs": 1}, "18", 1), ({"rel": 0.1}, "18.6", 1), ({"rel": 0.1}, "19", 0), ({}, "1e9999", 0), ({"abs": 1}, "1e9999", 0),
])  # fmt: skip
def test_number_close(args, said, truth):
    assert value("number.close", {"expect": 17, **args}, episode(said)) == truth


@pytest.mark.parametrize(("gold", "right", "wrong"), [
    (3.0, "3", "3.5"), (np.float64(3), "3", "4"), ([2.5, -4.0], "-4", "4"), (2e-5, "0.00002", "2"), (1e16, f"1{'0' * 16}", "1"),
])  # fmt: skip
def test_a_gold_number_of_a_table_or_of_numpy_is_that_number(gold, right, wrong):
    for kind in ("text.equals", *(["number.close"] if gold == 3 else [])):
        for said, truth in ((right, 1), (wrong, 0)):
            assert value(kind, {"expect": {"$": "/task/gold/answer"}}, episode(said, task_gold={"answer": gold})) == truth


@pytest.mark.parametrize("gold", [None, [], {"x": 1}, "twelve", True, float("nan")])
def test_a_gold_number_of_another_shape_is_null(gold):
    told = why("number.close", {"expect": {"$": "/task/gold/answer"}}, episode("17", task_gold={"answer": gold}))
    assert "expected answer must be a number" in told


def test_results_contains():
    trajectory = episode([(call("f"), "Booking CONFIRMED"), (call("g"), "other")], "end")
    assert value("results.contains", {"expect": "confirmed", "strings": "fold"}, trajectory) == 1
    assert value("results.contains", {"expect": ["other", "none"], "credit": "partial"}, trajectory) == 0.5
    failed = episode([(call("f"), "confirmed")], "end")
    failed.turns[0].results = [ToolResult("c0", "f", "confirmed", error="timeout")]
    assert value("results.contains", {"expect": "confirmed"}, failed) == 0


def test_answers_of_calls_without_ids_are_found_by_their_place():
    made = (ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2}))
    trajectory = episode([call("f")])
    trajectory.turns = [Turn(0, Message("assistant", "", made), [ToolResult("", "f", "one"), ToolResult("", "f", "two")])]
    node = leaf("results.contains", {"expect": "one"}, scope="call", reduce="sum")
    assert compile_spec(spec(node)).score(trajectory).value == 1


# -- format, episode, costs ------------------------------------------------------------------------


def test_format_regex():
    assert value("format.regex", {"pattern": r"It is \d+\."}, episode("It is 7.")) == 1
    assert value("format.regex", {"pattern": r"\d+"}, episode("It is 7.")) == 0
    assert value("format.regex", {"pattern": r"\d+", "match": "search"}, episode("It is 7.")) == 1
    assert value("format.regex", {"pattern": r"\d+"}, episode([call("f")])) == 0


def test_a_pattern_that_takes_too_long_is_null():
    args = {"pattern": r"(a|aa)+\1b", "match": "search", "seconds": 0.05}
    assert "took longer" in why("format.regex", args, episode("a" * 5000 + "c"))


def test_costs():
    trajectory = episode([call("f"), call("f")], [call("f")], "end")
    for turn in trajectory.turns:
        turn.seconds, turn.prompt_tokens = 50.0, 1000  # of a slow engine: no cost
        turn.results = [replace(result, seconds=2.0) for result in turn.results]
    assert value("cost.turns", {"max": 6}, trajectory) == 0.5
    assert value("cost.calls", {"max": 5, "free": 1}, trajectory) == 0.5
    assert value("cost.calls", {"max": 2}, trajectory) == 1
    assert value("cost.tokens", {"max": 90}, trajectory) == pytest.approx(0.1)
    assert value("cost.seconds", {"max": 60}, trajectory) == pytest.approx(0.1)
    prices = {"per_million_prompt": 10, "per_million_sampled": 1000, "max": 1}
    assert value("cost.usd", prices, trajectory) == pytest.approx((3000 * 10 + 9 * 1000) / 1e6)


CUT = StopReason.MAX_TURNS


@pytest.mark.parametrize(("kind", "args", "trajectory", "worth", "said"), [
    ("cost.turns", {"max": 10, "free": 1}, episode("x", "x", "x"), 2 / 9, {"used": 3, "free": 1, "max": 10}),
    ("episode.stopped", {}, episode("x"), 1, {"stop": "done"}),
    ("episode.stopped", {}, episode("x", stop=CUT), 0, {"stop": "max_turns"}),
    ("episode.stopped", {"reasons": ["max_turns", "done"]}, episode("x", stop=CUT), 1, {"stop": "max_turns"}),
    ("calls.none", {}, episode("hi"), 1, {"made": []}), ("calls.none", {}, episode([call("f")]), 0, {"made": ["f"]}),
    ("calls.none", {"names": ["g"]}, episode([call("f")]), 1, {"made": []}),
])  # fmt: skip
def test_a_leaf_says_what_it_found(kind, args, trajectory, worth, said):
    root = compile_spec(spec(leaf(kind, args))).score(trajectory).evidence["root"]
    assert (root["value"], root["evidence"]) == (pytest.approx(worth), said)


def test_toolrl_says_which_calls_it_paired():
    """The second call made is the first wanted, the first made the third; nobody made the second."""
    wanted = gold(call("f", x=1), call("f", x=2), call("g", y="u"))
    node = leaf("calls.match", {"expect": wanted, "credit": "toolrl"})
    trajectory = episode([call("g", y="u"), call("f", x=1)], "end")
    found = compile_spec(spec(node)).score(trajectory).evidence["root"]["evidence"]
    assert sorted(found["pairs"]) == [[0, 2], [1, 0]] and (found["made"], found["expected"]) == (2, 3)


# -- group -----------------------------------------------------------------------------------------


def group_values(kind, args, trajectories, **mods):
    compiled = compile_spec(spec(leaf(kind, args, **mods)))
    return [score.value for score in compiled.score_group(trajectories)]


def turns_used(*counts):
    return [episode(*["x"] * count) for count in counts]


def test_group_rank():
    of = {"of": leaf("cost.turns", {"max": 10})}
    assert group_values("group.rank", of, turns_used(1, 2, 2, 4)) == [0, 0.5, 0.5, 1]
    assert group_values("group.rank", of, turns_used(3)) == [None]
    # 0.1 + 0.2 is above 0.3 as doubles: a tie all the same.
    of = {"op": "sum", "of": [leaf("text.contains", {"expect": w}, weight=p) for w, p in (("a", 0.3), ("b", 0.1), ("c", 0.2))]}
    assert group_values("group.rank", {"of": of}, [episode("a"), episode("b c"), episode("c")]) == [0.75, 0.75, 0]


def test_group_zscore():
    """Values .1, .2, .3: mean .2, unbiased std .1, z = -1, 0, 1."""
    of = {"of": leaf("cost.turns", {"max": 10}), "bound": 2}
    assert group_values("group.zscore", of, turns_used(1, 2, 3)) == pytest.approx([0.25, 0.5, 0.75])
    assert group_values("group.zscore", of, turns_used(1, 2, 3), scale=[-2, 2]) == pytest.approx([-1, 0, 1])
    assert group_values("group.zscore", of, turns_used(2, 2)) == [0.5, 0.5]
    del of["bound"]  # 3
    assert group_values("group.zscore", of, turns_used(1, 2, 3)) == pytest.approx([1 / 3, 1 / 2, 2 / 3])


def test_unscored_members_take_no_part_in_a_group():
    members = turns_used(1, 2, 3)
    members[1].stop = StopReason.ENGINE_ERROR
    assert group_values("group.rank", {"of": leaf("cost.turns", {"max": 10})}, members) == [0, None, 1]
    null = {"op": "sum", "of": [leaf("cost.turns", {"max": 10}) | {"when": {"$": "/episode/turns", "gte": 2}}]}
    assert group_values("group.rank", {"of": null}, turns_used(1, 2, 3)) == [None, 0, 1]


async def test_a_group_scored_alone_is_null_and_awaited_is_the_same():
    compiled = compile_spec(spec(leaf("group.rank", {"of": leaf("cost.turns", {"max": 10})})))
    members = turns_used(1, 2)
    assert compiled.score(members[0]).value is None
    assert [score.value for score in await compiled.ascore_group(members)] == [0, 1]


# -- junk ------------------------------------------------------------------------------------------

EVERY = [
    leaf("calls.match", {"expect": {"$": "/task/gold/calls"}}),
    leaf("calls.match", {"expect": {"$": "/task/gold/calls"}, "credit": "partial", "order": "ordered"}),
    leaf("calls.match", {"expect": {"$": "/task/gold/calls"}, "credit": "toolrl"}),
    leaf("calls.match", {"expect": {"$": "/task/gold/calls"}, "form": "bfcl"}),
    leaf("calls.schema"), leaf("calls.none"), leaf("state.match", {"expect": {"$": "/task/gold/state"}}),
    leaf("state.match", {"expect": {"$": "/task/gold/state"}, "by": "hash"}),
    leaf("state.assert", {"path": "/a/b", "eq": 1}),
    leaf("results.contains", {"expect": {"$": "/task/gold/answer"}}),
    leaf("text.contains", {"expect": {"$": "/task/gold/answer"}}),
    leaf("text.equals", {"expect": {"$": "/task/gold/answer"}, "strings": "bfcl"}),
    leaf("number.close", {"expect": {"$": "/task/gold/answer"}}),
    leaf("format.regex", {"pattern": "(a+)+$", "seconds": 0.05}), leaf("episode.stopped"), leaf("cost.calls", {"max": 3}),
    leaf("calls.schema", scope="turn"), leaf("calls.none", scope="call", reduce="min"),
    leaf("text.equals", {"expect": "x"}, scope="round"),
]  # fmt: skip


def junk_episode(content, arguments, name="f", state=None, answer=None, calls=None):
    made = ToolCall(name, arguments, id="")
    turns = [
        Turn(0, Message("assistant", content, (made, made)), [ToolResult("", name, content)]),
        Turn(1, Message("assistant", content)),
    ]
    task = Task("t", 0, gold={"answer": answer, "calls": calls, "state": state})
    return Trajectory("E", task, turns=turns, state=state, tools=TOOLS)


JUNK = [
    junk_episode("x" * 100_000, {"a": "y" * 100_000}, answer="z" * 100_000, calls=[{"name": "f", "arguments": {}}] * 50),
    junk_episode("9" * 100_000, {"a": 10**400}, answer="9" * 100_000, state=float("nan")),
    junk_episode("\ud800\x00", {"\ud800": float("inf")}, "\ud800", state={"\ud800": "\ud800"}, answer="\ud800"),
    junk_episode("1," * 50_000, None, answer=float("inf"), calls=[{"f": {"a": 3}}], state=[[[[1]]]]),
    junk_episode("", {}, "", answer="", calls=[], state={}),
    episode(),
]


@pytest.mark.parametrize("node", EVERY, ids=lambda node: node["use"])
@pytest.mark.parametrize("trajectory", JUNK, ids=range(len(JUNK)))
def test_junk_scores_within_the_range_or_is_null(node, trajectory):
    score = compile_spec(spec(node)).score(trajectory)
    assert score.value is None or 0 <= score.value <= 1
    assert len(json.dumps(score.evidence, allow_nan=False)) < 20_000


def test_a_pointer_reads_tildes_and_slashes_in_names():
    """RFC 6901: ~0 is "~" and ~1 is "/", read in that order, so "~01" is "~1"."""
    assert parse_pointer("/a~0b/c~1d/~01") == ("a~b", "c/d", "~1")


PATTERNS = [
    (r"\[[^[\]]+\]", "[a]"), (r"[^[]+", "x]"), (r"[[:alpha:]]", ":]"), (r"[[:alpha:]]", "a"), (r"(?:foo){e}", "foo"),
    (r"a{e<=1}", "ab"), (r"a{i}", "a{i}"), (r"a{}", "a{}"), (r"[a||b]", "|"), (r"[a&&b]", "&"), (r"(?i)straße", "STRASSE"),
    (r"a{1,2}", "aa"), (r"x{,2}", "xx"), (r"\{[^{}]*\}", "{a}"), (r"[]a]+", "]a"), (r"[\[\]]+", "[]"), (r"a{,}", "aaa"),
    (r"{", "{"), (r"\\{", "\\{"), (r"[{}]{2}", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "text"), PATTERNS)
def test_a_pattern_is_read_as_by_pythons_re(pattern, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wanted = re.fullmatch(pattern, text) is not None
    assert value("format.regex", {"pattern": pattern}, episode(text)) == wanted


@pytest.mark.parametrize("credit", ["all", "partial"])
@pytest.mark.parametrize(
    ("found", "wanted"), [(["a", "b"], {"0": "a", "1": "b"}), ({"x": [1]}, {"x": {"0": 1}}), ([[1]], [{"0": 1}])]
)
def test_a_list_is_no_object_of_its_indices(found, wanted, credit):
    for have, need in ((found, wanted), (wanted, found)):
        args = {"expect": need, "by": "fields", "credit": credit}
        assert value("state.match", args, episode("x", state=have)) == 0
        assert value("state.match", {**args, "expect": have}, episode("x", state=have)) == 1


@pytest.mark.parametrize(
    ("said", "gold", "truth"),
    [(1_000_001, 10**6, 0), (1_000_000.4, 10**6, 0), (10**12 + 1, 10**12, 0), (1_000_000.0, 10**6, 1), (0.3, 0.1 + 0.2, 1)],
)
def test_a_query_s_whole_numbers_are_exact(said, gold, truth):
    """A tolerance of a millionth of a number made a million and one right."""
    found = compile_spec(SHELF / "sql.json").score(episode("x", state={"results": [[[said]]]}, task_gold={"results": [[[gold]]]}))
    assert found.value == truth


def test_what_nobody_sees_of_a_text_is_folded_away():
    """A page's zero-width space, copied with a name, made a right answer wrong."""
    for said in ("New\u200b York\ufeff", "\u2060new yo\u00adrk"):
        for expect, answer in ((said, "New York"), ("New York", said)):
            assert value("text.equals", {"expect": expect, "strings": "fold"}, episode(answer)) == 1
            assert value("text.equals", {"expect": expect}, episode(answer)) == 0
    assert value("text.equals", {"expect": "\u200b", "strings": "fold"}, episode("")) is None
    hides = [
        ("\u0646\u0627\u0645\u0647", "\u200e\u0646\u0627\u0645\u0647\u200c\u200f"),
        ("10", "1\u200d0"),
        ("coop", "co\u200cop"),
    ]
    for seen, hidden in (*hides, ("\u2764", "\u2764\ufe0f"), ("yes", "y\U000e0065es"), ("a", "\u3164a")):
        assert value("text.equals", {"expect": seen, "strings": "fold"}, episode(hidden)) == 1, ascii(hidden)


FLAG = "\U0001f3f4\U000e0067\U000e0062{}\U000e007f"


@pytest.mark.parametrize(("one", "other"), [
    ("\u0646\u0627\u0645\u0647\u200c\u0627\u06cc", "\u0646\u0627\u0645\u0647\u0627\u06cc"),  # Persian: "a letter", and no word
    ("\u0915\u094d\u200d\u0937", "\u0915\u094d\u0937"), ("\u0915\u094d\u200c\u0937", "\u0915\u094d\u200d\u0937"),  # Devanagari
    ("\U0001f468\u200d\U0001f469", "\U0001f468\U0001f469"), ("\u2764\ufe0f\u200d\U0001f525", "\u2764\U0001f525"),
    (FLAG.format("\U000e0065\U000e006e\U000e0067"), FLAG.format("\U000e0077\U000e006c\U000e0073")), ("2\u20623", "23"),
])  # fmt: skip
def test_a_joiner_that_makes_another_word_or_emoji_is_not_folded_away(one, other):
    assert value("text.equals", {"expect": one, "strings": "fold"}, episode(other)) == 0
    assert value("text.equals", {"expect": one, "strings": "fold"}, episode(f"\u200b{one}\u200d")) == 1
    part = {"expect": one.partition("\u200c")[0], "strings": "fold", "word": True}  # "houses" in Persian has not the word "house"
    assert value("text.contains", part, episode(f"- {one}!")) == float("\u200c" not in one)


def test_a_text_is_the_same_in_both_spellings_of_unicode():
    """A gold text from a file name of macOS, say, is decomposed, and no model writes it so."""
    one, other = "caf\u00e9", "cafe\u0301"
    for expect, said in ((one, other), (other, one)):
        assert value("text.equals", {"expect": expect}, episode(said)) == 1
        assert value("text.contains", {"expect": expect}, episode(f"a {said}.")) == 1
        for arguments, right in (({"name": expect, "n": [expect, 1]}, 1), ({"name": "cafe", "n": [expect, 1]}, 0)):
            gold = {"expect": [{"name": "open", "arguments": arguments}]}
            assert value("calls.match", gold, episode([call("open", name=said, n=[said, 1])])) == right
        for by in ("hash", "fields"):
            assert value("state.match", {"expect": {"n": expect}, "by": by}, episode(said, state={"n": said})) == 1
            both, changed = {expect: 1, said: 2}, {expect: 2, said: 1}  # two keys that differ by their spelling alone
            for state, right in (({said: 1}, 1), ({"cafe": 1}, 0), (both, 0)):
                assert value("state.match", {"expect": {expect: 1}, "by": by}, episode(said, state=state)) == right
            assert value("state.match", {"expect": both, "by": by}, episode(said, state=changed)) == 0
        gold = {"expect": [{"name": "open", "arguments": {"at": {expect: 1}}}]}
        assert value("calls.match", gold, episode([call("open", at={said: 1})])) == 1
        for args in ({"arguments": {expect: 1}}, {"arguments": {expect: 1, "n": 2}, "compare": [expect]}):
            for credit in ("all", "partial"):
                gold = {"expect": [{"name": expect, **args}], "credit": credit}
                assert value("calls.match", gold, episode([(said, {said: 1})])) == 1
        declared = [{"name": expect, "parameters": {"properties": {expect: {"type": "dict", "properties": {expect: {}}}}}}]
        gold = {"expect": [{expect: {expect: [{expect: ["x"]}]}}], "form": "bfcl", "declared": declared}
        assert value("calls.match", gold, episode([(said, {said: {said: "x"}})])) == 1
        assert value("calls.match", gold, episode([(said, {said: {said: "y"}})])) == 0
        assert value("calls.none", {"names": [expect]}, episode([(said, {})])) == 0
        assert value("state.assert", {"path": f"/n/{expect}", "eq": 1}, episode("x", state={"n": {said: 1}})) == 1
        ignoring = {"expect": {"n": {}}, "ignore": [f"/n/{expect}"]}
        assert value("state.match", ignoring, episode("x", state={"n": {said: 1}})) == 1
