"""Tools, calls, results, nulls and reasoning in the forms of others: as they were meant, or refused by the key."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.contrib.agents.protocols import ANTHROPIC, CHAT, RESPONSES, Wire
from agentrl.contrib.offline.layouts import openai_chat, preference
from agentrl.contrib.offline.prepare import render_chat
from agentrl.contrib.offline.store import rows_of
from agentrl.contrib.toolkit.chat_forms import call_result, calls_of, declaration, declarations, from_annotation, without_padding
from agentrl.data.chat_forms import FormError
from agentrl.data.trajectory import Message
from agentrl.env import tool
from agentrl.env.catalog import make_env
from agentrl.render import make_renderer
from agentrl.utils.errors import BadRowError
from tests.conftest import examples
from tests.contrib.agents.parts import exchange_of
from tests.contrib.offline.test_layouts import parquet
from tests.render.families import IM, QWEN3
from tests.render.render_tokenizers import build_tokenizer

RENDERER = make_renderer(build_tokenizer([*IM, "<think>", "</think>"], QWEN3))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("text", "schema", "optional"),
    [("int", {"type": "integer"}, False), ("str, optional", {"type": "string"}, True),
     ("List[int]", {"type": "array", "items": {"type": "integer"}}, False),
     ("Optional[List[str]]", {"type": "array", "items": {"type": "string"}}, True),
     ("List[Tuple[int, int]], optional", {"type": "array", "items": {"type": "array"}}, True),
     ("Dict[str, List[int]]", {"type": "object"}, False), ("Union[int, float]", {"type": ["integer", "number"]}, False),
     ("Callable[[float], float]", {}, False), ("typing.List[float]", {"type": "array", "items": {"type": "number"}}, False),
     ("", {}, False), ("int | None", {"type": ["integer", "null"]}, False),
     ("list[int] | str", {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}, False),
     ("Literal['a', 'b']", {"type": "string", "enum": ["a", "b"]}, False),
     ("string[]", {"type": "array", "items": {"type": "string"}}, False), ("INTEGER", {"type": "integer"}, False)],
)  # fmt: skip
def test_python_annotations_as_schema(text: str, schema: dict[str, Any], optional: bool) -> None:
    assert from_annotation(text) == (schema, optional)


@pytest.mark.parametrize("text", ["[", "strng", "the name of a city", "Literal[x]", "List[strng]"])
def test_a_type_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no known type"):
        from_annotation(text)


FORMS: dict[str, Any] = {
    "nested": {"type": "function", "function": {"name": "f", "description": "d", "parameters": CITY}},
    "flat function": {"type": "function", "name": "f", "description": "d", "parameters": CITY},
    "bare": {"name": "f", "description": "d", "parameters": CITY},
    "MCP": {"name": "f", "title": "F", "description": "d", "inputSchema": {"$schema": "x", **CITY, "title": "In"},
            "outputSchema": {"type": "object"}},
    "Anthropic": {"name": "f", "description": "d", "input_schema": CITY, "cache_control": {"type": "ephemeral"}},
    "text": {"name": "f", "description": "d", "parameters": json.dumps(CITY)},
    "whole text": json.dumps({"name": "f", "description": "d", "parameters": CITY}),
    "flat": {"name": "f", "description": "d", "parameters": {"city": {"type": "str"}}},
    "shortest": {"name": "f", "description": "d", "parameters": {"city": "str"}},
    "list": {"name": "f", "description": "d", "parameters": [{"name": "city", "type": "string", "required": True}]},
    "Hugging Face": {"name": "f", "description": "d", "inputs": {"city": {"type": "string"}}},
    "Google": {"function_declarations": [{"name": "f", "description": "d", "parameters":
               {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]}}]},
    "Bedrock": {"toolSpec": {"name": "f", "description": "d", "inputSchema": {"json": CITY}}},
    "Cohere": {"name": "f", "description": "d", "parameter_definitions": {"city": {"type": "str", "required": True}}},
    "BFCL": {"name": "f", "description": "d", "parameters": {**CITY, "type": "dict"}},
    "required at the property": {"name": "f", "description": "d", "parameters":
                                 {"type": "dict", "properties": {"city": {"type": "string", "required": True}}}},
    "properties as a list": {"name": "f", "description": "d", "parameters":
                             {"type": "object", "properties": [{"name": "city", "type": "str", "required": True}]}},
    "OpenAPI": {"name": "f", "description": "d", "parameters":
                [{"name": "city", "in": "query", "required": True, "schema": {"type": "string"}}]},
    "nulls of a dump": {"type": "function", "function": {"name": "f", "description": "d", "parameters": CITY, "strict": None}},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_each_form_declares_the_parameter_with_its_type(form: Any) -> None:
    wanted = {"type": "function", "function": {"name": "f", "description": "d", "parameters": CITY}}
    assert (once := declarations([form])) == (wanted,)
    assert json.dumps(declarations(list(once))) == json.dumps(once), "what was read is read as itself"
    row = {"messages": SAID, "tools": json.dumps([form])}
    assert openai_chat(row).tools == (wanted,)


UNREAD = {
    "params": {"name": "f", "params": CITY},
    "schema": {"name": "f", "schema": CITY},
    "kwargs": {"name": "f", "kwargs": [{"name": "city"}]},
    "properties": {"name": "f", "type": "object", "properties": CITY["properties"]},
    "parametres": {"type": "function", "function": {"name": "f", "parameters": {}, "parametres": CITY}},
    "fn_args": {"name": "f", "fn_args": json.dumps(CITY)},
    "parameters.city": {"name": "f", "parameters": {"type": "object", "city": {"type": "string"}}},
    "parameters.properties.a.city": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"city": {"type": "str"}}}},
    },
    "parameters.city.type": {"name": "f", "parameters": {"city": {"type": "strng"}}},
    "parameters.city: true is no type": {"name": "f", "parameters": {"city": True}},
    "parameters[0]": {"name": "f", "parameters": ["city"]},
    "parameters.properties.c.enum": {"name": "f", "parameters": {"properties": {"c": {"type": "string", "enum": "a, b"}}}},
    "parameters and input_schema": {"name": "f", "parameters": CITY, "input_schema": {**CITY, "required": []}},
    "parameters.type": {"name": "f", "parameters": {"type": "string"}},
    "tools[0].parameters": {"type": "function", "function": {"name": "f"}, "parameters": CITY},
    "parameters.fields": {"name": "f", "parameters": {"type": "object", "fields": [{"name": "city", "type": "string"}]}},
    "parameters.required": {"name": "f", "parameters": {**CITY, "required": "city"}},
    "parameters[1]": {"name": "f", "parameters": [{"name": "a", "type": "str"}, {"name": "a", "type": "int"}]},
    "parameters.properties.a": {"name": "f", "parameters": {"type": "object", "properties": {"a": "string"}}},
    "api_parameters": {"name": "f", "api_parameters": [{"name": "a", "type": "STRING"}]},
    "name": {"description": "d", "parameters": CITY},
    "tools[0].type": {"type": "bash_20250124", "name": "f"},
}


@pytest.mark.parametrize(("key", "form"), UNREAD.items(), ids=UNREAD)
def test_parameters_that_are_not_read_are_refused_by_their_key(key: str, form: Any) -> None:
    """Else the tool would be shown without them."""
    with pytest.raises(BadRowError, match="tools") as problem:
        openai_chat({"messages": SAID, "tools": [form]})
    assert key in str(problem.value)


# -- the same prompt for data and for episodes -------------------------------------------------------

LEAF = st.sampled_from([
    {"type": "string"}, {"description": "first", "type": "integer"}, {"type": ["string", "null"], "default": None},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}, {"default": None, "type": "string"}, {"const": None},
    {"enum": ["a", None, 1]}, {"oneOf": [{"type": "string"}, {"const": 3}]}, {"type": "string", "pattern": "^a+$"},
    {"$ref": "#/$defs/part"}, {"examples": [{"type": "dict", "x": None}], "type": "object"},
    {"type": "string", "description": ""},
    {"default": {"type": "str", "inner": None}}, {"type": "array", "items": {"title": "T", "type": "number"}}, {},
    {"title": "type", "type": "boolean", "deprecated": True}, {"enum": [{"type": "float"}]}, {"type": "number", "minimum": 0},
])  # fmt: skip
NAMES = st.sampled_from(["city", "type", "default", "properties", "enum", "required", "title", "$ref", "items"])
OBJECTS = st.recursive(
    st.dictionaries(NAMES, LEAF, max_size=4),
    lambda inner: st.dictionaries(NAMES, inner.map(lambda held: {"type": "object", "properties": held}) | LEAF, max_size=3),
    max_leaves=6,
)


@st.composite
def declared(draw: st.DrawFn) -> dict[str, Any]:
    """A declaration in OpenAI's form, its keys in any order."""

    def shuffled(keys: dict[str, Any]) -> dict[str, Any]:
        return {key: keys[key] for key in draw(st.permutations(sorted(keys)))}

    schema = shuffled({
        "type": "object", "properties": draw(OBJECTS), "$defs": {"part": {"type": "string", "default": None}},
        **draw(st.sampled_from([{}, {"required": []}, {"additionalProperties": False}, {"description": ""}, {"title": "t"}])),
    })  # fmt: skip
    extra = draw(st.sampled_from([{}, {"strict": True}, {"strict": False}, {"return": {"type": "string"}}, {"description": ""}]))
    return shuffled({"type": "function", "function": shuffled({"name": "f", **extra, "parameters": schema})})


