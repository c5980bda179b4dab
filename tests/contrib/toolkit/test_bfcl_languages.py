"""BFCL's Java and JavaScript, by hand from bfcl-eval 2026.3.23 (benchmarks/parity/bfcl.py compares)."""

from typing import Any

import pytest

from agentrl.contrib.toolkit.bfcl_calls import possible_call, read_source, solvable
from agentrl.reward import compile_spec
from tests.reward.reward_episodes import episode

JAVA = [
    ("-7", "integer", None, -7), ("7.0", "integer", None, "7.0"), ("7L", "long", None, 7), ("7", "long", None, "7"),
    ("1.5f", "float", None, 1.5), ("1.5", "float", None, "1.5"), ("15e-1", "double", None, 1.5),
    ("true", "boolean", None, True), ("True", "boolean", None, "True"), ("'c'", "char", None, "'c'"),
    ('"quoted"', "String", None, '"quoted"'), ("new int[]{1, 2}", "Array", "integer", [1, 2]),
    ("new int[]{1, x}", "Array", "integer", [1, "x"]), ('new String[]{"a", "b"}', "Array", "String", ['"a"', '"b"']),
    ('new ArrayList<>(Arrays.asList("a", "b"))', "ArrayList", "String", ["a", "b"]),
    ('new ArrayList<>(Arrays.asList("a, b"))', "ArrayList", "String", ["", ""]),
    ("new ArrayList<Integer>() {{ add(1); add(2); }}", "ArrayList", "integer", [1, 2]),
    ("new ArrayList<>()", "ArrayList", "any", []), ("[1, 2]", "ArrayList", "integer", "[1, 2]"),
    ('new HashMap<String, Object>() {{ put("a", 1); put("b", "x"); put("c", 2L); put("d", y); }}', "HashMap", None,
     {"a": 1, "b": "x", "c": 2, "d": "y"}),
    ("new HashMap<>()", "HashMap", None, {}),
]  # fmt: skip
JAVASCRIPT = [
    ("'quoted'", "String", None, "quoted"), ('"open', "String", None, '"open'), ("4", "float", None, 4.0),
    ("4n", "Bigint", None, 4), ("4", "Bigint", None, "4"), ("false", "Boolean", None, False),
    ("['a', \"b\"]", "array", "String", ["a", "b"]), ("[1, 'x']", "array", "integer", [1, "'x'"]),
    ("[1, 'x', true, 2.5]", "array", None, [1, "x", True, 2.5]), ("new Array(1, 2)", "array", "integer", [1, 2]),
    ("[[1, 2], [3]]", "array", "array", [[1, 2], [3]]), ("{}", "dict", None, {}),
    ("{a: 1, 'b': 'x', c: [1, 2]}", "dict", None, {"a": 1, "b": "x", "c": [1, 2]}),
    ("{a: {b: 1}, c: 2}", "dict", None, {"a": "{b: 1"}), ("someName", "dict", None, "someName"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("language", "text", "kind", "items", "value"),
    [("java", *row) for row in JAVA] + [("javascript", *row) for row in JAVASCRIPT],
)
def test_a_text_is_read_by_its_declared_type(language: str, text: str, kind: str, items: str | None, value: Any) -> None:
    made = read_source(language, text, kind, items)
    assert (made, type(made)) == (value, type(value))


def test_what_the_leaderboard_does_not_read_has_no_value() -> None:
    for language, kind in (("java", "Queue"), ("java", "Set"), ("javascript", "Map")):
        with pytest.raises(ValueError, match=kind):
            read_source(language, "x", kind)


FUNCTION = {
    "name": "Sets.fill",
    "parameters": {
        "type": "dict",
        "properties": {
            "size": {"type": "long"},
            "names": {"type": "ArrayList", "items": {"type": "String"}},
            "target": {"type": "any"},
        },
        "required": ["size", "names"],
    },
}
GOLD = [{"Sets.fill": {"size": [3], "names": [["a", "b"]], "target": ["", "box"]}}]
RIGHT = {"size": "3L", "names": 'new ArrayList<>(Arrays.asList("a", "b"))'}


def _verdict(arguments: dict[str, Any], language: str = "java") -> float | None:
    args = {"expect": GOLD, "form": "bfcl", "declared": [FUNCTION], "language": {"$": "/task/gold/language"}}
    spec = {"agentrl_reward": 1, "name": "t", "root": {"use": "calls.match", "args": args}}
    played = episode([("Sets.fill", arguments)], task_gold={"language": language})
    return compile_spec(spec).score(played).value


def test_a_java_call_is_right_by_values_in_java_syntax_and_as_java_alone() -> None:
    assert _verdict(RIGHT) == 1.0
    assert _verdict({**RIGHT, "target": "box"}) == 1.0
    assert _verdict({**RIGHT, "target": "B o-x"}) == 1.0  # texts are normalized as in Python
    for wrong in ({"size": "3"}, {"size": 3}, {"names": '["a", "b"]'}, {"names": ["a", "b"]}, {"target": "bag"}, {"extra": "1"}):
        assert _verdict({**RIGHT, **wrong}) == 0.0, wrong
    assert _verdict({"size": "3L"}) == 0.0
    assert _verdict(RIGHT, "javascript") == 0.0
    assert _verdict(RIGHT, "cobol") is None


def test_leaves_that_declare_functions_differently_do_not_share_what_they_read() -> None:
    whole = {**FUNCTION, "parameters": {**FUNCTION["parameters"], "required": ["size", "names", "target"]}}
    played = episode([("Sets.fill", RIGHT)], task_gold={"calls": GOLD})

    def share(*functions: dict[str, Any]) -> float | None:
        args = {"expect": {"$": "/task/gold/calls"}, "form": "bfcl", "language": "java"}
        of = [{"use": "calls.match", "args": {**args, "declared": [function]}} for function in functions]
        root = {"op": "mean", "of": of}
        return compile_spec({"agentrl_reward": 1, "name": "t", "root": root}).score(played).value

    # Of each two, one requires what was left out.
    assert (share(FUNCTION, whole), share(whole, FUNCTION), share(FUNCTION), share(whole)) == (0.5, 0.5, 1.0, 0.0)


def test_a_gold_call_can_be_written_in_each_language() -> None:
    functions = {"Sets.fill": FUNCTION["parameters"]}
    assert possible_call(GOLD[0], functions, "java") == ("Sets.fill", RIGHT)
    assert solvable(GOLD, functions, "java")
    assert not solvable([{"Sets.fill": {"size": ["many"], "names": [[1, "a"]]}}], functions, "java")
