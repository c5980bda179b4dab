import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from render_conversations import TOOLS, arguments, plain

from agentrl.render.parsers import PARSERS, ForTools, parse_llama_json, parse_mistral, parse_qwen_xml
from agentrl.trajectory import ToolCall

XML = (
    "<tool_call>\n<function=set>\n<parameter=key>\nk3\n</parameter>\n"
    "<parameter=value>\n7\n</parameter>\n</function>\n</tool_call>"
)


def read(name, text):
    parser = PARSERS[name]
    return (parser.bind(()) if isinstance(parser, ForTools) else parser)(text)


def test_qwen_xml_reads_values_by_schema():
    text, (call,) = parse_qwen_xml("On it.\n" + XML, TOOLS)
    assert text == "On it."
    assert call == ToolCall("set", {"key": "k3", "value": "7"}, id="call_0", raw=XML)
    assert parse_qwen_xml(XML)[1][0].arguments == {"key": "k3", "value": 7}


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


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("n", "7", 7), ("n", " 7 ", 7), ("n", "7.5", 7.5), ("b", "7", 7), ("n", "seven", "seven"), ("n", "9" * 5000, "9" * 5000),
        ("x", "7", 7), ("x", "7.5", 7.5), ("x", "1e3", 1000), ("x", "inf", "inf"), ("x", "nan", "nan"),
        ("b", "true", True), ("b", "False", False), ("b", "0", False), ("b", "yes", "yes"),
        ("s", "7", "7"), ("s", "true", "true"), ("s", "null", "null"), ("s", '{"a": 1}', '{"a": 1}'), ("s", "", ""),
        ("l", "[1, 2]", [1, 2]), ("l", "[1, 2", "[1, 2"), ("l", "[1e999]", "[1e999]"), ("l", "[NaN]", "[NaN]"),
        ("o", '{"a": [null]}', {"a": [None]}), ("o", "{'a': 1}", "{'a': 1}"), ("o", '{"a": 1} x', '{"a": 1} x'),
        ("maybe", "null", None), ("maybe", "NULL", None), ("maybe", "7", 7), ("any_of", "7.5", 7.5), ("any_of", "x", "x"),
        ("level", "low", "low"), ("level", "3", 3), ("ref", '{"y": 1}', {"y": 1}), ("free", "7", "7"), ("other", "7", "7"),
    ],
)  # fmt: skip
def test_qwen_xml_converts_as_declared(key, text, value):
    (call,) = parse_qwen_xml(xml_of({key: text}), [TYPED_TOOL])[1]
    assert call.arguments == {key: value} and type(call.arguments[key]) is type(value)


def test_qwen_xml_keeps_lines_and_brackets_of_a_value():
    body = "if a < b:\n  print('</x>')\n"
    text = f"<tool_call><function=set><parameter=key>\n{body}\n</parameter></function></tool_call>"
    assert parse_qwen_xml(text)[1][0].arguments == {"key": body}


def test_llama_json():
    one = '{"name": "get", "parameters": {"key": "a;b"}}'
    assert parse_llama_json(one)[1][0].arguments == {"key": "a;b"}
    _, calls = parse_llama_json(f"<|python_tag|>{one}; {one}")
    assert [call.id for call in calls] == ["call_0", "call_1"]
    assert parse_llama_json(' The answer is {"a": 1}.') == ('The answer is {"a": 1}.', ())


def test_mistral_both_forms():
    calls = json.dumps([{"name": "get", "arguments": {"key": "a"}, "id": "abcdefghi"}])
    _, (call,) = parse_mistral(f"[TOOL_CALLS] {calls}")
    assert (call.name, call.arguments, call.id) == ("get", {"key": "a"}, "abcdefghi")
    prose, calls = parse_mistral('Yes.[TOOL_CALLS]get[ARGS]{"key": "a"}[TOOL_CALLS]add[ARGS]{"a": 1}')
    assert prose == "Yes."
    assert [(c.name, c.arguments) for c in calls] == [("get", {"key": "a"}), ("add", {"a": 1})]


@pytest.mark.parametrize(
    ("parser", "text", "reason"),
    [
        ("qwen_xml", XML[:-12], "no </tool_call>"),
        ("qwen_xml", XML.replace("<function=set>", ""), "<function=NAME>"),
        ("qwen_xml", XML.replace("<parameter=key>", "<oops>"), "<parameter=KEY>"),
        ("llama_json", '{"name": "get", "parameters": ', "not valid JSON"),
        ("llama_json", '{"name": "get"}', '"parameters", which is missing'),
        ("llama_json", '{"name": "get", "parameters": []}', "got an array"),
        ("mistral", "[TOOL_CALLS] [{", "not valid JSON"),
        ("mistral", "[TOOL_CALLS] {}", "expected a JSON array"),
        ("mistral", "[TOOL_CALLS]get[ARGS]{", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]get[ARGS]{} and more", "text after"),
    ],
)
def test_malformed_calls_are_kept_with_the_reason(parser, text, reason):
    _, (call,) = read(parser, text)
    assert call.arguments is None
    assert reason in (call.error or "")
    assert call.raw.strip() == text.strip()


tokens = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "[TOOL_CALLS]",
     "[ARGS]", "<|python_tag|>", '{"name": "f", "parameters": {}}', ";", "[", "]", "{", "}", '"', "\n"]
)  # fmt: skip


@given(st.sampled_from(sorted(PARSERS)), st.lists(tokens | st.text(max_size=4), max_size=14).map("".join))
def test_no_text_breaks_a_parser(name, text):
    prose, calls = read(name, text)
    assert isinstance(prose, str)
    for call in calls:
        assert (call.arguments is None) == (call.error is not None)
        assert call.raw


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments(plain)), min_size=1, max_size=3))
def test_json_forms_round_trip(items):
    llama = ";".join(json.dumps({"name": n, "parameters": a}) for n, a in items)
    mistral = "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in items])
    for calls in (parse_llama_json(llama)[1], parse_mistral(mistral)[1]):
        assert [(c.name, c.arguments) for c in calls] == items