def opening(row_tools: Any) -> list[int]:
    """The prompt of a data row with these tools."""
    [ledger, *_] = render_chat(openai_chat({"messages": SAID, "tools": row_tools}), RENDERER)
    return ledger.ids()[: int(ledger.sampled.argmax())]


def asked(wire: Wire, **body: Any) -> Any:
    return wire.read(exchange_of(body))


@given(declared())
@settings(max_examples=examples(40), deadline=None)
def test_data_has_the_prompt_of_an_episode_with_the_same_tool(whole: dict[str, Any]) -> None:
    wanted = RENDERER.start([Message("user", "hi")], [whole])
    assert opening([whole]) == wanted == opening(json.dumps([whole])), "data"
    assert RENDERER.start([Message("user", "hi")], asked(CHAT, messages=SAID[:1], tools=[whole]).tools) == wanted, "chat"
    inner = {"type": "function", **whole["function"]}
    read = asked(RESPONSES, input="hi", tools=[inner]).tools
    assert json.dumps(read[0]["function"]) == json.dumps(whole["function"]), "responses"
    assert json.dumps(read) == json.dumps(declarations([inner])) == json.dumps(declarations([whole["function"]])), "flat and bare"


@given(declared())
@settings(max_examples=examples(15), deadline=None)
def test_episodes_of_own_tools_and_function_calling_show_the_declaration(whole: dict[str, Any]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        own, other = Path(folder, "own.jsonl"), Path(folder, "calls.jsonl")
        own.write_text(json.dumps({"prompt": "hi", "split": "train", "tools": [whole], "answers": [], "gold": {"answer": "x"}}))
        other.write_text(json.dumps({"messages": SAID[:1], "tools": [whole]}))
        for env in (
            make_env("own_tools", tasks=str(own), system=""),
            make_env("function_calling", data=str(other), splits_by="none"),
        ):
            env.reset(seed=0)
            assert json.dumps(env.trajectory.tools) == json.dumps([whole])
            assert RENDERER.start([Message("user", "hi")], env.trajectory.tools) == opening([whole])


@tool
def search(query: str, value: int | None = None, tags: list[str] | None = None, deep: bool = False) -> str:
    """Search.

    Args:
        query: what for
    """
    return query


def test_a_tool_of_agentrl_s_own_is_trained_as_it_is_played() -> None:
    wanted = RENDERER.start([Message("user", "hi")], [search.schema])
    assert opening([search.schema]) == wanted == opening(json.loads(json.dumps([search.schema])))
    body = search.schema["function"]
    mcp = {"name": body["name"], "description": body["description"], "inputSchema": body["parameters"]}
    assert opening([mcp]) == wanted
    anthropic = {"name": body["name"], "description": body["description"], "input_schema": body["parameters"]}
    read = asked(ANTHROPIC, messages=SAID[:1], max_tokens=5, tools=[anthropic]).tools
    assert RENDERER.start([Message("user", "hi")], read) == wanted


# -- calls and results -------------------------------------------------------------------------------

GET = {"type": "function", "function": {"name": "get", "parameters": CITY}}
SET = {"type": "function", "function": {"name": "set", "parameters": CITY}}


def turn(names: str, *results: dict[str, Any], ids: str = "xyz") -> list[dict[str, Any]]:
    words = {"g": "get", "s": "set"}
    calls = [{**({"id": id} if id != "-" else {}), "type": "function", "function": {"name": words[name], "arguments": "{}"}}
             for name, id in zip(names, ids, strict=False)]  # fmt: skip
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", **result} for result in results),
        {"role": "assistant", "content": "done"},
    ]


