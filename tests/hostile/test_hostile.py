"""The corpus, a share of each fuzz target, and what the fuzzing itself promises (README.md)."""

import io
import json
import logging
import re
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import strategies as st
from rich.console import Console

from agentrl.cli.env import print_findings
from agentrl.contrib.view.terminal import table
from agentrl.data.trajectory import Message, StopReason, Task, ToolCall, Trajectory, Turn
from agentrl.env import Tool
from agentrl.env.check_tools import CheckFinding
from agentrl.env.toolbox import Toolbox, shape_result
from agentrl.render.syntaxes import SYNTAXES
from agentrl.run.compare import print_official, print_side_by_side
from agentrl.run.evaluate import print_report, print_reports
from agentrl.utils.errors import EnvError
from agentrl.utils.parsing import json_text
from agentrl.utils.redaction import guarded_output
from agentrl.utils.schemas import (
    BadSchemaError,
    TextTooLongError,
    check_schema,
    checked_validator,
    compile_pattern,
    first_fault,
    within_seconds,
)
from agentrl.utils.threads import at_once
from tests.hostile import fuzz, targets
from tests.hostile.fuzz import CORPUS, TooSlowError, fuzz_here, limited, text_of
from tests.strict_json import strict

ENTRIES = sorted(CORPUS.glob("*.json"))


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch):
    def refuse(*args, **named):
        raise TooSlowError("something was fetched")  # which nothing catches

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.mark.parametrize("file", ENTRIES, ids=lambda file: file.stem)
def test_what_was_found_once_is_taken_within_two_seconds(file):
    entry = json.loads(file.read_text())
    assert entry["did"]
    with limited(2.0):
        targets.TARGETS[entry["target"]].read(text_of(entry))


@pytest.mark.parametrize("name", sorted(targets.TARGETS))
def test_a_few_inputs_of_each_target(name, tmp_path):
    found = fuzz_here(name, 6, 7, folder=tmp_path)
    assert found["failed"] is None, f"{found['why']}: {Path(found['failed'] or '.').read_text()}"


def test_all_inputs_together_are_a_hundred_thousand():
    assert sum(target.inputs for target in targets.TARGETS.values()) == 100_000


def test_an_input_that_fails_is_kept_in_its_shortest_form(tmp_path, monkeypatch):
    def read(text):
        assert "b" not in text

    monkeypatch.setitem(targets.TARGETS, "t", targets.Target(read, st.text("ab", min_size=1), 1))
    found = fuzz_here("t", 200, 1, folder=tmp_path)
    kept = json.loads(Path(found["failed"]).read_text())
    assert kept["target"] == "t" and kept["text"] == "b" and kept["did"].startswith("AssertionError")
    with pytest.raises(AssertionError):
        fuzz.again(Path(found["failed"]))


def test_an_input_that_takes_long_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 0.02)
    monkeypatch.setitem(targets.TARGETS, "t", targets.Target(lambda text: time.sleep(1 if text else 0), st.just("x"), 1))
    assert "longer than 0.02 s" in fuzz_here("t", 1, 1, folder=tmp_path)["why"]


# -- schemas ---------------------------------------------------------------------------------------

