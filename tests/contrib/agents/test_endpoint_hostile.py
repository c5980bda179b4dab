"""Hostile requests are refused by name, with the status that no client repeats, and nobody else's turn changes."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agentrl.contrib.agents.endpoint import Endpoint
from agentrl.contrib.agents.protocols import ANTHROPIC, CHAT, RESPONSES, Wire
from agentrl.contrib.agents.session import refusal_of
from agentrl.contrib.toolkit import http_server as serving
from agentrl.engines.chat_format import RequestError
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.render import make_renderer
from agentrl.rollout.engine import Sampling
from tests.conftest import proof
from tests.contrib.agents.parts import exchange_of

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "q"}], "seed": 5, "max_tokens": 6}
WRONG = ["hot", True, [1], {"a": 1}, "Infinity", -7.5, 1e300, -(10**300), 10**400, [[]] * 3, "\ud800"]
"""Values for any field. As raw JSON besides: NaN, Infinity, 1e999."""
RAW = ["NaN", "-Infinity", "1e999", "9" * 5000, "[" * 70 + "]" * 70, "[" * 200_000, '"\\u', "\x00"]
PATHS = {
    "chat/completions": (QUESTION, "temperature top_p top_k n seed max_tokens stop stream logprobs tools tool_choice messages "
        "response_format parallel_tool_calls max_completion_tokens stream_options logit_bias user model metadata"),
    "responses": ({"model": "m", "input": "q", "seed": 5}, "temperature top_p top_k seed max_output_tokens input tools "
        "tool_choice text stream instructions previous_response_id truncation include reasoning"),
    "messages": ({"model": "m", "messages": QUESTION["messages"], "max_tokens": 6}, "temperature top_p top_k max_tokens messages "
        "system tools tool_choice stop_sequences stream output_config thinking metadata"),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine_parts(model_folder, tokenizer):
    return str(model_folder), make_renderer(tokenizer)


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=proof)])
async def test_no_request_in_flight_is_harmed_and_none_is_a_servers_error(engine_parts: Any, every: int) -> None:
    folder, renderer = engine_parts
    engine = EmbeddedEngine(folder)
    await engine.start()
    try:
        async with Endpoint(engine, renderer, sampling=Sampling(max_tokens=6)) as server, httpx.AsyncClient(timeout=60) as client:

            async def asked(session: str, path: str, body: str) -> httpx.Response:
                access = server.open(session)
                try:
                    headers = {"authorization": f"Bearer {access.key}", "content-type": "application/json"}
                    content = body.encode("utf-8", "surrogatepass")
                    return await client.post(f"{access.openai_url}/{path}", content=content, headers=headers)
                finally:
                    await server.take(session)

            alone = (await asked("alone", "chat/completions", json.dumps(QUESTION))).json()["choices"]
            values = [json.dumps(value) for value in WRONG] + RAW
            every_one = [(path, field) for path, (_, fields) in PATHS.items() for field in fields.split()]
            bodies = {(path, field): json.dumps({**PATHS[path][0], field: "@"}) for path, field in every_one}
            bad = [(*place, bodies[place].replace('"@"', value)) for place in every_one for value in values][::every]
            innocent, answers = [], []
            for start in range(0, len(bad), 60):
                part = bad[start : start + 60]
                wrong = [asked(f"h{start + i}", path, body) for i, (path, _, body) in enumerate(part)]
                good = [asked(f"g{start}.{i}", "chat/completions", json.dumps(QUESTION)) for i in range(4)]
                got = await asyncio.gather(*wrong, *good)
                answers += got[: len(part)]
                innocent += got[len(part) :]
    finally:
        await engine.close()
    assert len(bad) >= 800 / every and len(innocent) >= len(bad) / 15
    assert all(one.status_code == 200 and one.json()["choices"] == alone for one in innocent)
    odd = [(bad[i][:2], one.status_code, one.text[:200]) for i, one in enumerate(answers) if one.status_code not in (200, 400)]
    assert odd == []
    passed = {bad[i][1] for i, one in enumerate(answers) if one.status_code == 200}
    assert not passed & {"n", "seed", "messages", "tools", "max_output_tokens"}
    for field in ("temperature", "top_p", "top_k", "n", "seed", "messages", "tools", "tool_choice", "max_tokens"):
        told = [one for i, one in enumerate(answers) if bad[i][1] == field and one.status_code == 400]
        assert told and all(one.json()["error"]["message"] for one in told), field


@asynccontextmanager
async def held(renderer: Any, **options: Any) -> AsyncIterator[tuple[str, int, dict[str, str]]]:
    """An endpoint over no engine: for requests that never reach one."""
    async with Endpoint(None, renderer, **options) as server:  # type: ignore[arg-type]
        access = server.open("s")
        yield access.openai_url, httpx.URL(access.openai_url).port or 0, {"authorization": f"Bearer {access.key}"}


ELSEWHERE = ("evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example:80", "")
WHO: dict[int, list[dict[str, str]]] = {
    400: [{}, {"host": "localhost"}, {"host": "LOCALHOST:80"}, {"sec-fetch-site": "same-origin"}],
    401: [{"authorization": "Bearer none"}],
    403: [{"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
          *({"host": host} for host in ELSEWHERE)],
}  # fmt: skip


async def test_who_may_ask(engine_parts: Any) -> None:
    async with held(engine_parts[1]) as (url, port, key), httpx.AsyncClient() as client:
        for status, headers in [(status, headers) for status, each in WHO.items() for headers in each]:
            answer = await client.post(f"{url}/chat/completions", headers={**key, **headers}, content=b"{}")
            assert answer.status_code == status and "error" in answer.json(), (headers, answer.text)
        # A length is believed before anything of the body has come.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        line = f"POST {httpx.URL(url).path}/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        writer.write(f"{line}authorization: {key['authorization']}\r\ncontent-length: 99999999999\r\n\r\n".encode())
        assert b" 413 " in await reader.readline()
        writer.close()


async def test_a_large_body_is_refused_before_it_is_in_memory(engine_parts: Any) -> None:
    """In pieces without a length, so that only what arrived can be counted."""
    sent = 0

    async def pieces() -> Any:
        nonlocal sent
        for _ in range(200):
            sent += 1 << 16
            yield b"[" * (1 << 16)

    async with held(engine_parts[1], max_body=1 << 18) as (url, _, key), httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/chat/completions", headers=key, content=pieces())
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
        many = b'{"messages":[' + b"{}," * 80_000 + b"{}]}"
        answer = await client.post(f"{url}/chat/completions", headers=key, content=many)
        assert answer.status_code == 400 and len(many) < 1 << 18


async def test_connections_that_do_not_go_on_are_closed(engine_parts: Any, monkeypatch: Any) -> None:
    """Half a line, half the headers, half a body, a byte at a time; an answered connection and one whose turn is sampled stay."""
    for name, value in (("CHECK_S", 0.05), ("HEADERS_S", 0.5), ("BODY_GRACE_S", 0.5), ("BODY_RATE", 1 << 20)):
        monkeypatch.setattr(serving, name, value)
    async with held(engine_parts[1]) as (url, port, key):
        line = f"POST {httpx.URL(url).path}/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode()
        head = line + f"authorization: {key['authorization']}\r\ncontent-length: 1000\r\n\r\n".encode()
        starts = [b"", b"PO", line, line + b"x-a: b\r\n", head, head + b"{"]
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5 * len(starts) + 3)]
        slow, answered = opened[-3:-1], opened[-1]
        for i, (_, writer) in enumerate(opened[:-3]):
            writer.write(starts[i % len(starts)])
        slow[0][1].write(line)
        slow[1][1].write(head)
        answered[1].write(line + b"content-length: 0\r\n\r\n")
        for _ in range(16):
            await asyncio.sleep(0.05)
            for (_, writer), byte in zip(slow, (b"x", b" "), strict=True):
                writer.write(byte)
        await asyncio.sleep(0.2)
        assert [reader.at_eof() or reader.exception() is not None for reader, _ in opened[:-1]] == [True] * (len(opened) - 1)
        assert b"401" in await answered[0].read(20)
        assert not answered[0].at_eof()  # kept alive, as clients expect
        for _, writer in opened:
            writer.close()


async def test_headers_have_an_end(engine_parts: Any) -> None:
    async with held(engine_parts[1]) as (url, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {httpx.URL(url).path}/models HTTP/1.1\r\nhost: 127.0.0.1\r\n".encode())
        with pytest.raises(OSError):
            for _ in range(100):
                writer.write(b"x-a: " + b"a" * 8000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
            await reader.readexactly(1)
        writer.close()


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
    try:
        wire.read(exchange_of(body))
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

    def messages(wire: Wire, rows: list[dict[str, Any]]) -> Any:
        body = {"input": rows} if wire is RESPONSES else {"messages": rows, "max_tokens": 9}
        return wire.read(exchange_of(body)).messages

    ask = {"role": "user", "content": "q"}
    part = {"type": "refusal", "refusal": "no"}
    for said in ({"content": None, "refusal": "no"}, {"content": [part]}, {"content": "no", "refusal": None}):
        assert messages(CHAT, [ask, {"role": "assistant", **said}, ask])[1].content == "no"
    assert messages(RESPONSES, [ask, {"role": "assistant", "content": [part]}, ask])[1].content == "no"
    for wire, rows in [
        (CHAT, [{"role": "user", "content": None}]),
        (CHAT, [ask, {"role": "assistant"}, ask]),
        (CHAT, [{"role": "user", "content": [{"type": "text"}]}]),
        (RESPONSES, [{"role": "user", "content": None}]),
        (ANTHROPIC, [{"role": "user", "content": None}]),
        (ANTHROPIC, [{"role": "user", "content": [{"type": "text"}]}]),
    ]:
        with pytest.raises(RequestError, match=r"\[\d\]\.content.*: expected text"):
            messages(wire, rows)
    call = {"type": "function_call", "call_id": "c", "name": "get", "arguments": "{}"}
    thoughts = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in ("one ", "two")]
    result = [{"type": "function_call_output", "call_id": c, "output": "t"} for c in "cd"]
    found = messages(RESPONSES, [ask, thoughts[0], call, thoughts[1], {**call, "call_id": "d"}, *result])
    assert found[1].reasoning == "one two"


async def test_a_start_that_is_cancelled_serves_nothing_and_lets_go_of_its_socket() -> None:
    server, listener = serving.LocalServer(), serving.open_listener("127.0.0.1", 0)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.serve(None, "127.0.0.1", listener), 0.001)
    assert listener.fileno() == -1 and [task for task in asyncio.all_tasks() if "LocalServer" in task.get_name()] == []