ORDERS = {
    "ids": (turn("gg", {"tool_call_id": "y", "content": "2"}, {"tool_call_id": "x", "content": "1"}), "12"),
    "ids of three": (turn("ggg", *({"tool_call_id": id, "content": n} for id, n in ("z3", "x1", "y2"))), "123"),
    "names without ids": (turn("gs", {"name": "set", "content": "2"}, {"name": "get", "content": "1"}, ids="--"), "12"),
    "names, calls with ids": (turn("gs", {"name": "set", "content": "2"}, {"name": "get", "content": "1"}), "12"),
    "order alone": (turn("gg", {"content": "1"}, {"content": "2"}, ids="--"), "12"),
    "one id for two calls": (
        turn("gs", *({"tool_call_id": "x", "name": name, "content": n} for name, n in (("set", "2"), ("get", "1"))), ids="xx"),
        "12",
    ),
    "other programs' keys": (turn("gg", {"tool_use_id": "y", "content": "2"}, {"call_id": "x", "content": "1"}), "12"),
    "Ollama": (turn("gs", {"tool_name": "set", "content": "2"}, {"tool_name": "get", "content": "1"}, ids="--"), "12"),
}  # fmt: skip


@pytest.mark.parametrize(("said", "order"), ORDERS.values(), ids=ORDERS)
def test_results_stand_in_the_order_of_their_calls(said: list[dict[str, Any]], order: str) -> None:
    for chat in (
        openai_chat({"messages": said, "tools": [GET, SET]}),
        preference({"prompt": said[:-1], "chosen": said[-1:], "rejected": SAID[1:], "tools": [GET, SET]})[0],
    ):
        results = [message for message in chat.messages if message.role == "tool"]
        calls = chat.messages[1].tool_calls
        assert "".join(result.content for result in results) == order
        assert [(one.tool_call_id, one.name) for one in results] == [(call.id, call.name) for call in calls]
        assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize(("said", "why"), [
    (turn("gs", {"name": "sett", "content": "2"}, ids="--"), "(sett) that answers no call before it"),
    (turn("gg", {"tool_call_id": "y", "content": "2"}), "none of call 0 ('get')"),
    (turn("gg", {"tool_call_id": "q", "content": "2"}), "(q) that answers no call before it"),
])  # fmt: skip
def test_a_result_that_would_be_shown_as_another_s_is_refused(said: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(BadRowError, match="messages") as problem:
        openai_chat({"messages": said, "tools": [GET, SET]})
    assert why in str(problem.value)


def test_an_id_that_each_turn_repeats_is_made_unique() -> None:
    said = turn("g", {"tool_call_id": "x", "content": "1"})
    chat = openai_chat({"messages": [*said, *turn("s", {"tool_call_id": "x", "content": "2"})], "tools": [GET, SET]})
    ids = [call.id for message in chat.messages for call in message.tool_calls]
    assert len(set(ids)) == 2 and ids == [message.tool_call_id for message in chat.messages if message.role == "tool"]
    assert [message.name for message in chat.messages if message.role == "tool"] == ["get", "set"]
    again = [*said, *turn("s", {"tool_call_id": "x", "content": "2"})[:-1]]
    assert [one.name for one in asked(CHAT, messages=again).messages if one.role == "tool"] == ["get", "set"], "the endpoint, too"


def test_the_endpoint_s_protocols_put_results_into_the_order_of_their_calls() -> None:
    chat = turn("gg", {"tool_call_id": "y", "content": "2"}, {"tool_call_id": "x", "content": "1"})[:-1]
    use = [{"type": "tool_use", "id": id, "name": "get", "input": {}} for id in "xy"]
    result = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in ("y2", "x1")]
    anthropic = [SAID[0], {"role": "assistant", "content": use}, {"role": "user", "content": result}]
    items = [SAID[0], *({"type": "function_call", "call_id": id, "name": "get", "arguments": "{}"} for id in "xy"),
             *({"type": "function_call_output", "call_id": id, "output": text} for id, text in ("y2", "x1"))]  # fmt: skip
    for ask in (asked(CHAT, messages=chat), asked(ANTHROPIC, messages=anthropic, max_tokens=5), asked(RESPONSES, input=items)):
        assert [(one.tool_call_id, one.content, one.name) for one in ask.messages[2:]] == [("x", "1", "get"), ("y", "2", "get")]