REFUSED = {
    "/properties/a/$ref: a reference to 'http://127.0.0.1:9/x'": {"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}},
    "/properties/a/$ref: a reference to '#/$defs/x', where there is no schema": {"properties": {"a": {"$ref": "#/$defs/x"}}},
    "/anyOf/0: it leads to itself by way of the root": {"anyOf": [{"$ref": "#"}]},
    "/properties/a~1b/pattern: '(' is not a regular expression": {"properties": {"a/b": {"pattern": "("}}},
    "/patternProperties: '(a{101}){100}' repeats": {"patternProperties": {"(a{101}){100}": {}}},
    "/$defs/a/$id: 'x' begins a schema of its own": {"$defs": {"a": {"$id": "x"}}},
    "unevaluatedProperties in a schema with patternProperties": {"unevaluatedProperties": False, "patternProperties": {"a": {}}},
    "/properties/a/default: set is not JSON": {"properties": {"a": {"default": {1}}}},
    "/default: inf is not JSON": {"default": float("inf")},
    "a schema of more than 100000 values": {"enum": list(range(100_001))},
    "a schema of more than 1000000 characters": {"description": "a" * 1_000_001},
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_schema_is_refused_where_its_tool_is_made_by_tool_place_and_remedy(said):
    with pytest.raises(TypeError, match=re.escape(said)) as caught:
        Tool.from_schema("find", "", REFUSED[said], lambda **given: None)
    assert str(caught.value).startswith("tool find: ") and "; " in str(caught.value)


def test_what_only_looks_like_a_reference_is_a_name_or_a_value():
    check_schema({"properties": {"$ref": {"type": "string"}, "pattern": {"default": {"$ref": "http://x", "pattern": "("}}}})


def test_a_schema_that_calls_itself_below_a_property_is_checked_as_deep_as_the_value():
    tree = {"properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    value = {"left": {"left": {"left": {"right": 1}}}}
    fault = first_fault(checked_validator(tree), value)
    assert list(fault.absolute_path) == ["left"] * 3 and "right" in fault.message
    assert first_fault(checked_validator(tree), {"left": {"left": {}}}) is None


def test_a_value_is_checked_for_one_second_in_all(monkeypatch):
    """One pattern that stays under the limit, on 50 texts: their sum does not."""
    monkeypatch.setattr("agentrl.utils.schemas.SCHEMA_S", 0.2)
    slow = checked_validator({"items": {"pattern": "^(a|aa)+$"}})
    began = time.perf_counter()
    with pytest.raises(TimeoutError):
        first_fault(slow, ["a" * 24 + "!"] * 5000)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize(
    ("items", "unique"),
    [([1, 1.0], False), ([1, True], True), ([{"a": 1, "b": [0]}, {"b": [0], "a": 1.0}], False), ([[False], [0]], True),
     ([], True)],
)  # fmt: skip
def test_unique_items_are_those_of_json_schema(items, unique):
    """The values that JSON Schema calls equal: https://json-schema.org/draft/2020-12/json-schema-core section 4.2.2."""
    assert (first_fault(checked_validator({"uniqueItems": True}), items) is None) == unique


class Compared(int):
    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Compared.times += 1
        return int(self) == other


def test_unique_objects_are_not_compared_each_with_each():
    check = checked_validator({"uniqueItems": True})
    assert first_fault(check, [{"k": Compared(i)} for i in range(2_000)]) is None
    assert Compared.times <= 2_000  # 1,999,000 before
    assert first_fault(check, [{"k": Compared(i % 1_999)} for i in range(2_000)]) is not None


@pytest.mark.parametrize(("name", "fits"), [("n1", True), ("known", True), ("x", False)])
def test_additional_properties_beside_patterns(name, fits):
    schema = {"properties": {"known": {}}, "patternProperties": {"^n[0-9]$": {}}, "additionalProperties": False}
    assert (first_fault(checked_validator(schema), {name: 1}) is None) == fits


def test_what_is_no_json_schema_says_where():
    with pytest.raises(BadSchemaError, match="at /properties: "):
        checked_validator({"properties": ["a"]})


# -- patterns, numbers, ways out -------------------------------------------------------------------


ENDLESS = ["(?R)?a", "a(?1)", "(?P<x>a)(?&x)", "((a{100}){100}){2}", "(?x)(a{200} # )\n){200}", "a" * 10_001]
OTHERS = [r"[(]{3}(a{100}){99}", r"\d{4}-\d{2}-\d{2}", "(?:a{0,9000}){0,9000}", r"\(\?R\)", "[{9999}]{9}"]


@pytest.mark.parametrize("pattern", [*ENDLESS, *OTHERS])
def test_a_pattern_that_no_time_limit_ends_is_refused_and_others_are_compiled(pattern):
    with pytest.raises(ValueError, match=r"calls itself|repeats|characters") if pattern in ENDLESS else nullcontext():
        assert compile_pattern(pattern).pattern == pattern


def test_a_search_ends_when_its_time_is_over_and_is_not_begun_in_more_than_a_million_characters():
    """Without a limit this pattern takes seconds, and with each character more 1.6 times as long."""
    look = compile_pattern("(a|aa)+$").search
    assert within_seconds(look, "a" * 10, 5.0) is not None
    with pytest.raises(TimeoutError):
        within_seconds(look, "a" * 32 + "!", 0.05)
    with pytest.raises(TextTooLongError):
        within_seconds(compile_pattern("a").search, "b" * 1_000_001, 1.0)


def test_numbers_that_json_lacks_are_null_in_files_and_texts_in_tasks():
    row = {"a": float("nan"), "b": [float("-inf"), 10**5000, 1.5], "c": {"d": True, "e": 10**300}}
    assert strict(json_text(row)) == {"a": None, "b": [None, None, 1.5], "c": {"d": True, "e": 10**300}}
    episode = Trajectory(
        env_id="e", task=Task("t", 0, "train", {"x": float("inf")}, {}), seed=0, messages=[Message("user", "go")],
        turns=[Turn(0, Message("assistant", "", (ToolCall("f", {"k": float("nan")}),)))], stop=next(iter(StopReason)),
    )  # fmt: skip
    found = strict("".join(episode.json_chunks()))
    assert episode.task.data == found["task"]["data"] == {"x": "Infinity"}  # as live: scores of a stored episode are the same
    assert found["turns"][0]["message"]["tool_calls"][0]["arguments"] == {"k": None}


def test_an_answer_with_an_integer_that_python_does_not_write_is_an_answer():
    value, text, _ = shape_result("add", {"total": 10**5000, "n": 1}, 1000, len)
    assert value == {"total": "an integer of about 5000 digits", "n": 1} and json.loads(text) == value
    assert sys.get_int_max_str_digits() == 4300
    with pytest.raises(EnvError):
        shape_result("add", object(), 1000, len)


def test_tools_of_from_schema_are_checked_when_they_are_added_and_on_a_loop():
    box = Toolbox([Tool.from_schema("t", "", {"properties": {"a": {"pattern": "^a+$"}}}, lambda **given: 1)])
    assert at_once(box["t"].check, {"a": "aa"}) is None and at_once(box["t"].check, {"a": "b"}).kind == "invalid_argument"


ODD = "\x1b]0;owned\x07\x9b2J\u202e[/x]"


def test_tables_and_logs_write_out_what_a_terminal_acts_on_and_take_no_marks_from_others(capsys):
    """A report's and a comparison's names come from files of others; a log's texts from tools and policies."""
    console = Console(file=io.StringIO(), width=200)
    rate = {"mean": 0.5, "low": 0.25, "high": 0.75}
    print_report({"episodes": 1, "tasks": 1, "stops": {ODD: 1}, "pass@1": rate, ODD: 1}, console, every=True)
    print_reports({ODD: {"pass@1": rate, "reward": 1.0}}, 0.5, console)
    row = {"name": ODD, "value": 0.5, "n": 1, "weight": None, "note": ODD}
    print_official({ODD: {"version": ODD, "split": "test", "tasks": 1, "of": 2, "rows": [row]}}, console)
    joined = {"models": [ODD], "over": [[ODD, "test", 1]], "same": False, "rows": [{"name": ODD, "values": [0.5], "n": [1]}]}
    print_side_by_side({ODD: joined}, console)
    console.print(table(ODD, [ODD], [(ODD,)]))
    print_findings(ODD, [CheckFinding("fuzz", False, ODD, 0.0)])
    with guarded_output():
        logging.getLogger("hostile").warning("a tool said %s", ODD)
        record = logging.getLogRecordFactory()("x", 30, "f", 1, "said %s", (ODD,), None)
    text = console.file.getvalue() + capsys.readouterr().out + record.getMessage()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert text.count("owned") >= 12 and "[/x]" in text


@pytest.mark.parametrize(
    ("name", "before", "after"), [("pythonic", "[f(k='", "')]"), ("lfm2", "<|tool_call_start|>[f(k='", "')]<|tool_call_end|>")]
)
def test_a_list_of_calls_in_python_is_read_up_to_its_limit(name, before, after):
    read = SYNTAXES[name].parser
    for size, error in ((199_990, ""), (200_000, "calls of 200009 characters; at most 200000 are read")):
        [call] = read(before + "a" * size + after)[1]
        assert (call.error or "").endswith(error) and (call.arguments is None) == bool(error)


def test_the_table_of_parsers_is_what_its_record_says():
    rows = [json.loads(line) for line in (CORPUS.parents[2] / "docs/parsers.json").read_text().splitlines()]
    assert {row["syntax"] for row in rows} == set(SYNTAXES)
    assert [row["syntax"] for row in rows if not row["linear"]] == []
