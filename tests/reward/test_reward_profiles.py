"""Every profile of the shelf against scores worked out by hand from its public definition."""

import pytest

from agentrl.data.trajectory import Message, StopReason, ToolCall
from agentrl.reward import Context, compile_spec
from tests.reward.reward_episodes import SHELF, Counter, call, episode, gold, tool_schema

WITH_REPLAY = Context(replay_env=Counter)


def score(name, trajectory, context=None):
    return compile_spec(SHELF / f"{name}.json", context=context).score(trajectory)


# -- exact_calls -----------------------------------------------------------------------------------

PAIR = gold(call("get", key="a"), call("get", key="b"))


@pytest.mark.parametrize(("made", "value"), [
    ([call("get", key="a"), call("get", key="b")], 1),
    ([call("get", key="b"), call("get", key="a")], 1),  # order is free
    ([call("get", key="a")], 0),
    ([call("get", key="a"), call("get", key="a")], 0),  # one call cannot stand for two
    ([call("get", key="a"), call("get", key="b"), call("get", key="b")], 0),
    ([call("get", key="a"), call("get", key="B")], 0),
    ([], 0),
])  # fmt: skip
def test_exact_calls(made, value):
    assert score("exact_calls", episode(made, "done", task_gold={"calls": PAIR})).value == value


# -- BFCL AST --------------------------------------------------------------------------------------

WEATHER = [{"weather": {"city": ["New York, NY", "NYC"], "days": [3], "unit": ["", "celsius"]}}]
TOOLS = [tool_schema("weather", city="string", days="integer")]
TOOLS[0]["function"]["parameters"]["properties"]["unit"] = {"type": "string"}


@pytest.mark.parametrize(("arguments", "value"), [
    ({"city": "New York, NY", "days": 3}, 1),
    ({"city": "new york ny", "days": 3}, 1),  # case, blanks and punctuation do not count
    ({"city": "NYC", "days": 3, "unit": "Celsius"}, 1),  # "" among the values: may be left out
    ({"city": "Boston", "days": 3}, 0),
    ({"city": "NYC"}, 0),  # a required parameter is missing
    ({"city": "NYC", "days": 3, "lang": "en"}, 0),  # an unexpected one is there
    ({"city": "NYC", "days": 3.0}, 0),  # an integer is declared
    ({"city": "NYC", "days": "3"}, 0),
    ({"city": "NYC", "days": True}, 0),
    ({"city": "NYC", "days": 3, "unit": ""}, 1),
])  # fmt: skip
@pytest.mark.parametrize("profile", ["bfcl_ast", "bfcl_ast_parity"])
def test_bfcl_ast_of_one_call(profile, arguments, value):
    trajectory = episode([call("weather", **arguments)], task_gold={"calls": WEATHER}, tools=TOOLS)
    assert score(profile, trajectory).value == value