@pytest.mark.parametrize("key", ["arguments", "parameters", "input", "args"])
def test_a_call_has_its_arguments_under_any_of_their_names(key: str) -> None:
    assert calls_of([{"name": "f", key: {"a": 1}}], "calls")[0].arguments == {"a": 1} and calls_of("null", "calls") == ()
    assert calls_of([{"function": {"name": "f"}, key: '{"a": 1}'}], "calls")[0].arguments == {"a": 1}
    with pytest.raises(FormError, match=r"calls\[0\].kwargs: no known key of a call"):
        calls_of([{"name": "f", "kwargs": {"a": 1}}], "calls")


# -- nulls -------------------------------------------------------------------------------------------

NULLABLE = {
    "type": "object",
    "required": ["need"],
    "properties": {
        "need": {"type": ["integer", "null"]},
        "may": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "text": {"type": "string"},
        "deep": {"$ref": "#/$defs/deep"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/deep"}},
        "free": {"type": "object"},
    },
    "$defs": {"deep": {"type": "object", "required": ["x"], "properties": {"x": {"enum": [1, None]}, "y": {"type": "string"}}}},
}
"""Nulls that are meant, and those that are not, at each depth."""  # fmt: skip


@pytest.mark.parametrize(("written", "lines", "table"), [
    ({"need": None}, {"need": None}, {"need": None}),
    ({"need": 1, "may": None}, {"need": 1, "may": None}, {"need": 1}),
    ({"need": None, "may": None, "text": None}, {"need": None}, {"need": None}),
    ({"need": None, "other": None}, {"need": None}, {"need": None}),
    ({"deep": {"x": None, "y": None}}, {"deep": {"x": None}}, {"deep": {"x": None}}),
    ({"list": [{"x": None}, {"x": 1, "y": None}]}, {"list": [{"x": None}, {"x": 1}]}, {"list": [{"x": None}, {"x": 1}]}),
    ({"free": {"k": None}}, {"free": {"k": None}}, {"free": {}}),
])  # fmt: skip
def test_a_null_in_arguments_is_kept_where_the_tool_takes_it(written: Any, lines: Any, table: Any) -> None:
    assert without_padding(written, NULLABLE) == lines and without_padding(written, NULLABLE, table=True) == table


def test_the_nulls_of_a_client_s_dump_are_absent_keys() -> None:
    dumped = {"role": "assistant", "content": "yes", "refusal": None, "annotations": None, "audio": None, "function_call": None,
              "tool_calls": None, "weight": None, "reasoning": None}  # fmt: skip
    asked_first = {"role": "user", "content": "hi", "name": None}
    row = {"messages": [asked_first, dumped], "tools": None, "functions": None, "parallel_tool_calls": None}
    chat = openai_chat(row)
    assert chat == openai_chat({"messages": SAID}) and chat.trained == (False, True) and not chat.unread


def test_a_table_keeps_the_null_that_a_tool_requires_and_no_other(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "set", "parameters": NULLABLE}}, GET]
    called = [{"name": "set", "arguments": {"need": None}}, {"name": "get", "arguments": {"city": "Rome"}}]
    said = [SAID[0], {"role": "assistant", "tool_calls": [{"id": str(n), "function": one} for n, one in enumerate(called)]}]
    file = parquet(tmp_path / "a.parquet", [{"messages": said, "tools": json.dumps(tools)}])
    [(_, row)] = rows_of(file)
    assert isinstance(row, dict)
    assert [call.arguments for call in openai_chat(row, table=True).messages[1].tool_calls] == [{"need": None}, {"city": "Rome"}]


