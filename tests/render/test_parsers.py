import json
import tracemalloc

import pytest

from agentrl.render import tagged_syntaxes as gemma
from agentrl.render.syntaxes import SYNTAXES
from agentrl.render.tagged_syntaxes import parse_qwen_xml
from agentrl.render.tool_calls import MOST_CALLS, ForTools
from tests.render.test_syntaxes import read

TYPED = {
    "n": {"type": "integer"}, "x": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
    "l": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"}, "maybe": {"type": ["integer", "null"]},
    "any_of": {"anyOf": [{"type": "number"}, {"type": "string"}]}, "level": {"enum": ["low", 3]},
    "ref": {"$ref": "#/$defs/Point"}, "free": {},
}  # fmt: skip
TYPED_TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": TYPED, "$defs": {"Point": {"type": "object"}}}}}  # fmt: skip


def xml_of(values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(("key", "text", "value"), [
    ("n", "7", 7), ("n", " 7 ", 7), ("n", "7.5", 7.5), ("b", "7", 7), ("n", "seven", "seven"), ("n", "9" * 5000, "9" * 5000),
    ("x", "7", 7), ("x", "7.5", 7.5), ("x", "1e3", 1000), ("x", "inf", "inf"), ("x", "nan", "nan"),
    ("x", "9007199254740993", 9007199254740993),
    ("b", "true", True), ("b", "False", False), ("b", "0", False), ("b", "yes", "yes"),
    ("s", "7", "7"), ("s", "true", "true"), ("s", "null", "null"), ("s", '{"a": 1}', '{"a": 1}'), ("s", "", ""),
    ("l", "[1, 2]", [1, 2]), ("l", "[1, 2", "[1, 2"), ("l", "[1e999]", "[1e999]"), ("l", "[NaN]", "[NaN]"),
    ("o", '{"a": [null]}', {"a": [None]}), ("o", "{'a': 1}", "{'a': 1}"), ("o", '{"a": 1} x', '{"a": 1} x'),
    ("maybe", "null", None), ("maybe", "NULL", None), ("maybe", "7", 7), ("any_of", "7.5", 7.5), ("any_of", "x", "x"),
    ("level", "low", "low"), ("level", "3", 3), ("ref", '{"y": 1}', {"y": 1}), ("free", "7", "7"), ("other", "7", "7"),
])  # fmt: skip
def test_qwen_xml_converts_as_declared(key, text, value):
    (call,) = parse_qwen_xml(xml_of({key: text}), [TYPED_TOOL])[1]
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value)


def test_a_type_of_a_conditional_part_is_read_and_a_parser_gets_tools_as_they_are_declared():
    """Parsers had properties in the order of the alphabet, by which some give names to arguments without."""
    properties = {"z": {"type": "string"}, "a": {"type": "string"}}
    parameters = {"properties": properties, "then": {"properties": {"n": {"type": "integer"}}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert parse_qwen_xml(xml_of({"n": "7"}), [tool])[1][0].arguments == {"n": 7}
    given = ForTools(lambda tools: lambda text: (json.dumps(tools), ())).bind([tool])("")[0]
    assert given == json.dumps([tool])


MANY = {
    "hermes": "<tool_call>", "qwen_xml": "<tool_call></tool_call>", "glm": "<tool_call></tool_call>", "llama_json": "{}",
    "mistral": "[TOOL_CALLS]", "deepseek": "<｜tool▁call▁begin｜>", "granite": "<|tool_call|>", "phi": "<|tool_call|>[{}]",
    "deepseek_dsml": '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜invoke></｜DSML｜function_calls>',
    "gemma": "<|tool_call>call:f{}<tool_call|>", "function_gemma": "<start_function_call>",
    "lfm2": "<|tool_call_start|>[]<|tool_call_end|>",
    "olmo": "<function_calls>\nf()\n</function_calls>", "harmony": "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
}  # fmt: skip
"""A call, or what opens one, of each syntax that may have several."""


@pytest.mark.parametrize("name", sorted(MANY))
def test_a_turn_has_so_many_calls_and_what_follows_is_kept_as_one(name):
    part = MANY[name]
    for count, last in ((MOST_CALLS, None), (MOST_CALLS + 30, 30 * part)):
        prose, calls = read(name, part * count)
        assert prose == "" and [call.id for call in calls] == [f"call_{i}" for i in range(len(calls))]
        if name != "deepseek_dsml":  # whose calls are without the block around them
            assert "".join(call.raw for call in calls) == part * count, "nothing is lost"
        errors = [(call.raw, call.error) for call in calls if (call.error or "").startswith("more than")]
        assert len(calls) == (count if last is None else MOST_CALLS + 1)
        assert errors == ([] if last is None else [(last, f"more than {MOST_CALLS} calls in one turn")])


@pytest.mark.parametrize(("name", "text"), [
    ("mistral", "[TOOL_CALLS][" + ", ".join(['{"name": "f", "arguments": {}}'] * (MOST_CALLS + 9)) + "]"),
    ("granite", "<|tool_call|>[" + ", ".join(['{"name": "f", "arguments": {}}'] * (MOST_CALLS + 9)) + "]"),
    ("pythonic", "[" + ", ".join(["f()"] * (MOST_CALLS + 9)) + "]"),
    ("deepseek_dsml", MANY["deepseek_dsml"].replace("<｜DSML｜invoke", "<｜DSML｜invoke", 1).replace(
        '<｜DSML｜invoke name="f"></｜DSML｜invoke>', '<｜DSML｜invoke name="f"></｜DSML｜invoke>' * (MOST_CALLS + 9))),
], ids=["mistral", "granite", "pythonic", "deepseek_dsml"])  # fmt: skip
def test_a_list_of_more_calls_is_cut_too(name, text):
    _, calls = SYNTAXES[name].parser(text)
    assert len(calls) == MOST_CALLS + 1 and calls[-1].error == f"more than {MOST_CALLS} calls in one turn"
    assert [call.name for call in calls[:-1]] == ["f"] * MOST_CALLS and calls[-1].raw.startswith(text[:5].strip())


@pytest.mark.parametrize(("name", "before", "again", "error"), [
    ("llama_json", "", "{}", "more than 10000 calls"),
    ("llama_json", '{"name": "f", "parameters": {"k": [', "[],", "more than 500000 values"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"k": [', "{},", "more than 500000 values"),
])  # fmt: skip
def test_a_long_turn_takes_little_memory(name, before, again, error):
    """The texts of 1.5 MB took 35 to 160 MB; what is beyond the limits is not read."""
    text = before + again * (1_500_000 // len(again))
    tracemalloc.start()
    _, calls = SYNTAXES[name].parser(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error in calls[-1].error and peak < 25e6, f"{peak / 1e6:.0f} MB"


def test_values_of_gemma_are_counted_too(monkeypatch):
    monkeypatch.setattr(gemma, "MOST_VALUES", 50)
    for count, error in ((48, None), (49, "more than 50 values")):
        [call] = SYNTAXES["gemma"].parser(f"<|tool_call>call:f{{k:[{','.join(['[]'] * count)},1]}}<tool_call|>")[1]
        assert call.error == error