@pytest.mark.parametrize(("kind", "allowed", "made", "value"), [
    ("float", [5.0], 5, 1),  # an integer passes for a float
    ("float", [5], 5.0, 1),
    ("boolean", [True], True, 1),
    ("boolean", [True], 1, 0),
    ("array", [["a b", "C"]], ["AB", "c"], 1),  # texts in lists are normalized too
    ("array", [["a", "b"]], ["b", "a"], 0),  # the order in a list counts
    ("dict", [{"k": ["x", ""], "n": [1]}], {"n": 1}, 1),  # "" makes a key of an object optional
    ("dict", [{"k": ["x"], "n": [1]}], {"n": 1}, 0),
    ("dict", [{"n": [1]}], {"n": 1, "z": 2}, 0),
    ("array", [[{"n": [1]}, {"n": [2, 3]}]], [{"n": 1}, {"n": 3}], 1),
    ("array", [[{"n": [1]}, {"n": [2]}]], [{"n": 2}, {"n": 1}], 0),
    # What is odd about the leaderboard is kept.
    ("array", ["", ["x"]], [], 1),  # an empty list stands for ""
    ("array", [["x"]], [], 0),
    ("dict", [{"n": [1]}], {"n": True}, 1),  # inside an object True is 1, as in Python
    ("array", [[1]], [True], 1),
    ("integer", [1], True, 0),
    ("dict", [{"k": ["a b"]}], {"k": "AB"}, 1),  # texts of an object are normalized
    ("dict", [{"k": [{"in": "a b"}]}], {"k": {"in": "AB"}}, 0),  # those below are not
    ("array", [[["a b"]]], [["AB"]], 0),
    ("integer", ["some_name"], "some_name", 1),  # a variable's name, which must be equal letter by letter
    ("integer", ["some_name"], "Some_Name", 0),
    ("float", ["3.5", 3.5], 3.5, 1),
    ("string", [["a"]], ["a"], 1),
    ("string", [["a"]], ["A"], 0),
])  # fmt: skip
def test_bfcl_ast_of_one_value(kind, allowed, made, value):
    tools = [tool_schema("f", v=kind)]
    trajectory = episode([call("f", v=made)], task_gold={"calls": [{"f": {"v": allowed}}]}, tools=tools)
    assert score("bfcl_ast", trajectory).value == value


@pytest.mark.parametrize(("made", "gold", "value"), [
    ({"a": 1, "b": 2}, {"a": [1], "b": [2]}, 1),
    ({"a": 1}, {"a": [1]}, 0),  # b is required by the tool, though the answer does not know it
    ({"a": 1, "b": 2}, {"a": [1]}, 0),  # and is unexpected by the answer
    ({"a": 1, "b": 2, "z": 3}, {"a": [1], "b": [2], "z": [3]}, 0),  # the tool has no z, though the answer does
    ({"a": 1, "b": 2}, {"a": [1], "b": [2], "z": ["", 3]}, 1),
])  # fmt: skip
def test_bfcl_ast_reads_the_tools_declaration_and_the_answer(made, gold, value):
    trajectory = episode(
        [call("f", **made)], task_gold={"calls": [{"f": gold}]}, tools=[tool_schema("f", a="integer", b="integer")]
    )
    assert score("bfcl_ast", trajectory).value == value


def test_bfcl_greedy_misses_a_matching_that_the_optimal_assignment_finds():
    """The first possible answer takes the call that only the second one could have used."""
    answers = [{"f": {"v": ["a", "b"]}}, {"f": {"v": ["a"]}}]
    trajectory = episode([call("f", v="a"), call("f", v="b")], task_gold={"calls": answers})
    assert score("bfcl_ast", trajectory).value == 1
    assert score("bfcl_ast_parity", trajectory).value == 0


# -- BFCL multi-turn -------------------------------------------------------------------------------

ROUNDS = [gold(call("add", x=2)), [], gold(call("add", x=3), call("add", x=1))]


def rounds(first, second, third, **rest):
    turns = [*first, "ok", "user: next", *second, "ok", "user: last", *third, "done"]
    return episode(*turns, task_gold={"rounds": ROUNDS}, state={"total": 6}, **rest)


def add(x, answer):
    return [(call("add", x=x), answer)]


@pytest.mark.parametrize(("turns", "value"), [
    (([add(2, "2")], [], [add(3, "5"), add(1, "6")]), 1),
    (([add(2, "2")], [], [[*add(3, "5"), *add(1, "6")]]), 1),
    (([add(2, "2")], [], [add(4, "6")]), 0),  # the state is right, the answers "5" is missing
    (([add(2, "2")], [], [add(1, "3"), add(3, "6")]), 0),  # order changes the answers
    (([add(1, "1"), add(1, "2")], [], [add(3, "5"), add(1, "6")]), 1),  # more steps, same state and answers
    (([add(3, "3")], [], [add(2, "5"), add(1, "6")]), 0),  # the state is wrong after the first round
    (([], [], [add(2, "2"), add(3, "5"), add(1, "6")]), 0),  # no call in a round that needs one
])  # fmt: skip
def test_bfcl_multi_turn(turns, value):
    assert score("bfcl_multi_turn", rounds(*turns), WITH_REPLAY).value == value