def test_a_gold_null_of_a_table_is_a_gold_null(tmp_path: Path) -> None:
    need = {"type": "object", "required": ["need"], "properties": {"need": {"type": ["integer", "null"]}}}
    tools = [{"name": "set", "description": "", "parameters": need}, {"name": "get", "description": "", "parameters": CITY}]
    calls = [{"name": "set", "arguments": {"need": None}}, {"name": "get", "arguments": {"city": "Rome"}}]
    row = {"prompt": "hi", "split": "train", "tools": json.dumps(tools), "gold": {"calls": calls},
           "answers": [{**call, "content": "ok"} for call in calls]}  # fmt: skip
    env = make_env("own_tools", tasks=str(parquet(tmp_path / "a.parquet", [row])))
    env.reset(seed=0)
    assert env.task.gold["calls"] == calls
    for message in env.gold_turns(env.task):
        _, reward, *_ = env.step(message)
    assert reward == 1.0


def test_the_padding_of_a_table_s_schemas_is_no_default() -> None:
    padded = {"type": "object", "required": None, "properties": {
        "city": {"type": "string", "default": None, "enum": None},
        "value": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "enum": None}, "other": None}}  # fmt: skip
    properties = declaration({"name": "f", "parameters": padded}, "t")["function"]["parameters"]["properties"]
    assert properties == {
        "city": {"type": "string"},
        "value": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    }


