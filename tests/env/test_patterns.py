"""Sampled values fit their schema: patterns, bounds, lengths, unique items, names of keys, references."""

import json
import re
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import Field, TypeAdapter

from agentrl.contrib.toolkit.taskdata import load_tasks
from agentrl.contrib.toolkit.turns import call_rules
from agentrl.env import Tool
from agentrl.env.call_options import compile_validator
from agentrl.env.spaces import Unsupported, sample_arguments, sample_pattern, sample_value
from agentrl.render.tool_calls import typed_value
from agentrl.utils.errors import TaskDataError
from agentrl.utils.schemas import with_nulls

RNG = np.random.default_rng(0)
PATTERNS = [
    r"^[A-Z]{2}\d{4}$", r"^\d{4}-\d{2}-\d{2}$", r"^(red|green)-[a-f0-9]+$", r"^\S+@\w+\.(com|org)$", r"^[^/\\]+$",
    r"^#?\w{3,5}$", r"[0-9]+(\.[0-9]+)?", r"^.{3}$", r"^\D\W$", r"^a*b+?c?$", r"^$", r"^é+$",
]  # fmt: skip


@given(st.sampled_from(PATTERNS), st.integers(0, 2**32))
def test_made_texts_match(pattern: str, seed: int) -> None:
    assert re.search(pattern, sample_pattern(pattern, np.random.default_rng(seed)))


@pytest.mark.parametrize("schema", [
    {"type": "string", "pattern": "^[ab]*$", "minLength": 2, "maxLength": 4},
    *({"type": "integer", "multipleOf": 5, **bounds}
      for bounds in ({"minimum": 3}, {"minimum": 1, "maximum": 40}, {"maximum": -7}, {})),
])  # fmt: skip
@given(seed=st.integers(0, 2**32))
def test_a_pattern_with_lengths_and_multiples_within_bounds(seed: int, schema: dict[str, Any]) -> None:
    assert Draft202012Validator(schema).is_valid(sample_value(schema, np.random.default_rng(seed), {}))


@pytest.mark.parametrize("pattern", [r"^(?=a)b", r"^(a)\1$", r"^a\bc$"])
def test_what_it_cannot_make_it_says(pattern: str) -> None:
    with pytest.raises(Unsupported):
        sample_pattern(pattern, np.random.default_rng(0))
    assert isinstance(sample_value({"type": "string", "pattern": pattern}, np.random.default_rng(0), {}), str)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


FITTING = [
    dict[Color, int], Annotated[set[int], Field(min_length=3)], Annotated[dict[str, int], Field(min_length=2, max_length=3)],
    Annotated[float, Field(multiple_of=0.01)], Annotated[float, Field(gt=0, lt=1e-7)], Annotated[int, Field(ge=10**19)],
    Annotated[int, Field(gt=3, ge=5, lt=7)], Annotated[float, Field(ge=1e300)], Annotated[int, Field(le=-(10**30))],
    tuple[int, str], Annotated[list[int], Field(min_length=2, max_length=2)], Annotated[str, Field(min_length=0, max_length=0)],
    dict[str, dict[Color, Annotated[set[bool], Field(min_length=1)]]],
]  # fmt: skip


@pytest.mark.parametrize("hint", FITTING, ids=str)
def test_what_typed_signatures_declare_is_met(hint: Any) -> None:
    schema = TypeAdapter(hint).json_schema()
    for seed in range(100):
        assert Draft202012Validator(schema).is_valid(sample_value(schema, np.random.default_rng(seed), schema))


REFERRING = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/one~1two"}, "b": {"$ref": "#/$defs/50%25"}, "c": {"$ref": "#/anyOf/0/properties/c"},
                   "d": {"$ref": "#named"}, "e": {"$ref": "#/$defs/t~0t"}},
    "required": ["a", "b", "c", "d", "e"],
    "$defs": {"one/two": {"type": "boolean"}, "50%": {"type": "null"}, "t~t": {"const": 7},
              "x": {"$anchor": "named", "enum": ["n"]}},
}  # fmt: skip


def test_references_point_as_json_pointers_do() -> None:
    schema = {**REFERRING, "anyOf": [{"properties": {"c": {"enum": [0.5]}}}]}
    part = {name: sample_value(one, RNG, schema) for name, one in REFERRING["properties"].items()}
    assert isinstance(part.pop("a"), bool) and part == {"b": None, "c": 0.5, "d": "n", "e": 7}
    # The reader of untyped values follows the same references.
    assert typed_value("true", {"$ref": "#/$defs/one~1two"}, schema) is True
    assert (
        typed_value("null", {"$ref": "#/$defs/50%25"}, schema) is None and typed_value("7", {"$ref": "#/$defs/t~0t"}, schema) == 7
    )