@pytest.mark.parametrize(
    ("stop", "more", "value"), [(StopReason.MAX_TURNS, [gold(call("add", x=2))], 0), (StopReason.DONE, [], 1)]
)
def test_bfcl_multi_turn_of_an_episode_that_only_reached_rounds_without_gold_calls(stop, more, value):
    """No round asks for anything, so it is worth what `stopped` says; a part that nothing was asked of takes no value away."""
    early = episode("ok", task_gold={"rounds": [[], *more]}, state={"total": 0}, stop=stop)
    assert score("bfcl_multi_turn", early, WITH_REPLAY).value == value


# -- tau-bench -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "said", "outputs", "value"), [
    (5, "That is 1,234 Dollars.", ["1234 dollars"], 1),
    (5, "That is 1,234 dollars.", ["99"], 0),
    (4, "That is 1,234 dollars.", ["1234"], 0),
    (5, "Done.", [], 1),  # without outputs only the actions count
    (4, "Done.", [], 0),
])  # fmt: skip
def test_tau_bench_is_a_product(total, said, outputs, value):
    task_gold = {"calls": gold(call("add", x=2), call("add", x=3)), "outputs": outputs}
    trajectory = episode([call("add", x=total)], said, task_gold=task_gold, state={"total": total})
    assert score("tau_bench", trajectory, WITH_REPLAY).value == value


def test_an_episode_that_was_cut_is_worth_nothing():
    task_gold = {"calls": gold(call("add", x=2)), "outputs": []}
    cut = episode([call("add", x=2)], "Done.", task_gold=task_gold, state={"total": 2}, stop=StopReason.MAX_TURNS)
    assert score("tau_bench", cut, WITH_REPLAY).value == 0
    cut = rounds([add(2, "2")], [], [add(3, "5"), add(1, "6")], stop=StopReason.MAX_TURNS)
    assert score("bfcl_multi_turn", cut, WITH_REPLAY).value == 0


def test_tau_bench_reads_what_was_said_and_not_what_went_with_a_call():
    said = Message("assistant", "42", (ToolCall("add", {"x": 0}, id="z"),))
    trajectory = episode([call("add", x=0)], "done", task_gold={"calls": [], "outputs": ["42"]}, state={"total": 0})
    trajectory.turns[0].message = said
    assert score("tau_bench", trajectory, WITH_REPLAY).value == 0


# -- ToolRL ----------------------------------------------------------------------------------------

TWO = gold(call("f", a=1, b=2), call("g", c=3))  # S_max = 1 + 2 + 3 = 6


@pytest.mark.parametrize(("made", "correct"), [
    ([call("f", a=1, b=2), call("g", c=3)], 3.0),
    ([call("g", c=3), call("f", a=1, b=2)], 3.0),
    # names 1/2, keys 1, values 2 -> 6 * 3.5 / 6 - 3
    ([call("f", a=1, b=2)], 0.5),
    # names 1, keys 1 + 1, values 1 + 0 -> 6 * 4 / 6 - 3
    ([call("f", a=1, b=0), call("g", c=0)], 1.0),
    # names 1, keys |{a}| / |{a, b, z}| + 1, values 1 + 1 -> 6 * (1 + 4/3 + 2) / 6 - 3
    ([call("f", a=1, z=2), call("g", c=3)], 4 / 3),
    # names 0
    ([call("h", a=1)], -3.0),
    ([], -3.0),
    # names 2/4: the two extra calls cost only there -> 6 * (.5 + 2 + 3) / 6 - 3
    ([call("f", a=1, b=2), call("g", c=3), call("h"), call("h")], 2.5),
])  # fmt: skip
@pytest.mark.parametrize("profile", ["toolrl", "toolrl_parity"])
def test_toolrl(profile, made, correct):
    result = score(profile, episode(made, "done", task_gold={"calls": TWO}, reasoning="I think"))
    assert result.metrics["r_correct"] == pytest.approx(correct)
    assert result.metrics["r_format"] == (1 if made else 0)
    assert result.value == pytest.approx(correct + (1 if made else 0))


