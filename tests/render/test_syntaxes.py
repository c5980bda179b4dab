"""Each tool-call syntax: what the tests write in it is read back, what is broken is kept with the reason, nothing raises."""

import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectory import ToolCall
from agentrl.render import tagged_syntaxes
from agentrl.render.syntaxes import SYNTAXES, harmony_parts
from agentrl.render.tagged_syntaxes import parse_qwen_xml
from agentrl.render.tool_calls import CLOSE, MOST_CALLS, OPEN, ForTools, argument_value
from tests.conftest import examples

quick = settings(max_examples=20, deadline=None)
KINDS = {"s": "string", "n": "integer", "b": "boolean", "l": "array", "o": "object"}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}}}}
    for name in ("get", "set_it")
]  # fmt: skip


def read(name, text, tools=TOOLS):
    parser = SYNTAXES[name].parser
    return (parser.bind(tools) if isinstance(parser, ForTools) else parser)(text)


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def gemma(quote):
    def spell(value):
        if isinstance(value, str):
            return quote + value + quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{spell(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(spell, value)) + "]"
        return dumped(value)

    return spell


def python(name, arguments):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def plain(value):
    return value if isinstance(value, str) else dumped(value)


QUOTE = '<|"|>'
WRITE = {
    "hermes": lambda calls: "\n".join(f'<tool_call>\n{dumped({"name": n, "arguments": a})}\n</tool_call>' for n, a in calls),
    "qwen_xml": lambda calls: "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in a.items()) + "</function>\n</tool_call>"
        for n, a in calls),
    "glm": lambda calls: "\n".join(
        f"<tool_call>{n}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in a.items()) + "</tool_call>"
        for n, a in calls),
    "llama_json": lambda calls: "; ".join(dumped({"name": n, "parameters": a}) for n, a in calls),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{dumped(a)}" for n, a in calls),
    "deepseek": lambda calls: "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>" for n, a in calls) + "<｜tool▁calls▁end｜>",
    "deepseek_dsml": lambda calls: "<｜DSML｜function_calls>\n" + "".join(
        f'<｜DSML｜invoke name="{n}">\n' + "".join(
            f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{plain(v)}</｜DSML｜parameter>\n'
            for k, v in a.items()) + "</｜DSML｜invoke>\n" for n, a in calls) + "</｜DSML｜function_calls>",
    "granite": lambda calls: "<|tool_call|>" + dumped([{"name": n, "arguments": a} for n, a in calls]),
    "phi": lambda calls: "<|tool_call|>" + dumped([{"name": n, "arguments": a} for n, a in calls]) + "<|/tool_call|>",
    "gemma": lambda calls: "".join(f'<|tool_call>call:{n}{gemma(QUOTE)(a)}<tool_call|>' for n, a in calls),
    "function_gemma": lambda calls: "".join(
        f"<start_function_call>call:{n}{gemma('<escape>')(a)}<end_function_call>" for n, a in calls),
    "pythonic": lambda calls: "[" + ", ".join(python(n, a) for n, a in calls) + "]",
    "lfm2": lambda calls: "<|tool_call_start|>[" + ", ".join(python(n, a) for n, a in calls) + "]<|tool_call_end|>",
    "olmo": lambda calls: "<function_calls>\n" + "\n".join(python(n, a) for n, a in calls) + "\n</function_calls>",
    "harmony": lambda calls: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumped(a)}<|call|>" for n, a in calls),
}  # fmt: skip
# In these a string ends at its own mark only; in the others a tag within a string would end the call.
QUOTED = ["hermes", "llama_json", "mistral", "deepseek", "granite", "phi", "pythonic"]

TAGS = ["</tool_call>", "<tool_call>", "<｜tool▁call▁end｜>", "<|/tool_call|>", "[ARGS]", ");", "\n", "\\n", *"\"'\\]}"]
word = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
inner = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | word | st.floats(-1e6, 1e6),
    lambda value: st.lists(value, max_size=2) | st.dictionaries(word, value, max_size=2),
    max_leaves=4,
)


