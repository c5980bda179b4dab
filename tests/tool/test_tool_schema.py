"""A typed signature as JSON Schema: what the model is shown, and what reaches Python."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date, datetime
from enum import Enum
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, field_validator
from typing_extensions import TypeAliasType

from agentrl.data.trajectory import ToolCall
from agentrl.env import Toolbox
from agentrl.env.tools import Tool, tool
from agentrl.utils.errors import ToolSchemaError


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Address(BaseModel):
    street: str = Field(description="name of the street")
    tags: list[str] = []


class Tree(BaseModel):
    value: int
    left: Tree | None = None


def parameters(function: Any) -> dict[str, Any]:
    return tool(function).schema["function"]["parameters"]


def run(function: Any, arguments: dict[str, Any]) -> Any:
    """What the function is really called with: it returns its arguments as a repr."""
    box = Toolbox([tool(inline=True)(function)])
    return asyncio.run(box.call(ToolCall("f", arguments)))


def test_a_plain_function_in_openai_format() -> None:
    @tool
    def get(key: str, depth: int = 1) -> str:
        """Read a key.

        Args:
            key: its name,
                over two lines
            depth (int): how deep
        """
        return key

    assert get.schema == {
        "type": "function",
        "function": {
            "name": "get",
            "description": "Read a key.",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": "its name, over two lines"},
                    "depth": {"type": "integer", "default": 1, "description": "how deep"},
                },
                "required": ["key"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize("text", [
    "Sum.\n\nArgs:\n    key: the name\n    other: no\n\nReturns:\n    key: not this",
    "Sum.\n\nParameters\n----------\nkey : str\n    the name\nother : int\n    no\n\nReturns\n-------\nx",
    "Sum.\n\n:param key: the name\n:param other: no\n:returns: nothing",
    "Args:\n\tkey (dict(str, int)): the name\n\tother: no\n\nSum.",
    "Sum.\n\nArgs:\n  key: the\n    name\n\nKeyword Args:\n  other: no",
    "Sum.\n\nParameters\n---\nkey : str\n    the name\n\nSee Also\n---\nx\n\nOther Parameters\n---\nn, other\n    no",
], ids=["google", "numpy", "sphinx", "tabs", "two spaces", "numpy's sections"])  # fmt: skip
def test_descriptions_from_three_docstring_styles(text: str) -> None:
    def f(key: str, other: int = 0) -> None: ...

    f.__doc__ = text
    schema = tool(f).schema["function"]
    shown = {name: one["description"] for name, one in schema["parameters"]["properties"].items()}
    assert (schema["description"], shown) == ("Sum.", {"key": "the name", "other": "no"})


def test_rich_types_become_schema_without_references() -> None:
    def f(
        color: Color,
        mode: Literal["fast", "slow"],
        where: Point,
        home: Address,
        names: list[str],
        counts: dict[str, int],
        either: int | str,
        maybe: float | None = None,
    ) -> None: ...

    schema = parameters(f)
    assert "$defs" not in schema and "title" not in str(schema)
    properties = schema["properties"]
    assert [properties[name]["enum"] for name in ("color", "mode")] == [["red", "blue"], ["fast", "slow"]]
    assert properties["where"]["properties"] == {"x": {"type": "integer"}, "y": {"type": "integer", "default": 0}}
    assert properties["home"]["properties"]["street"]["description"] == "name of the street"
    assert properties["counts"]["additionalProperties"] == {"type": "integer"}
    assert properties["either"]["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert properties["maybe"] == {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}
    assert schema["required"] == ["color", "mode", "where", "home", "names", "counts", "either"]


def test_a_default_of_none_fits_its_own_schema() -> None:
    """`x: int = None`, as most code writes it: null was shown as the default, and refused."""

    def f(x: int = None, z: Annotated[int, Field(ge=1)] = None, w: dict[str, int] = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return repr((x, z, w))

    shown = parameters(f)
    Draft202012Validator(shown).validate({name: schema["default"] for name, schema in shown["properties"].items()})
    assert run(f, {"x": None, "z": None, "w": None}).content == "(None, None, None)"
    assert run(f, {"x": 3, "z": 2, "w": {"a": 1}}).content == "(3, 2, {'a': 1})" and run(f, {"z": 0}).error == "invalid_argument"


def test_a_recursive_type_keeps_its_reference() -> None:
    def f(tree: Tree) -> None: ...

    schema = parameters(f)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"tree": {"value": 1, "left": {"value": 2}}})
    assert not validator.is_valid({"tree": {"value": 1, "left": {"value": "two"}}})


def test_a_title_of_a_property_or_a_default_survives() -> None:
    class Book(BaseModel):
        title: str

    def f(title: str, book: Book, data: dict[str, str] = {"title": "Emma", "by": "Austen"}) -> None: ...  # noqa: B006

    f.__annotations__.update(book=Book)
    properties = parameters(f)["properties"]
    assert properties["title"] == {"type": "string"}
    assert "title" in properties["book"]["properties"]
    assert properties["data"]["default"] == {"title": "Emma", "by": "Austen"}


def test_arguments_arrive_as_python_values() -> None:
    def f(color: Color, where: Point, home: Address, either: int | str, flag: bool = True) -> str:
        assert color is Color.BLUE and where == Point(1, 0) and isinstance(home, Address)
        return f"{either!r} {flag}"

    assert run(f, {"color": "blue", "where": {"x": 1}, "home": {"street": "A"}, "either": "5"}).content == "'5' True"


def test_a_whole_number_is_an_integer() -> None:
    """JSON has one kind of number: 7.0 is a valid integer and reaches Python as one."""

    def f(x: int) -> str:
        return repr(x)

    assert run(f, {"x": 7.0}).content == "7"
    assert [run(f, {"x": x}).error for x in (7.5, True)] == ["wrong_type"] * 2


def test_a_refusal_that_no_schema_can_say_is_an_answer_too() -> None:
    class Even(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def even(cls, value: int) -> int:
            if value % 2:
                raise ValueError("must be even")
            return value

    def f(value: Even) -> int:
        return value.n

    f.__annotations__.update(value=Even)
    result = run(f, {"value": {"n": 3}})
    assert result.error == "invalid_argument" and "must be even" in result.content


Day = TypeAliasType("Day", date)


class Visit(BaseModel):
    at: datetime | str
    ends: tuple[Day, Day] | None = None
    type: dict[date, int] = {}
    after: list[Visit] = []


def test_a_bare_number_is_no_date_at_any_depth() -> None:
    """pydantic takes it for seconds since 1970: the tool got a day of that year."""

    def f(
        days: list[date | None] | None = None, visit: Visit | None = None, spot: tuple[datetime, str] | int = 0,
        at: datetime = datetime(2024, 1, 1),
    ) -> str:  # fmt: skip
        return repr((days, visit and (visit.at, visit.type, [one.at for one in visit.after]), spot, at))

    f.__annotations__.update(days=list[date | None] | None, visit=Visit | None, spot=tuple[datetime, str] | int, at=datetime)
    for given, place in (
        *(({"at": text}, f"at: '{text}'") for text in ("2024", "20240101", "-5")),
        ({"days": ["2024-01-01", None, "0"]}, "days.2: '0'"),
        ({"visit": {"at": "2024-01-01T00:00:00", "type": {"0": 1}}}, "visit.type.0.[key]: '0'"),
        ({"spot": ["2024", "x"]}, "spot.tuple[datetime, str].0: '2024'"),
    ):
        refused = run(f, given)
        assert refused.error == "invalid_argument" and f"{place} is no date or time. Write it in ISO" in refused.content
    visit = {"at": "2024", "after": [{"at": "2024-01-01T00:00:00"}], "type": {"2024-01-01": 1}}
    taken = run(f, {"days": ["2024-01-01"], "visit": visit, "spot": ["2024-01-01", "2024"], "at": "2024-01-01"}).content
    day, moment = "datetime.date(2024, 1, 1)", "datetime.datetime(2024, 1, 1, 0, 0)"
    assert taken == f"([{day}], ('2024', {{{day}: 1}}, [{moment}]), ({moment}, '2024'), {moment})"


@pytest.mark.parametrize("name", ["copy", "json", "schema", "model_config", "self_", "_x"])
def test_parameter_names_that_pydantic_uses_itself(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def f({name}: int, other: list[int]) -> int:\n    return {name}", space)  # names only: no user input
    assert run(space["f"], {name: 4, "other": []}).content == "4"


def test_what_has_no_schema_is_refused_when_the_tool_is_made_ready() -> None:
    def bare(x): ...  # type: ignore[no-untyped-def]

    def star(*xs: int) -> None: ...

    def odd(x: asyncio.Lock) -> None: ...

    def given(x: int = Field(5, ge=1)) -> None: ...  # it got the Field itself

    def member(x: list[Literal[Color.RED]]) -> None: ...  # every call of it was refused

    wrong = [(bare, "annotation"), (star, "variadic"), (odd, "JSON")]
    for function, word in [*wrong, (given, r"given: parameter 'x' has a Field"), (member, r"Write Literal\['red'\]")]:
        with pytest.raises(TypeError, match=word):
            Toolbox([function])
    named: Any = partial(given, x=3)
    named.__name__ = "named"
    with pytest.raises(ToolSchemaError, match="tool named: an annotation cannot be resolved"):
        Toolbox([named])
    with pytest.raises(TypeError, match="two tools"):
        Toolbox([tool(name="a")(lambda: 1), tool(name="a")(lambda: 2)])
    with pytest.raises(TypeError):
        tool(timout=3)(bare)


@pytest.mark.parametrize(("hint", "says"), [
    (Annotated[str, Field(pattern="(?=x)a")], "look-around"),
    (Annotated[str, Field(pattern=r"(a)\1")], "backreferences"),
    (list[Annotated[str, Field(pattern="(")]], "unclosed group"),
    (dict[Annotated[str, Field(pattern="(?!a)b")], int], "look-around"),
    (Annotated[int, Field(multiple_of=0)], "'multiple_of' must be a finite number greater than 0"),
    (Annotated[int, Field(ge="a")], "'ge' must be"),
    (Annotated[str, Field(min_length=-1)], "can't convert negative int"),
    (
        Annotated[str, Field(json_schema_extra={"$ref": "http://a.example/b"})],
        "outside of the schema|another document|http://a",
    ),
])  # fmt: skip
def test_a_pattern_or_bound_that_cannot_be_used_names_tool_and_parameter(hint: Any, says: str) -> None:
    """It was pydantic's SchemaError of five lines, or a KeyError, without the tool's name."""

    def search(word: Any) -> None: ...

    search.__annotations__["word"] = hint
    with pytest.raises(TypeError, match=rf"tool search: .*word.*({says})"):
        Toolbox([search])


@pytest.mark.parametrize(
    ("kind", "fine"), [("string", False), (["array", "null"], False), ("object", True), (["object", "null"], True)]
)
def test_a_schema_that_takes_no_object_is_refused_before_any_call_is(kind: Any, fine: bool) -> None:
    """Every call was refused, the right one too: its arguments are an object."""

    async def answer(**values: Any) -> str:
        return "7"

    with nullcontext() if fine else pytest.raises(TypeError, match=r"tool get: .* at /type: .* takes no arguments"):
        assert Tool.from_schema("get", "", {"type": kind}, answer).check({}) is None


def test_a_schema_that_takes_too_long_to_be_checked_is_refused_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an MCP server, say: a TimeoutError named neither the tool nor the fix, and ended a score of its calls."""
    monkeypatch.setattr("agentrl.utils.schemas.SCHEMA_S", 0.0)
    wide: dict[str, Any] = {"type": "object", "properties": {f"slow{i}": {"type": "integer"} for i in range(9)}}
    with pytest.raises(ToolSchemaError, match=r"tool f: .* took longer than 0 s; leave out what a model need not know"):
        Toolbox([Tool.from_schema("f", "", wide, print)])
