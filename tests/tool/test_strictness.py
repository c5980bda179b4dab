"""What a tool's arguments are checked against, apart from what is shown; and what a policy reads of an error."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentrl.data.trajectory import ToolCall, ToolResult
from agentrl.env import Hidden, Tool, Toolbox, tool
from agentrl.env.call_options import Options, Problem, compile_validator
from agentrl.env.tools import tool_methods
from agentrl.utils.errors import ConfigError, EnvError, ToolError, ToolSchemaError
from tests.conftest import examples

PUBLISHED = {
    "type": "dict",  # as a benchmark publishes it: no JSON Schema
    "properties": {"amount": {"type": "float", "description": "how much"}, "note": {"type": "string"}},
    "required": ["amount"],
}


def pay(amount: float, note: str = "") -> dict[str, Any]:
    return {"paid": amount * 2, "note": note}


async def pay_async(amount: float, note: str = "") -> dict[str, Any]:
    return {"paid": amount * 2, "note": note}


class Till:
    """Its method is a tool."""

    def pay(self, amount: float, note: str = "") -> dict[str, Any]:
        return {"paid": amount * 2, "note": note}


def call(made: Tool, arguments: Any, owner: object | None = None, **box: Any) -> ToolResult:
    return asyncio.run(Toolbox([made], owner=owner, **box).call(ToolCall(made.name, arguments)))


def python(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[bool, str]:
    """The plain Python call: whether it answers, and what it answers or raises."""
    try:
        answer = function(**arguments)
        answer = asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
    except Exception as fault:
        return False, str(fault)
    return True, json.dumps(answer, ensure_ascii=False)


ARGUMENTS = [
    {"amount": 5},  # for a float: 10, not 10.0
    {"amount": 2.5, "note": "a"},
    {"amount": "5"},  # stays a string: "55"
    {"amount": None},  # raised inside the function
    {},
    {"note": "x"},
    {"amount": 1, "tip": 2},
    {"amount": 1, "tip": 2, "extra": 3},
    {"tip": 2},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("function", [pay, pay_async], ids=["plain", "async"])
def test_a_lenient_call_does_what_python_does_and_says_what_it_says(function: Any, arguments: dict[str, Any]) -> None:
    made = Tool.from_schema("pay", "", PUBLISHED, function, Options(check="lenient", error="{message}"))
    answered, text = python(function, arguments)
    result = call(made, arguments)
    assert (result.error is None, result.content) == (answered, text)


@given(st.dictionaries(st.sampled_from(["amount", "note", "tip", "self"]), st.integers() | st.text(max_size=3) | st.none()))
@settings(max_examples=examples(150), deadline=None)
def test_a_lenient_method_is_called_as_a_bound_one(arguments: dict[str, Any]) -> None:
    made = Tool(Till.pay, "pay", Options(check="lenient", error="{message}", inline=True), method=True)
    answered, text = python(Till().pay, arguments)
    result = call(made, arguments, owner=Till())
    assert (result.error is None, result.content) == (answered, text)


def test_what_is_shown_is_the_published_schema_whatever_is_checked() -> None:
    for check in ("strict", "lenient", "off"):
        made = Tool.from_schema("pay", "d", PUBLISHED, pay, Options(check=check))
        assert made.schema["function"] == {"name": "pay", "description": "d", "parameters": PUBLISHED}
    with pytest.raises(TypeError, match="not a valid JSON Schema"):
        call(Tool.from_schema("pay", "", PUBLISHED, pay), {"amount": 1})


def test_the_three_checks_of_the_same_call() -> None:
    valid = {**PUBLISHED, "type": "object", "properties": {"amount": {"type": "number"}}, "additionalProperties": False}

    def seen(**arguments: Any) -> str:
        return json.dumps(arguments)

    def outcome(check: Any, function: Any, arguments: Any) -> tuple[str | None, str]:
        result = call(Tool.from_schema("t", "", valid, function, Options(check=check, error="{message}")), arguments)
        return result.error, result.content

    wrong = {"amount": "5", "x": 1}
    assert outcome("strict", seen, wrong)[0] in ("wrong_type", "unexpected_argument")
    assert outcome("lenient", seen, wrong) == outcome("off", seen, wrong) == (None, '{"amount": "5", "x": 1}')
    # Python's own text either way; only a call that could not be entered is known to be the policy's mistake beforehand.
    text = f"{pay.__qualname__}() got an unexpected keyword argument 'x'"
    assert outcome("lenient", pay, wrong) == ("unexpected_argument", text)
    assert outcome("off", pay, wrong) == ("tool_error", text)
    assert outcome("lenient", pay, [1]) == outcome("off", pay, [1]) == ("wrong_type", "expected object, got array [1]")


class Speed(Enum):
    SLOW = "slow"


@dataclass
class Parcel:
    grams: float


def test_a_lenient_typed_tool_gets_its_own_types_where_the_values_fit_them() -> None:
    got: list[Any] = []

    @tool(inline=True, check="lenient")
    def ship(parcel: Parcel, speed: Speed = Speed.SLOW, costs: list[float] | None = None, city: str = "") -> None:
        got.append((parcel, speed, costs, city))

    assert call(ship, {"parcel": {"grams": 5}, "speed": "slow", "costs": [1, 2.5], "city": 7}).error is None
    assert got == [(Parcel(5.0), Speed.SLOW, [1, 2.5], 7)]
    assert type(got[0][2][0]) is int  # of JSON's own types nothing is converted: Python would not either
    call(ship, {"parcel": {"kilos": 5}, "speed": "fast"})
    assert got[1][:2] == ({"kilos": 5}, "fast")


def test_a_bare_number_stays_a_text_for_a_lenient_tool() -> None:
    """pydantic takes it for seconds since 1970."""
    got: list[Any] = []

    @tool(inline=True, check="lenient")
    def book(at: datetime, more: list[datetime]) -> None:
        got.append((at, *more))

    for text in ("2024", "2024-01-01T00:00:00"):
        assert call(book, {"at": text, "more": [text]}).error is None
    assert got == [("2024", "2024"), (datetime(2024, 1, 1), datetime(2024, 1, 1))]


def test_a_function_that_raises_stops_the_episode_unless_the_policy_is_to_read_of_it() -> None:
    def broken(x: int) -> int:
        return [1][x]

    def leaves(x: int) -> None:
        sys.exit(3)

    strict = tool(broken)
    with pytest.raises(EnvError, match="IndexError: list index out of range"):
        call(strict, {"x": 4})
    answer = call(strict.with_options(on_error="answer"), {"x": 4})
    assert json.loads(answer.content) == {"error": "tool_error", "message": "list index out of range"}
    assert call(strict.with_options(check="off"), {"x": 4}).error == "tool_error"
    with pytest.raises(EnvError, match="IndexError"):
        call(strict.with_options(check="lenient", on_error="stop"), {"x": 4})
    # A call that Python would refuse is the policy's mistake even so.
    assert call(strict.with_options(check="lenient", on_error="stop"), {"y": 4}).error == "unexpected_argument"
    with pytest.raises(EnvError, match=r"sys\.exit"):  # never an answer
        call(tool(leaves).with_options(on_error="answer"), {"x": 4})


def test_a_policy_sets_no_hidden_parameter_under_any_check() -> None:
    def mine(key: str, user: Annotated[str, Hidden()]) -> str:
        return f"{user}:{key}"

    shown = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"], "additionalProperties": False}
    for made in (tool(inline=True)(mine), Tool.from_schema("mine", "", shown, mine, Options(inline=True), hidden=["user"])):
        for check in ("strict", "lenient", "off"):
            checked = made.with_options(check=check)
            assert call(checked, {"key": "a"}, hidden={"user": "ann"}).content == "ann:a"
            refused = call(checked, {"key": "a", "user": "bob"}, hidden={"user": "ann"})
            assert refused.error == "unexpected_argument" and "'user'" in refused.content, check
            missing = call(checked, {}, hidden={"user": "ann"})
            assert missing.error is not None and "'key'" in missing.content and "user" not in missing.content
    with pytest.raises(ValueError, match="shows the policy 'key'"):
        Tool.from_schema("mine", "", shown, mine, hidden=["key"])


@pytest.mark.parametrize(("form", "says"), [
    ("Error: {message}", 'Error: no "x"'),
    ('{"error": {json}}', '{"error": "no \\"x\\""}'),
    ("{tool} {error}", "give tool_error"),
    ("failed", "failed"),
])  # fmt: skip
def test_an_error_is_shown_in_the_form_that_its_tool_gives(form: str, says: str) -> None:
    def give() -> None:
        raise ToolError('no "x"')

    assert call(tool(error=form)(give), {}).content == says
    assert call(tool(error=form)(give), {}).error == "tool_error"  # the record says what it was


def test_an_environments_own_words_are_for_every_error_that_no_tool_words() -> None:
    class Shop:
        def error_text(self, call: ToolCall, problem: Problem) -> str:
            return f"Error: {call.name} / {problem.kind}"

    box = Toolbox([tool(pay), tool(name="own", error="own: {error}")(pay)], owner=Shop())
    calls = [ToolCall("pai", {}), ToolCall("pay", {}), ToolCall("own", {}), ToolCall("pay", None)]
    said = [asyncio.run(box.call(made)).content for made in calls]
    refused, own = "Error: pay / missing_argument", "own: missing_argument"
    assert said == ["Error: pai / unknown_tool", refused, own, "Error: pay / malformed_call"]


def test_options_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\{mesage\} is no field; did you mean 'message'"):
        Options(error="Error: {mesage}")
    wrong: dict[str, Any] = {
        "check": "loose", "on_error": "raise", "on_timeout": "anser", "late": "me", "by": "usr", "timeout": "5", "parallel": "no",
    }  # fmt: skip
    for name, value in [*wrong.items(), ("timeout", 0), ("timeout", float("nan")), ("concurrency", 0), ("max_output", -1)]:
        with pytest.raises(ConfigError, match=f"{name} = {value!r}.*; expected "):
            tool(**{name: value})(pay)


class Bare:
    """An environment's class, as far as its tools are looked for."""

    __module__ = "agentrl.env.base"

    def state(self) -> int:
        return 1