# -- reasoning ---------------------------------------------------------------------------------------

THOUGHT = [
    {"content": "yes", "reasoning_content": "since"},
    {"content": "yes", "reasoning": "since"},
    {"content": "yes", "thinking": "since"},
    {"content": "yes", "reasoning": "since", "reasoning_content": "since"},
    {"content": [{"type": "thinking", "thinking": "since", "signature": "s"}, {"type": "text", "text": "yes"}]},
    {"content": "yes", "thinking_blocks": [{"type": "thinking", "thinking": "since", "signature": "s"}]},
    {"content": "yes", "reasoning_details": [{"type": "reasoning.text", "text": "since"}]},
]


@pytest.mark.parametrize("message", THOUGHT, ids=lambda message: ", ".join(message))
def test_reasoning_is_read_under_each_of_its_names(message: dict[str, Any]) -> None:
    chat = openai_chat({"messages": [SAID[0], {"role": "assistant", **message}]})
    assert chat.messages[1].reasoning == "since" and chat.messages[1].content == "yes"
    [ledger] = render_chat(chat, RENDERER)
    assert "since" in RENDERER._text.decode(ledger.token_ids[ledger.sampled].tolist())  # type: ignore[attr-defined]


def test_what_nothing_is_made_of_is_counted() -> None:
    said = [{**SAID[0], "name": "ann"}, {**SAID[1], "audio": {"id": "a"}}]
    assert openai_chat({"messages": said}).unread == {"user.name": 1, "assistant.audio": 1}


def test_the_endpoint_reads_reasoning_in_each_protocol() -> None:
    chat = [SAID[0], {"role": "assistant", "content": "yes", "reasoning": "since"}, SAID[0]]
    blocks = [{"type": "thinking", "thinking": "since", "signature": "s"}, {"type": "text", "text": "yes"}]
    anthropic = [SAID[0], {"role": "assistant", "content": blocks}, SAID[0]]
    items = [SAID[0], {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "since"}]},
             {"role": "assistant", "content": "yes"}, SAID[0]]  # fmt: skip
    for ask in (asked(CHAT, messages=chat), asked(ANTHROPIC, messages=anthropic, max_tokens=5), asked(RESPONSES, input=items)):
        assert ask.messages[1] == Message("assistant", "yes", reasoning="since")


def test_a_long_result_of_a_tool_is_put_together_in_one_pass() -> None:
    text = f"{'x' * 99}\n" * 40_000
    began = time.monotonic()
    [block] = call_result(text).content
    assert block.text == text and time.monotonic() - began < 2.0