def test_toolrl_greedy_takes_the_first_best_call():
    """Gold 1 = f(a=1), gold 2 = f(a=1, b=2). Calls: f(a=1, b=2) and f(a=1, c=9).
    Gold 1 scores (keys 1/2 + value 1) with both and takes the first; gold 2 is left with keys 1/3 + 1.
    Greedy 1.5 + 4/3; optimal 1.5 + (1 + 2). S_max = 1 + 2 + 3, names 1."""
    calls = gold(call("f", a=1), call("f", a=1, b=2))
    trajectory = episode([call("f", a=1, b=2), call("f", a=1, c=9)], task_gold={"calls": calls}, reasoning="hm")
    assert score("toolrl_parity", trajectory).metrics["r_correct"] == pytest.approx(1 + 1.5 + 4 / 3 - 3)
    assert score("toolrl", trajectory).metrics["r_correct"] == pytest.approx(1 + 4.5 - 3)


def test_toolrl_without_gold_calls_wants_an_answer():
    silent = {"task_gold": {"calls": []}, "reasoning": "hm"}
    assert score("toolrl", episode("no tool fits", **silent)).value == 4
    assert score("toolrl", episode([call("f", a=1)], "x", **silent)).value == -3  # a call too many


def test_toolrl_format_needs_reasoning_and_readable_calls():
    broken = ToolCall("f", None, id="c0", error="not JSON")
    trajectory = episode([broken], task_gold={"calls": TWO}, reasoning="hm")
    assert score("toolrl", trajectory).metrics["r_format"] == 0
    assert score("toolrl", episode([call("f", a=1, b=2)], task_gold={"calls": TWO})).metrics["r_format"] == 0


# -- the others ------------------------------------------------------------------------------------

GET = [tool_schema("get", key="string")]


@pytest.mark.parametrize(("made", "answer", "value"), [
    ([call("get", key="a")], "The answer is 7", 1.0), ([call("get", key="a")], "The answer is 8", 0.1),
    ([call("get", key=1)], "7", 0.9), ([call("got", key="a")], "8", 0.0), ([call("get", key="a")], " ", 0.0),
])  # fmt: skip
def test_format_outcome(made, answer, value):
    trajectory = episode(made, answer, task_gold={"answer": "7"}, tools=GET)
    assert score("format_outcome", trajectory).value == pytest.approx(value)


def test_format_outcome_pays_nothing_for_doing_nothing():
    assert score("format_outcome", episode(task_gold={"answer": "7"}, tools=GET)).value == 0


def test_dense_gated():
    """Turn shares 1, 1/2 (one of two calls is right), 0: mean 1/2; so 0.5 + 0.5 * 1/2, the shares at their turns."""
    turns = [[call("get", key="a")], [call("get", key="b"), call("get", key="x")], [call("get", key="y")], "7"]
    right = score("dense_gated", episode(*turns, task_gold={"answer": "7", "calls": PAIR}))
    assert right.value == pytest.approx(0.75)
    assert right.turns == pytest.approx({0: 0.5 / 3, 1: 0.25 / 3})
    assert right.terminal == pytest.approx(0.5)
    wrong = score("dense_gated", episode(*turns, task_gold={"answer": "8", "calls": PAIR}))
    assert (wrong.value, wrong.turns) == (0, {})


def test_costs():
    """24 turns = half of the way from 16 to 32; 23 calls = 7/16; 72 tokens are below the free 1024."""
    turns = [[call("get", key="a")] for _ in range(23)]
    result = score("costs", episode(*turns, "7", task_gold={"answer": "7"}))
    assert result.value == pytest.approx(1 - 0.2 * 0.5 - 0.1 * 7 / 16)
    assert score("costs", episode(*turns, "8", task_gold={"answer": "7"})).value == 0