NEW = "https://json-schema.org/draft/{}/schema"
SEVEN = "http://json-schema.org/draft-07/schema#"
OLDER = [
    ({"$schema": SEVEN, "properties": {"x": {"items": [{"type": "integer"}], "additionalItems": False}}},
     {"x": [1]}, {"x": [1, 2]}),
    ({"$schema": SEVEN, "dependencies": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    ({"$schema": NEW.format("2020-12"), "dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
    ({"$schema": NEW.format("2019-09"), "properties": {"x": {"$recursiveRef": "#"}, "y": {"type": "null"}}},
     {"x": {"y": None}}, {"x": {"y": 1}}),
    ({"$schema": SEVEN, "properties": {"x": {"$ref": "#/definitions/n", "properties": {"y": False}}}, "definitions": {"n": {}}},
     {"x": {"y": 1}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fits", "faults"), OLDER)
def test_every_reader_of_a_schema_reads_it_by_its_draft(schema: dict[str, Any], fits: Any, faults: Any, tmp_path: Path) -> None:
    """A tool's check, a task file's rows and samples: `dependencies` were dropped without a word, tuples refused."""
    made = Tool.from_schema("act", "", {"type": "object", **schema}, dict)
    assert made.schema["function"]["parameters"]["$schema"] == schema["$schema"], "shown as declared"
    assert made.check(fits) is None and (faults is None or made.check(faults) is not None)
    file = tmp_path / "tasks.jsonl"
    for row, fine in ((fits, True), (faults, False)):
        if row is None:
            continue
        file.write_text(json.dumps(row))
        with nullcontext() if fine else pytest.raises(TaskDataError):
            load_tasks(file, schema=schema, to_task=lambda row: ({"q": 1}, {}))
    for seed in range(30):
        assert made.check(sample_arguments(made.schema["function"]["parameters"], np.random.default_rng(seed))) is None


def test_a_draft_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"tool act: .*/\$schema: 'http://a\.example/mine' is no draft from 4 to 2020-12"):
        Tool.from_schema("act", "", {"$schema": "http://a.example/mine", "type": "object"}, dict)


NULLABLE = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a", "b"], "nullable": True},
        "to": {"$ref": "#/$defs/to", "nullable": True},
        "of": {"type": "integer", "nullable": True, "minimum": 3},
        "not": {"type": "string", "nullable": False},
    },
    "required": ["kind", "to", "of", "not"],
    "$defs": {"to": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}


def test_null_fits_what_is_nullable_as_openapi_has_it_and_nothing_else() -> None:
    """Documented tools of web services say so; null was refused, never sampled, and in untyped syntaxes the word "null"."""
    check = compile_validator("send", NULLABLE)
    nulls = {"kind": None, "to": None, "of": None, "not": "x"}
    assert check(nulls) is None and check({"kind": "a", "to": {"x": 1}, "of": 3, "not": "x"}) is None
    for name, wrong in (("kind", "c"), ("to", {}), ("of", 2), ("of", "3"), ("not", None)):
        assert check({**nulls, name: wrong}) is not None, name
    made = [sample_arguments(NULLABLE, np.random.default_rng(seed)) for seed in range(200)]
    assert all(check(one) is None for one in made)
    assert {name for one in made for name, value in one.items() if value is None} == {"kind", "to", "of"}
    assert {name for one in made for name, value in one.items() if value is not None} == set(NULLABLE["properties"])
    for name, schema in NULLABLE["properties"].items():
        assert (typed_value("null", schema, NULLABLE) is None) == (name != "not")


def test_a_grammar_allows_null_where_a_tool_is_nullable_and_nowhere_else() -> None:
    """A model that was held to the grammar could not say what the check takes."""
    tool = {"type": "function", "function": {"name": "send", "parameters": NULLABLE}}
    grammar = "start: calls\n" + call_rules("llama_json", [tool], False, json.dumps)
    tokens = LLTokenizer("byte")
    start = LLMatcher(tokens, json.dumps({"grammars": [{"lark_grammar": grammar}]}))
    given = {"kind": "a", "to": {"x": 1}, "of": 3, "not": "x"}
    for name, value in [*dict.fromkeys(given).items(), ("kind", "c"), ("to", {}), ("of", 2)]:
        made = {**given, name: value}
        text = tokens.tokenize_str(f'{{"name": "send", "parameters": {json.dumps(made)}}}')
        fits = start.deep_copy().validate_tokens(text) == len(text)
        assert fits == (compile_validator("send", NULLABLE)(made) is None) == (value is None and name != "not"), (name, value)
    both = {"properties": {"nullable": True, "a": {"enum": [None, 1], "nullable": True}}, "default": {"nullable": True}}
    assert with_nulls(both) == {**both, "properties": {"nullable": True, "a": {"enum": [None, 1]}}}