def calls_of(text):
    values = {"s": text, "n": st.integers(-(10**12), 10**12), "b": st.booleans(), "l": st.lists(inner, max_size=2),
              "o": st.dictionaries(word, inner, max_size=2)}  # fmt: skip
    one = st.tuples(st.sampled_from(["get", "set_it"]), st.fixed_dictionaries({}, optional=values))
    return st.lists(one, min_size=1, max_size=3)


assert set(WRITE) == set(SYNTAXES)


@pytest.mark.parametrize("name", sorted(WRITE))
@quick
@given(st.data())
def test_well_formed_calls_are_read_as_they_were_meant(name, data):
    text = word if name not in QUOTED else st.lists(word | st.sampled_from(TAGS), max_size=4).map("".join)
    if name == "mistral":  # the one mark that begins a call wherever it stands
        text = text.map(lambda item: item.replace("[TOOL_CALLS]", ""))
    calls = data.draw(calls_of(text))
    _, found = read(name, WRITE[name](calls))
    assert [(call.name, call.arguments) for call in found] == calls
    assert [call.id for call in found] == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("name", sorted(set(WRITE) - {"llama_json", "pythonic"}))
def test_what_is_said_beside_calls_is_kept_apart(name):
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" if name == "harmony" else "I look.\n"
    content, calls = read(name, said + WRITE[name]([("get", {"n": 7})]))
    assert content == "I look." and [call.arguments for call in calls] == [{"n": 7}]


@pytest.mark.parametrize("name", sorted(WRITE))
def test_a_call_cut_short_is_kept_with_the_reason(name):
    whole = WRITE[name]([("get", {"s": "abc", "n": 7})])
    for cut in range(len(whole)):
        content, calls = read(name, whole[:cut])
        assert all((call.arguments is None) == (call.error is not None) and call.raw for call in calls)
        # It is either still text or a broken call, and never a call with fewer arguments.
        assert all(call.arguments in (None, {"s": "abc", "n": 7}) for call in calls), whole[:cut]
        assert "".join((content + "".join(call.raw for call in calls)).split()) or not whole[:cut].strip() or name == "harmony"


def block(body):
    return f"{OPEN}\n{body}\n{CLOSE}"


