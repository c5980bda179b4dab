import json

from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.trajectory import ToolCall
from agentrl.render.tool_calls import CLOSE, OPEN, parse_tool_calls, render_tool_calls

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(max_size=8)
    | st.sampled_from([OPEN, CLOSE, '"', "\\", "<|im_end|>", "é\n\t"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=5), json_values, max_size=4)


def block(body: str) -> str:
    return f"{OPEN}\n{body}\n{CLOSE}"


def test_prose_and_two_calls_in_order():
    text = (
        "I look.\n"
        + block('{"name": "get", "arguments": {"k": "a"}}')
        + "\n"
        + block('{"name": "set", "arguments": {"k": "b", "v": 7}}')
    )
    content, calls = parse_tool_calls(text)
    assert content == "I look."
    assert [(c.name, c.arguments, c.id, c.error) for c in calls] == [
        ("get", {"k": "a"}, "call_0", None),
        ("set", {"k": "b", "v": 7}, "call_1", None),
    ]
    assert calls[0].raw == block('{"name": "get", "arguments": {"k": "a"}}')


def test_a_string_argument_may_hold_the_closing_tag():
    _, calls = parse_tool_calls(block(json.dumps({"name": "say", "arguments": {"x": f"{CLOSE}{OPEN}"}})))
    assert len(calls) == 1 and calls[0].arguments == {"x": f"{CLOSE}{OPEN}"}


def test_each_malformation_is_named_and_kept_verbatim():
    cases = {
        block("{oops}"): "not valid JSON",
        block("[1]"): "expected a JSON object, got an array",
        block('{"arguments": {}}'): '"name"',
        block('{"name": "", "arguments": {}}'): '"name"',
        block('{"name": "f"}'): "missing",
        block('{"name": "f", "arguments": "{}"}'): "got a string",
        block('{"name": "f", "arguments": {"x": NaN}}'): "NaN",
        block('{"name": "f", "arguments": {"x": "\\ud800"}}'): "surrogate",
        block('{"name": "f", "arguments": {}} trailing'): "after the JSON object",
        OPEN + '{"name": "f", "arguments": {}}': f"no {CLOSE}",
        OPEN + '{"name": "f", "argu': f"no {CLOSE}",
        block("[" * 100_000): "not valid JSON",
        block('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"): "not valid JSON",
    }
    for text, reason in cases.items():
        content, (call,) = parse_tool_calls(text)
        assert call.arguments is None and content == ""
        assert reason in (call.error or ""), (text[:60], call.error)
        assert call.raw == text


def test_a_broken_block_does_not_swallow_the_next_call():
    text = OPEN + '{"name": "f", ' + block('{"name": "g", "arguments": {}}')
    _, calls = parse_tool_calls(text)
    assert [call.name for call in calls] == ["", "g"]
    assert calls[0].arguments is None and calls[1].arguments == {}


def test_a_closing_tag_without_an_opening_one_is_a_malformed_call():
    content, (call,) = parse_tool_calls(f'{{"name": "f", "arguments": {{}}}}{CLOSE} b')
    assert content == '{"name": "f", "arguments": {}} b' and call.raw == CLOSE
    assert call.arguments is None and "without the mark that opens a call" in (call.error or "")


@given(st.lists(st.tuples(st.text(min_size=1, max_size=6), arguments), max_size=3))
def test_render_then_parse_is_the_identity(items):
    calls = [ToolCall(name, args) for name, args in items]
    content, parsed = parse_tool_calls("prose\n" + render_tool_calls(calls))
    assert content == "prose"
    assert [(c.name, c.arguments) for c in parsed] == [(c.name, c.arguments) for c in calls]


pieces = st.sampled_from([OPEN, CLOSE, *'{}:,[x"\n', '"name"', '"f"', '"arguments"', "\\u"])


@given(st.lists(pieces | st.text(max_size=5), max_size=20).map("".join))
def test_any_text_parses_and_nothing_is_lost(text):
    content, calls = parse_tool_calls(text)
    for call in calls:
        assert call.raw in text and (call.arguments is None) == (call.error is not None)
        text = text.replace(call.raw, "", 1)
    assert "".join(text.split()) == "".join(content.split())
