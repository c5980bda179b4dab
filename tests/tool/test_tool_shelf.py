"""The shelf of tools: what they answer and what they refuse."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import ToolCall
from agentrl.env import Toolbox
from agentrl.env.catalog import find_tools, load_tools
from tests.conftest import examples

BOX = Toolbox([item for name in ("calculator", "dates") for item in load_tools(find_tools(name))])  # type: ignore[union-attr]


def ask(name: str, **arguments: Any) -> str:
    return asyncio.run(BOX.call(ToolCall(name, arguments))).content


@pytest.mark.parametrize(("expression", "answer"), [
    ("1 + 2 * 3", "7"),
    ("(1 + 2) * 3", "9"),
    ("7 / 2", "3.5"),
    ("7 // 2", "3"),
    ("-2 ** 2", "-4"),
    ("2 ** 10", "1024"),
    ("10 % 4", "2"),
    ("sqrt(16)", "4.0"),
    ("round(1234.567, 1)", "1234.6"),
    ("round(1234, -2)", "1200"),
    ("round(2.5)", "2"),
    ("max(1, 2, 3) - abs(-4)", "-1"),
    (" 1e3 ", "1000.0"),
])  # fmt: skip
def test_arithmetic(expression: str, answer: str) -> None:
    assert ask("calculate", expression=expression) == answer


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1 / 0", "a + 1", "__import__('os')", "(1).real", "9 ** 9 ** 9", "(-1) ** 0.5", "1e308 * 10",
     "[1]", "'a' * 9", "True + 1", "f(1)", "min()", "(" * 300, "round(5, -10**9)",
     "round(10**299, -10**299)", "1" * 2000, "10 ** 299 * 10 ** 299", "log(0)"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused_in_words(expression: str) -> None:
    assert '"error": "tool_error"' in ask("calculate", expression=expression)


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
@settings(max_examples=examples(100), deadline=None)
def test_it_agrees_with_python(a: int, b: int, sign: str) -> None:
    assert ask("calculate", expression=f"{a} {sign} {b}") == str(eval(f"{a} {sign} {b}"))  # numbers only


def test_dates() -> None:
    assert ask("add_days", date="2024-02-28", days=2) == "2024-03-01"
    assert ask("days_between", first="2024-02-28", last="2024-03-01") == "2"
    assert ask("weekday", date="2026-11-21") == "Saturday"
    for other in ("21 November", "0", "20261121", "2026-11-21T00:00:00", "2026-02-30"):
        assert "invalid_argument" in ask("weekday", date=other)
    assert "tool_error" in ask("add_days", date="9999-12-31", days=1)
