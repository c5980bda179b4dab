"""Every field of a request with a value of another type: refused by name, with the status that no client repeats."""

import copy
from typing import Any

import pytest

from agentrl.contrib.agents.protocols import ANTHROPIC, CHAT, RESPONSES, Exchange, Wire
from agentrl.contrib.agents.session import AgentSession, refusal_of
from agentrl.engines.chat_format import RequestError

VALUES = {"text": "odd", "number": 5, "bool": True, "list": [5], "object": {"odd": 5}, "null": None}
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "model": "m", "stream": False, "metadata": {}, "service_tier": "auto"}
OPENAI = {"seed": 1, "parallel_tool_calls": True, "store": False, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}
OPENAI |= {"stream_options": {}}
BODIES: dict[str, tuple[Wire, dict[str, Any]]] = {
    "chat": (CHAT, SAMPLING | OPENAI | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "n"},
            {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "get", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ],
        "tools": [{"type": "function", "function": {"name": "get", "description": "d", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "get"}}, "logprobs": False, "n": 1, "stop": ["x"],
        "max_tokens": 9, "max_completion_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    }),
    "responses": (RESPONSES, SAMPLING | OPENAI | {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
            {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "t"},
        ],
        "tools": [{"type": "function", "name": "get", "description": "d", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "get"}, "instructions": "i", "include": [], "reasoning": {},
        "truncation": "disabled", "text": {"format": FORMAT}, "max_output_tokens": 9, "previous_response_id": "before",
    }),
    "anthropic": (ANTHROPIC, SAMPLING | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "get", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t", "is_error": False}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "get", "description": "d", "input_schema": SCHEMA}], "max_tokens": 9, "stop_sequences": ["x"],
        "tool_choice": {"type": "tool", "name": "get", "disable_parallel_tool_use": False},
        "cache_control": {}, "output_config": {"format": FORMAT},
    }),
}  # fmt: skip
# Besides a field's own type and null, which is the same as leaving it out.
ALSO: dict[str, set[str]] = {
    "content": {"text"}, "system": {"text"}, "input": {"text"}, "stop": {"text"}, "output": {"list"}, "instructions": {"list"},
    "arguments": {"object"}, "key": {"bool"}, "stop_sequences": {"text"},
}  # fmt: skip
NULL_IS_WRONG = {"messages", "input", "role", "text", "call_id", "tool_call_id", "tool_use_id", "id", "name", "properties", "key"}
NULL_IS_WRONG |= {"required", "function", "arguments", 0, 1, 2}
NULL_IS_RIGHT = {("messages", 0, "name"), ("text",), ("messages", 2, "tool_call_id")}
NULL_IS_NO_TEXT = {(field, place, key) for field in ("messages", "input") for place in (0, 2) for key in ("content", "output")}
FREE = {"type"}
"""Which the refusals of what is not supported look at."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [place for key, item in inner if key not in FREE for place in places(item, (*path, key))]
    return [*([(path, value)] if path else []), *found]


def told(wire: Wire, body: Any) -> Any:
    """None, or the status and the error as the client gets them."""
    session: Any = object.__new__(AgentSession)
    session.kept = {"before": []}
    try:
        wire.read(Exchange(session, body, "policy", {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, None))
    except Exception as problem:  # as the server does
        problem_told = refusal_of(problem)
        return problem_told.status, wire.error(problem_told)["error"]
    return None


@pytest.mark.parametrize("name", BODIES)
def test_a_field_of_another_type_is_refused_by_name(name: str) -> None:
    wire, body = BODIES[name]
    assert told(wire, body) is None
    wrong = []
    for path, own in places(body):
        names = {str: "text", bool: "bool", int: "number", float: "number", list: "list", dict: "object"}
        good = {names[type(own)], *ALSO.get(path[-1], ())}
        if path not in NULL_IS_NO_TEXT and (path[-1] not in NULL_IS_WRONG or path in NULL_IS_RIGHT):
            good.add("null")
        for kind in VALUES.keys() - good:
            whole = copy.deepcopy(body)
            at = whole
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = VALUES[kind]
            answer = told(wire, whole)
            if answer is None or answer[0] != 400 or not answer[1]["message"].startswith(path[0]):
                wrong.append((*path, kind, answer))
            else:
                assert answer[1]["type"] == "invalid_request_error"
    assert not wrong, f"{len(wrong)}: {wrong}"


def test_nothing_of_a_history_becomes_an_empty_text() -> None:
    """A refusal was dropped, a null was an empty message, and the second of two thoughts of a turn was gone."""

    def read(wire: Wire, rows: list[dict[str, Any]]) -> Any:
        body = {"input": rows} if wire is RESPONSES else {"messages": rows, "max_tokens": 9}
        session: Any = object.__new__(AgentSession)
        session.kept = {}
        return wire.read(Exchange(session, body, "policy", {}, None)).messages

    ask = {"role": "user", "content": "q"}
    part = {"type": "refusal", "refusal": "no"}
    for said in ({"content": None, "refusal": "no"}, {"content": [part]}, {"content": "no", "refusal": None}):
        assert read(CHAT, [ask, {"role": "assistant", **said}, ask])[1].content == "no"
    assert read(RESPONSES, [ask, {"role": "assistant", "content": [part]}, ask])[1].content == "no"
    for wire, rows in [
        (CHAT, [{"role": "user", "content": None}]),
        (CHAT, [ask, {"role": "assistant"}, ask]),
        (CHAT, [{"role": "user", "content": [{"type": "text"}]}]),
        (RESPONSES, [{"role": "user", "content": None}]),
        (ANTHROPIC, [{"role": "user", "content": None}]),
        (ANTHROPIC, [{"role": "user", "content": [{"type": "text"}]}]),
    ]:
        with pytest.raises(RequestError, match=r"\[\d\]\.content.*: expected text"):
            read(wire, rows)
    call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("one ", "two")]
    result = [{"type": "function_call_output", "call_id": c, "output": "t"} for c in "cd"]
    found = read(RESPONSES, [ask, thoughts[0], call, thoughts[1], {**call, "call_id": "d"}, *result])
    assert found[1].reasoning == "one two"