BROKEN = [
    ("hermes", block("{oops}"), "not valid JSON"), ("hermes", block("[1]"), "expected a JSON object, got an array"),
    ("hermes", block('{"arguments": {}}'), '"name"'), ("hermes", block('{"name": "", "arguments": {}}'), '"name"'),
    ("hermes", block('{"name": "f"}'), "missing"), ("hermes", block('{"name": "f", "arguments": "{}"}'), "got a string"),
    ("hermes", block('{"name": "f", "arguments": {"x": NaN}}'), "NaN"),
    ("hermes", block('{"name": "f", "arguments": {"x": "\\ud800"}}'), "surrogate"),
    ("hermes", block('{"name": "f", "arguments": {}} trailing'), "after the JSON object"),
    ("hermes", OPEN + '{"name": "f", "arguments": {}}', f"no {CLOSE}"), ("hermes", OPEN + '{"name": "f", "argu', f"no {CLOSE}"),
    ("hermes", block("[" * 100_000), "not valid JSON"),
    ("hermes", block('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"), "not valid JSON"),
    ("glm", "<tool_call>get\n<arg_key>n</arg_key>\n</tool_call>", "<arg_value>"),
    ("glm", "<tool_call>\n</tool_call>", "function name"),
    ("deepseek", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{oops}<｜tool▁call▁end｜>", "not valid JSON"),
    ("deepseek", "<｜tool▁call▁begin｜>get{}<｜tool▁call▁end｜>", "tool▁sep"),
    ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}<｜tool▁call▁end｜>", "```"),
    ("deepseek", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>[]<｜tool▁call▁end｜>", "got an array"),
    ("deepseek_dsml", '<｜DSML｜function_calls><｜DSML｜invoke name="f">x</｜DSML｜invoke></｜DSML｜function_calls>',
     "parameter name"),
    ("granite", "<|tool_call|>[]", "empty"), ("granite", "<|tool_call|>get", "not valid JSON"),
    ("phi", '<|tool_call|>[{"arguments": {}}]<|/tool_call|>', '"name"'),
    ("gemma", "<|tool_call>call:get{s:abc}<tool_call|>", "not valid JSON|expected"),
    ("gemma", "<|tool_call>call:get{n:7<tool_call|>", "','"), ("gemma", "<|tool_call>get<tool_call|>", "call:NAME"),
    ("function_gemma", "<start_function_call>call:get{s:<escape>a}<end_function_call>", "at the end of a string"),
    ("lfm2", "<|tool_call_start|>[get(7)]<|tool_call_end|>", "without a name"),
    ("lfm2", "<|tool_call_start|>[get(s={1, 2})]<|tool_call_end|>", "not JSON"),
    ("lfm2", "<|tool_call_start|>[get(n=1e999)]<|tool_call_end|>", "range of a double"),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", "empty list"),
    ("pythonic", "[get(n=__import__('os'))]", "expected a string"), ("pythonic", "[get(n=celsius)]", "expected a string"),
    ("pythonic", "[get(s='a', s='b')]", "given twice"), ("pythonic", "[get(s='a' n=1)]", "expected ')'"),
    ("pythonic", "[get(s=f'{1}')]", "expected a string"),
    ("pythonic", "[get(l=" + "[" * 90 + "]" * 90 + ")]", "nested too deep"), ("pythonic", "[get(s='\\x')]", "broken escape"),
    ("llama_json", "<|python_tag|>get(n=7)", "after <|python_tag|>"),
    ("llama_json", '{"name": "get", "parameters": ', "not valid JSON"),
    ("llama_json", '{"name": "get"}', '"parameters", which is missing'),
    ("llama_json", '{"name": "get", "parameters": []}', "got an array"), ("mistral", "[TOOL_CALLS] [{", "not valid JSON"),
    ("mistral", "[TOOL_CALLS] {}", "expected a JSON array"), ("mistral", "[TOOL_CALLS]get[ARGS]{", "not valid JSON"),
    ("mistral", "[TOOL_CALLS]get[ARGS]{} and more", "text after"),
    ("qwen_xml", "<tool_call>\n<function=get>\n<parameter=n>\n7\n</parameter>\n</function>", "no </tool_call>"),
    ("qwen_xml", "<tool_call>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>", "<function=NAME>"),
    ("qwen_xml", "<tool_call><function=get><oops>7</parameter></function></tool_call>", "<parameter=KEY>"),
    ("qwen_xml", "<function=get><parameter=n>7</parameter>", "no </function>"),
    ("qwen_xml", "<tool_call><function=get><parameter=s>a<parameter=n>7</parameter></function></tool_call>",
     "no </parameter> after the value of 's'"),
    ("granite", "<tool_call>[{]", "not valid JSON"),
    ("granite", '<|tool_call|>{"name": "get", "arguments": {}}\n{"name": "get", "arguments": {}}', "another call"),
    ("glm", "<tool_call>get\n<arg_key>s</arg_key>\n<arg_value>1\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
     "arg_key"),
    ("olmo", "<function_calls>get(</function_calls>", "Python"),
    ("harmony", "<|channel|>commentary to=functions.get<|message|>{oops}<|call|>", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=python<|message|>1+1<|call|>", "not functions.NAME"),
    ("harmony", '<|channel|>commentary to=functions.get<|message|>{"n": 7}', "cut"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reason"), BROKEN)
def test_each_malformation_is_named(name, text, reason):
    content, (call,) = read(name, text)
    assert call.arguments is None and content == ""
    assert any(part in (call.error or "") for part in reason.split("|")), call.error
    assert "".join(call.raw.split()) in "".join(text.split())


def test_a_call_without_its_arguments_keeps_its_name() -> None:
    assert [call.name for call in read("llama_json", '{"name": "get"}')[1]] == ["get"]


@pytest.mark.parametrize("arguments", [{"s": "abc", "other": "abd"}, {"s": "abc", "o": {"s": "abc", "other": [1]}}])
@pytest.mark.parametrize("name", sorted(WRITE))
def test_a_key_given_twice_is_named(name, arguments):
    """The last one won, though nobody knows which of them the policy meant."""
    content, (call,) = read(name, WRITE[name]([("get", arguments)]).replace("other", "s"))
    assert call.arguments is None and content == "" and re.search("(key 's'|argument s) is given twice", call.error), call.error


READ = [
    ("hermes", block(dumped({"name": "say", "arguments": {"x": f"{CLOSE}{OPEN}"}})), "", [("say", {"x": f"{CLOSE}{OPEN}"})]),
    # Names and values that Python's own parser refuses.
    ("pythonic", "[get(from='EUR', class=7, month=07)]", "", [("get", {"from": "EUR", "class": 7, "month": 7})]),
    ("pythonic", "[get-it(city-name='Oslo'), a/b.c(x=.5)]", "", [("get-it", {"city-name": "Oslo"}), ("a/b.c", {"x": 0.5})]),
    ("pythonic", "[get(**{'a b': 1}, s='x')]", "", [("get", {"a b": 1, "s": "x"})]),
    ("pythonic", "<|python_start|>[get(n=7)]<|python_end|>", "", [("get", {"n": 7})]),
    ("pythonic", "<|python_start|>[get(n=7)]<|python_end|>So<|python_start|>[get(n=8)]<|python_end|><|python_start|>!", "So!", [
        ("get", {"n": 7}), ("get", {"n": 8})]),
    ("llama_json", '<|python_tag|>{"name": "get", "parameters": {}}<|python_tag|>{"name": "put", "parameters": {}}', "", [
        ("get", {}), ("put", {})]),
    ("pythonic", "I look.<|python_start|>[get(n=7)]<|python_end|>", "I look.", [("get", {"n": 7})]),
    ("pythonic", "[get(s='a' 'b', l=(1, 2,), o={'k': [True, null]}, n=(-7),)]", "", [
        ("get", {"s": "ab", "l": [1, 2], "o": {"k": [True, None]}, "n": -7})]),
    ("pythonic", "[get(s=r'\\d', l=['\\u00e9\\t', 'it\\'s', \"\"\"two\nlines\"\"\"])]", "", [
        ("get", {"s": "\\d", "l": ["\u00e9\t", "it's", "two\nlines"]})]),
    # A line break within a string is no end of a call, and one between calls is.
    ("olmo", "<function_calls>\nget(s='a\nb, c')\nget(n=7)\n</function_calls>", "", [
        ("get", {"s": "a\nb, c"}), ("get", {"n": 7})]),
    ("lfm2", "<|tool_call_start|>[get(s='a\nb')]<|tool_call_end|>", "", [("get", {"s": "a\nb"})]),
    # Text before, and marks that the servers do not ask for.
    ("llama_json", 'Sure.<|python_tag|>{"name": "get", "parameters": {"n": 7}}', "Sure.", [("get", {"n": 7})]),
    ("llama_json", '<|python_start|>{"name": "get", "parameters": {}}<|python_end|>', "", [("get", {})]),
    ("llama_json", '<|python_start|>I look.<|python_end|>{"name": "get", "parameters": {}}', "I look.", [("get", {})]),
    ("qwen_xml", "I look.\n<function=get>\n<parameter=n>\n7\n</parameter>\n</function>", "I look.", [("get", {"n": 7})]),
    ("qwen_xml", "<function=get></function>\n</tool_call>", "", [("get", {})]),
    ("granite", '<tool_call>[{"name": "get", "arguments": {"n": 7}}]', "", [("get", {"n": 7})]),
    ("granite", 'I look. <tool_call> {"name": "get", "arguments": {}} </tool_call>', "I look.", [("get", {})]),
    ("gemma", '<|tool_call>call:get{ s: <|"|>a<|"|> , l: [ 1, <|"|>b<|"|> ], o: { k: {} } }<tool_call|>', "", [
        ("get", {"s": "a", "l": [1, "b"], "o": {"k": {}}})]),
    ("llama_json", ' The answer is {"a": 1}.', 'The answer is {"a": 1}.', []),
    ("llama_json", '<|python_tag|>{"name": "get", "parameters": {"s": "a;b"}}; {"name": "get", "parameters": {}}', "", [
        ("get", {"s": "a;b"}), ("get", {})]),
    ("mistral", 'Yes.[TOOL_CALLS]get[ARGS]{"s": "a"}[TOOL_CALLS]add[ARGS]{"a": 1}', "Yes.", [
        ("get", {"s": "a"}), ("add", {"a": 1})]),
    ("mistral", '[TOOL_CALLS] [{"name": "get", "arguments": {"n": 7}, "id": "abcdefghi"}]', "", [("get", {"n": 7})]),
    ("mistral", '[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{"n": 7}', "", [("get", {"n": 7})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said", "calls"), READ)
def test_what_a_server_reads_is_read(name, text, said, calls):
    content, found = read(name, text)
    assert [(call.name, call.arguments, call.error) for call in found] == [(*call, None) for call in calls]
    assert content == said
    assert [call.id for call in found] == (["abcdefghi"] if "abcdefghi" in text else [f"call_{i}" for i in range(len(calls))])


CLOSES = {
    "hermes": "</tool_call>", "qwen_xml": "</tool_call>", "glm": "</tool_call>",
    "phi": "<|/tool_call|>", "granite": "<|/tool_call|>",
    "gemma": "<tool_call|>", "function_gemma": "<end_function_call>", "lfm2": "<|tool_call_end|>", "olmo": "</function_calls>",
    "deepseek": "<｜tool▁call▁end｜>", "deepseek_dsml": "</｜DSML｜function_calls>",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CLOSES))
def test_a_call_that_lost_its_opening_mark_is_no_answer(name):
    """As prose it would end the episode, and the policy would never learn why."""
    close = CLOSES[name]
    content, (call,) = read(name, f"call of get {close} after")
    assert (content, call.arguments, call.raw) == ("call of get  after", None, close) and "without the mark" in call.error
    good = WRITE[name]([("get", {"n": 7})])
    _, calls = read(name, f"{good}get{close}{good}")
    assert [one.arguments for one in calls] == [{"n": 7}, None, {"n": 7}], "and takes no other call with it"


KEYWORDS = st.sampled_from(["from", "class", "lambda", "None", "if"])
names = st.text(st.sampled_from("abcXYZ019_-/.:"), min_size=1, max_size=12) | KEYWORDS
texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\"'\\\n,()[]{}="), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e6, 1e6) | texts,
    lambda value: st.lists(value, max_size=2) | st.dictionaries(texts, value, max_size=2),
    max_leaves=4,
)
any_call = st.tuples(
    names.filter(lambda name: not name[0].isdigit()), st.dictionaries(names | texts.filter(bool), values, max_size=3)
)


@pytest.mark.parametrize("name", sorted(name for name, syntax in SYNTAXES.items() if syntax.write))
@settings(max_examples=examples(200), deadline=None)
@given(st.lists(any_call, min_size=1, max_size=3))
def test_what_is_written_is_read(name, calls):
    """Every name that a tool may have, every argument and every value; but for the syntax's own marks, which end a call."""
    written = SYNTAXES[name].write([ToolCall(*call) for call in calls])
    content, found = read(name, written)
    assert content == "" and [(call.name, call.arguments) for call in found] == calls


def test_a_broken_call_does_not_take_the_next_one_with_it():
    for name in ("deepseek", "gemma", "function_gemma", "glm", "hermes"):
        good = WRITE[name]([("get", {"n": 7})])
        bad = good.replace("<arg_value>", "<value>") if name == "glm" else good.replace("7", "oops")
        _, calls = read(name, bad + good)
        assert calls[-1].arguments == {"n": 7} and calls[0].arguments is None, name
    _, calls = read("hermes", OPEN + '{"name": "f", ' + block('{"name": "g", "arguments": {}}'))  # not even closed
    assert [(call.name, call.arguments) for call in calls] == [("", None), ("g", {})]


def test_harmony_tells_reasoning_from_what_is_said():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
    assert harmony_parts(text) == ("hm", "Yes.", ())
    header = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get<|channel|>commentary json"
    swapped = header + "<|message|>{}<|call|>"
    reasoning, said, (call,) = harmony_parts(swapped)
    assert (reasoning, said, call.name, call.arguments) == ("hm", "", "get", {})
    assert harmony_parts("no header at all") == (None, "no header at all", ())


@pytest.mark.parametrize("name", sorted(WRITE))
def test_a_written_call_is_recognized_and_one_without_arguments_read(name):
    assert [(c.name, c.arguments) for c in read(name, WRITE[name]([("get", {})]))[1]] == [("get", {})]
    text = WRITE[name]([("get", {"s": "x"})])
    assert next(syntax.name for syntax in SYNTAXES.values() if syntax.seen(text)) == name


def test_no_other_text_is_taken_for_a_syntax():
    for text in ("", "plain", '{"name": "f"}', "<tool>f</tool>", "f(a=1)", "<|tool_call_begin|>functions.f:0"):
        assert not any(syntax.seen(text) or syntax.asked(text) for syntax in SYNTAXES.values()), text


_WRITTEN = {piece for write in WRITE.values() for piece in write([("get", {"s": "a", "n": 1})]).split()}
pieces = st.sampled_from([*sorted(_WRITTEN), *'{}[]"<:,\n', "[" * 300, "f(" * 300, "-" * 300])


@pytest.mark.parametrize("name", sorted(WRITE))
@settings(max_examples=20, deadline=None)
@given(st.lists(pieces | st.text(max_size=4), max_size=10).map("".join))
def test_nothing_raises_and_nothing_is_lost(name, text):
    content, calls = read(name, text)
    assert isinstance(content, str)
    for call in calls:
        assert (call.arguments is None) == (call.error is not None) and call.raw
        json.dumps(call.arguments, allow_nan=False).encode()
    if name == "hermes":  # to the letter; what is around the calls of others is no text of theirs
        for call in calls:
            assert call.raw in text
            text = text.replace(call.raw, "", 1)
        assert "".join(text.split()) == "".join(content.split())


@pytest.mark.parametrize("schema", [
    {"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"n": {"type": "integer"}}}}},
    {"allOf": [{"properties": {"n": {"type": "integer"}}}]}, {"anyOf": [{"properties": {"n": {"type": "integer"}}}, {}]},
    {"additionalProperties": {"type": "integer"}}, {"patternProperties": {"(": {"type": "null"}, "^n": {"type": "integer"}}},
])  # fmt: skip
def test_an_argument_has_the_type_that_any_part_of_the_schema_declares(schema):
    assert argument_value("5", "n", schema) == 5 and argument_value("5", "m", {"properties": {"n": schema}}) == "5"


# -- types as the tools declare them, and limits ---------------------------------------------------

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
    monkeypatch.setattr(tagged_syntaxes, "MOST_VALUES", 50)
    for count, error in ((48, None), (49, "more than 50 values")):
        [call] = SYNTAXES["gemma"].parser(f"<|tool_call>call:f{{k:[{','.join(['[]'] * count)},1]}}<tool_call|>")[1]
        assert call.error == error