def test_a_tool_that_no_policy_could_use_is_refused() -> None:
    """The first was the record's state; the second was not there, without a word."""

    class Shadow(Bare):
        @tool
        def state(self) -> int:
            return 2

    class Hides:
        @staticmethod
        @tool
        def get(x: int) -> int:
            return x

    for owner, said in ((Shadow, r"Shadow\.state: .*@tool\(name='state'\)"), (Hides, r"Hides\.get: a decorator hides")):
        with pytest.raises(ToolSchemaError, match=said):
            list(tool_methods(owner))
    for made in (partial(pay, 1), classmethod(pay), "pay"):
        with pytest.raises(ToolSchemaError, match=r"tool f: .* is no function"):
            tool(name="f")(made)  # type: ignore[arg-type]


def test_a_tool_without_a_limit_has_that_of_its_toolbox_and_an_errors_message_too() -> None:
    def long() -> str:
        return "word " * 2000

    def fails() -> None:
        raise ToolError("word " * 2000)

    def size(made: Tool, **box: Any) -> int:
        return len(call(made, {}, **box).content.encode())

    assert size(tool(long)) in range(4 * 2048 - 40, 4 * 2048 + 1)  # four bytes a token
    assert size(tool(long), max_output=100) in range(360, 401)
    assert size(tool(max_output=200)(long), max_output=100) in range(760, 801)  # its own goes first
    cut = call(tool(long), {}, max_output=100).content
    assert cut.endswith("of 10000 characters]") and "[cut: " in cut
    words = lambda text: len(text.split())  # noqa: E731
    assert 45 <= words(call(tool(long), {}, max_output=50, count_tokens=words).content) <= 50
    error = json.loads(call(tool(fails), {}, max_output=100).content)
    assert error["error"] == "tool_error" and len(error["message"]) <= 400 and "[cut: " in error["message"]


def test_a_tool_with_other_options_reads_no_signature_anew() -> None:
    made = tool(pay)
    assert made.with_options(timeout=1).signature is not made.signature  # nothing was read yet
    assert made.with_options(timeout=2).signature is made.signature


def test_equal_schemas_are_compiled_once_and_different_ones_apart() -> None:
    def schema(most: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"n": {"type": "integer", "maximum": most}}}

    one, same, other = (compile_validator(name, schema(most)) for name, most in (("a", 3), ("b", 3), ("a", 4)))
    assert one is same and one is not other
    assert [check({"n": 4}) is None for check in (one, other)] == [False, True]
    seven = {"type": "object", "properties": {"n": {"const": 7}}}
    check = compile_validator("a", seven)
    seven["properties"]["n"]["const"] = 8  # type: ignore[index]  # what is changed later does not change what was compiled
    assert check({"n": 7}) is None


JSON = st.recursive(
    st.sampled_from(["x", 1, True, 1.0, None]) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KINDS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["string", "integer", "boolean"]))


@given(KINDS, st.sets(st.sampled_from("abc"), max_size=2), st.booleans(), st.dictionaries(st.sampled_from("abc"), JSON))
@settings(max_examples=examples(1000), deadline=None)
def test_the_quick_check_of_flat_schemas_refuses_what_json_schema_refuses(
    kinds: dict[str, str], required: set[str], closed: bool, arguments: dict[str, Any]
) -> None:
    """Also an argument that is required and described nowhere."""
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": kind} for name, kind in kinds.items()}}
    schema |= {"required": sorted(required), "additionalProperties": not closed}
    assert (compile_validator("t", schema)(arguments) is None) == Draft202012Validator(schema).is_valid(arguments)
