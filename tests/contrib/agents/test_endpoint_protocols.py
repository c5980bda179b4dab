"""OpenAI's responses and Anthropic's messages, driven by their real clients."""

import json
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from agentrl.contrib.agents.endpoint import Endpoint
from agentrl.data.trajectory import Message, ToolCall
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.rollout.engine import Generation, Sampling, Usage
from agentrl.utils.errors import EngineError, PromptTooLongError
from tests.conftest import proof
from tests.contrib.agents.test_endpoint import ROWS, Breaks, Scripted, bearer, call, client_of, posted
from tests.contrib.agents.test_endpoint import embedded as embedded  # the fixtures
from tests.contrib.agents.test_endpoint import renderer as renderer
from tests.lazily import anthropic, openai

from tests.render.render_conversations import TOOLS  # isort: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded_with_calls(model_folder, tokenizer):
    """It draws no text that begins like a reasoning, which a random model would not end."""
    begins = [i for i in range(6, 342) if tokenizer.decode([i]).startswith("<")]
    engine = EmbeddedEngine(model_folder, device="cpu", unused=[*begins, *range(342, 400)])
    await engine.start()
    yield engine
    await engine.close()


RESPONSE_TOOLS = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS = [
    {"name": tool["function"]["name"], "description": "d", "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]
SCRIPT = [
    Message("assistant", "Both.", (ToolCall("get", {"key": "a"}), ToolCall("get", {"key": "ä"}))),
    call("get", key="c"),
    Message("assistant", "done"),
]


def anthropic_of(server, session="s"):
    access = server.open(session)
    return anthropic.AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key, max_retries=0)


def one_ledger(renderer, session, question, tools):
    """That a session is the episode of SCRIPT, with the tools' answers, as one ledger."""
    (ledger,) = session.ledgers
    ids = renderer.start(question, tools)
    for turn, keys in zip(SCRIPT, ("aä", "c", ""), strict=True):
        ids += renderer.assistant(turn)
        ids += renderer.extend("stop", [Message("tool", f"value of {key}") for key in keys]) if keys else []
    assert ledger.ids() == ids
    sampled = [i for turn in SCRIPT for i in renderer.assistant(turn)]
    assert ledger.token_ids[ledger.sampled].tolist() == sampled
    assert [turn.message.content for turn in session.turns] == ["Both.", "", "done"]


async def response_agent(client, *, named, stream=False):
    """An agent over responses; it sends its history whole, or names the response that it continues."""
    items: list[Any] = [{"role": "user", "content": "Go."}]
    fresh, before = items, None
    while True:
        asked: dict[str, Any] = {"model": "policy", "tools": RESPONSE_TOOLS, "instructions": "Be brief.", "temperature": 1.0}
        asked |= {"input": fresh, "previous_response_id": before} if named else {"input": items}
        if stream:
            async with client.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer
        fresh, before = [], answer.id
        for item in calls:
            said = f"value of {json.loads(item.arguments)['key']}"
            fresh.append({"type": "function_call_output", "call_id": item.call_id, "output": said})
        items += [item.model_dump(exclude_none=True) for item in answer.output] + fresh


@pytest.mark.parametrize(
    ("named", "stream"),
    [(False, True), (True, False), pytest.param(False, False, marks=proof), pytest.param(True, True, marks=proof)],
)
async def test_an_agent_over_responses_is_one_ledger(renderer, named, stream):
    async with Endpoint(Scripted(renderer, SCRIPT), renderer) as server, client_of(server) as client:
        answer = await response_agent(client, named=named, stream=stream)
        session = await server.take("s")
    assert (answer.output_text, answer.status) == ("done", "completed")
    assert answer.usage.output_tokens == session.turns[-1].sampled_tokens
    one_ledger(renderer, session, [Message("system", "Be brief."), Message("user", "Go.")], TOOLS)


class Billed(Scripted):
    """As an API model: its ids are no tokens, and a provider counts and charges."""

    async def generate(self, *given: Any) -> Generation:
        return replace(await super().generate(*given), usage=Usage(1000, 70, 0.25))


async def test_turns_and_clients_have_the_count_of_the_provider(renderer):
    engine = Billed(renderer, [Message("assistant", "done")] * 3)
    async with Endpoint(engine, renderer) as server, client_of(server) as client, anthropic_of(server, "t") as claude:
        chat = await client.chat.completions.create(model="policy", messages=ROWS)
        answer = await client.responses.create(model="policy", input="q")
        said = await claude.messages.create(model="policy", max_tokens=77, messages=ROWS)
        turns = [turn for name in "st" for turn in (await server.take(name)).turns]
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (1000, 70, 1070)
    for usage in (answer.usage, said.usage):
        assert (usage.input_tokens, usage.output_tokens) == (1000, 70)
    assert [(turn.prompt_tokens, turn.sampled_tokens, turn.usd) for turn in turns] == [(1000, 70, 0.25)] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_over_anthropic_s_messages_is_one_ledger(renderer, stream):
    engine = Scripted(renderer, SCRIPT)
    async with Endpoint(engine, renderer) as server, anthropic_of(server) as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]
        while True:
            asked: dict[str, Any] = {"model": "policy", "max_tokens": 77, "system": "Be brief.", "tools": CLAUDE_TOOLS}
            asked["messages"] = messages
            if stream:
                async with client.messages.stream(**asked) as events:
                    texts = [text async for text in events.text_stream]
                    answer = await events.get_final_message()
                assert "".join(texts) == "".join(block.text for block in answer.content if block.type == "text")
            else:
                answer = await client.messages.create(**asked)
            calls = [block for block in answer.content if block.type == "tool_use"]
            messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
            if not calls:
                break
            assert answer.stop_reason == "tool_use"
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": f"value of {block.input['key']}"} for block in calls
            ]
            messages.append({"role": "user", "content": results})
        session = await server.take("s")
    assert (answer.content[0].text, answer.stop_reason) == ("done", "end_turn")
    assert answer.usage.input_tokens == session.turns[-1].prompt_tokens
    assert answer.usage.output_tokens == session.turns[-1].sampled_tokens
    assert {sampling.max_tokens for sampling in engine.samplings} == {77}
    one_ledger(renderer, session, [Message("system", "Be brief."), Message("user", "Go.")], TOOLS)


async def test_one_conversation_over_three_protocols_is_one_ledger(renderer):
    """What a history means does not depend on the protocol that carries it."""
    engine = Scripted(renderer, [Message("assistant", text) for text in ("one", "two", "three")])
    async with Endpoint(engine, renderer) as server:
        access = server.open("s")
        rows: list[Any] = [{"role": "user", "content": "q"}]
        async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
            await client.chat.completions.create(model="policy", messages=rows)
            rows += [{"role": "assistant", "content": "one"}, {"role": "user", "content": "r"}]
            await client.responses.create(model="policy", input=rows)
        rows += [{"role": "assistant", "content": " two\n"}, {"role": "user", "content": "s"}]
        async with anthropic.AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key) as claude:
            await claude.messages.create(model="policy", max_tokens=9, messages=rows)
        session = await server.take("s")
    assert [message.content for message in session.messages] == ["q", "one", "r", " two\n", "s", "three"]
    assert len(session.ledgers) == 1 and len(session.turns) == 3


async def test_anthropic_s_errors_have_their_own_form(renderer):
    engine = Scripted(renderer, [EngineError("the replica died"), PromptTooLongError("no room"), Message("assistant", "a b")])
    async with Endpoint(engine, renderer, max_body=2048) as server, anthropic_of(server) as client:
        create: Any = client.messages.create
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": ROWS}
        with pytest.raises(anthropic.InternalServerError, match="replica died"):
            await create(**asked)
        with pytest.raises(anthropic.BadRequestError, match="no room"):
            await create(**asked)
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        for change, reason in [
            ({"messages": [{"role": "user", "content": [image]}]}, r"messages\[0\].content\[0\]: expected text"),
            ({"messages": [*ROWS, {"role": "assistant", "content": "I"}]}, "the last one must be the user's"),
            ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking: not supported"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]: only tools of the client's own"),
            ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": CLAUDE_TOOLS}, "tool_choice: expected"),
            ({"stop_sequences": ["x"]}, "stop_sequences: Scripted does not know"),
            ({"max_tokens": 0}, "max_tokens: expected"),
        ]:
            with pytest.raises(anthropic.BadRequestError, match=reason):
                await create(**{**asked, **change})
        wrong = client.copy(api_key="another")
        with pytest.raises(anthropic.AuthenticationError, match="not this session's"):
            await wrong.messages.create(**asked)
        with pytest.raises(anthropic.RequestTooLargeError):
            await create(**{**asked, "system": "x" * 4096})
        access_of = client.copy(base_url=str(client.base_url).rstrip("/").removesuffix("/s") + "/gone")
        with pytest.raises(anthropic.NotFoundError, match="no such session"):
            await access_of.messages.create(**asked)
        assert len(engine.prompts) == 2
        kept = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}  # as Claude Code sends it
        assert (await create(**asked, thinking={"type": "adaptive"}, extra_body=kept)).content[0].text == "a b"
        engine.turns = []
    engine = Breaks(renderer, [Message("assistant", "only the begin")])
    async with Endpoint(engine, renderer) as server, anthropic_of(server) as client:
        with pytest.raises(anthropic.APIStatusError, match="the replica died"):
            async with client.messages.stream(model="policy", max_tokens=9, messages=ROWS) as events:
                await events.get_final_message()


async def test_responses_refuse_by_name_and_forget_nothing_of_another_session(renderer):
    engine = Scripted(renderer, [Message("assistant", "mine"), Message("assistant", "x")])
    async with Endpoint(engine, renderer) as server, client_of(server) as client, client_of(server, "other") as other:
        first = await client.responses.create(model="policy", input="q")
        unkept = await client.responses.create(model="policy", input="q", store=False)
        for who, name in ((other, first.id), (client, unkept.id), (client, "resp_0")):
            with pytest.raises(openai.BadRequestError, match=r"no response '.*' in this session") as failed:
                await who.responses.create(model="policy", input="more", previous_response_id=name)
            assert failed.value.code == "previous_response_not_found"
        create: Any = client.responses.create
        for options, reason in [
            ({"truncation": "auto"}, "truncation: only 'disabled'"),
            ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: only tools of type 'function'"),
            ({"input": []}, "input: expected text or a non-empty list"),
            ({"input": [{"type": "computer_call_output"}]}, r"input\[0\]: items of type 'computer_call_output'"),
            ({"background": True}, "background: not supported"),
        ]:
            with pytest.raises(openai.BadRequestError, match=reason):
                await create(model="policy", **{"input": "q", **options})
        access = server.open("late")
        assert (await posted(access, {"input": "q"}, "/v1/responses", **bearer("no")))[1]["error"]["code"] == "invalid_api_key"
    engine = Breaks(renderer, [Message("assistant", "only the begin")])
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        with pytest.raises(openai.APIError, match="the replica died"):
            async with client.responses.stream(model="policy", input="q") as events:
                await events.get_final_response()


@proof
@pytest.mark.asyncio(loop_scope="module")
async def test_streams_of_every_protocol_tell_the_same_text_token_by_token(embedded, renderer):
    said, pieces = {}, {}
    async with Endpoint(embedded, renderer, sampling=Sampling(max_tokens=60)) as server:
        for name in ("chat", "responses", "anthropic"):
            access = server.open(name, seed=2)
            async with openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key) as client:
                if name == "chat":
                    stream = await client.chat.completions.create(model="policy", messages=ROWS, stream=True)
                    pieces[name] = [chunk.choices[0].delta.content or "" async for chunk in stream]
                if name == "responses":
                    events = [event async for event in await client.responses.create(model="policy", input=ROWS, stream=True)]
                    pieces[name] = [event.delta for event in events if event.type == "response.output_text.delta"]
                    assert [event.sequence_number for event in events] == list(range(len(events)))
                    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "".join(pieces[name])
            if name == "anthropic":
                claude = anthropic.AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key)
                async with claude, claude.messages.stream(model="policy", max_tokens=99, messages=ROWS) as told:
                    pieces[name] = [text async for text in told.text_stream]
                    assert (await told.get_final_message()).stop_reason == "max_tokens"
            said[name] = (await server.take(name)).messages[-1].content
    assert said["chat"] == said["responses"] == said["anthropic"] != ""
    for name, parts in pieces.items():
        assert "".join(parts) == said[name] and sum(map(bool, parts)) > 8, name


ANSWER = {
    "type": "object",
    "properties": {"key": {"enum": ["a", "b"]}, "sure": {"type": "boolean"}},
    "required": ["key", "sure"],
    "additionalProperties": False,
}


PLACE = {"properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": {"enum": ["top", "end"]}}, "required": ["at"]}
CLOSED = {"type": "object", "additionalProperties": False}
PICK: Any = {"type": "function", "function": {"name": "pick", "parameters": {**CLOSED, **PLACE}}}
STAY: Any = {"type": "function", "function": {"name": "stay", "parameters": CLOSED}}


@proof
@pytest.mark.asyncio(loop_scope="module")
async def test_answers_are_constrained_where_a_client_asks_for_it(embedded_with_calls, renderer):
    """JSON of a schema, and calls that must be made, over each protocol; from a model of random weights."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
    named = {"type": "json_schema", "name": "answer", "schema": ANSWER}
    async with Endpoint(embedded_with_calls, renderer, sampling=Sampling(max_tokens=120)) as server:
        access = server.open("s", seed=6)
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        claude = anthropic.AsyncAnthropic(base_url=access.anthropic_url, api_key=access.key)
        async with client, claude:
            chat: Any = client.chat.completions.create
            respond: Any = client.responses.create
            message: Any = claude.messages.create
            said = [
                (await chat(model="p", messages=ROWS, response_format=form)).choices[0].message.content,
                (await respond(model="p", input="q", text={"format": named})).output_text,
                (await message(model="p", max_tokens=99, messages=ROWS, output_config={"format": named})).content[0].text,
            ]
            for seed in range(4):  # with tools an answer may also be a call
                either = (await chat(model="p", messages=ROWS, response_format=form, tools=[PICK], seed=seed)).choices[0].message
                calls = either.tool_calls or []
                assert bool(calls) == (either.content is None)
                assert all(json.loads(one.function.arguments)["at"] in ("top", "end") for one in calls)
                said += [] if calls else [either.content]
            for text in said:
                found = json.loads(text)
                assert found["key"] in ("a", "b") and isinstance(found["sure"], bool) and len(found) == 2
            for choice, may in (("required", {"pick", "stay"}), ({"type": "function", "function": {"name": "stay"}}, {"stay"})):
                answer = (await chat(model="p", messages=ROWS, tools=[PICK, STAY], tool_choice=choice)).choices[0]
                assert answer.message.content is None and {one.function.name for one in answer.message.tool_calls} <= may
            assert len(answer.message.tool_calls) == 1 and answer.finish_reason == "tool_calls"
            tools = [{"name": "pick", "input_schema": PICK["function"]["parameters"]}]
            for kind in ({"type": "tool", "name": "pick"}, {"type": "any", "disable_parallel_tool_use": True}):
                used = await message(model="p", max_tokens=99, messages=ROWS, tools=tools, tool_choice=kind)
                assert [(block.type, block.name) for block in used.content] == [("tool_use", "pick")]
                assert used.stop_reason == "tool_use" and used.content[0].input["at"] in ("top", "end")
            bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
            with pytest.raises(openai.BadRequestError, match=r"response_format: .*nonsense"):
                await chat(model="p", messages=ROWS, response_format=bad)
        ledgers = (await server.take("s")).ledgers
    assert all(ledger.logprobs[ledger.sampled].min() < -2 for ledger in ledgers), "as the policy has them, not renormalized"


async def test_at_most_one_call_a_turn(renderer, tokenizer):
    """parallel_tool_calls = false ends sampling with the first call, and the turn goes on from it."""
    two = Message("assistant", "", (ToolCall("get", {"key": "a"}), ToolCall("get", {"key": "b"})))
    ids = renderer.assistant(two)

    class Says(Scripted):
        """Stops as an engine that knows its text does."""

        def refusal(self, sampling):
            return ""

        async def generate(self, token_ids, sampling, request_key):
            found = await super().generate(token_ids, sampling, request_key)
            for count in range(1, len(found.token_ids) + 1):
                if any(stop in tokenizer.decode(found.token_ids[:count]) for stop in sampling.stop):
                    ids, logprobs, versions = found.token_ids[:count], found.logprobs[:count], found.versions[:count]
                    return Generation(ids, logprobs, versions, "stop_string")
            return found

    engine = Says(renderer, [two, two, Message("assistant", "end")])
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        chat: Any = client.chat.completions.create
        both = (await chat(model="p", messages=ROWS, tools=TOOLS)).choices[0].message
        assert len(both.tool_calls) == 2 and engine.samplings[0].stop == ()
        answer = (await chat(model="p", messages=ROWS, tools=TOOLS, parallel_tool_calls=False)).choices[0]
        assert [one.function.arguments for one in answer.message.tool_calls] == ['{"key": "a"}']
        assert answer.finish_reason == "tool_calls"
        follow = [*ROWS, answer.message.model_dump(exclude_none=True)]
        follow += [{"role": "tool", "tool_call_id": answer.message.tool_calls[0].id, "content": "1"}]
        await chat(model="p", messages=follow, tools=TOOLS, parallel_tool_calls=False)
        session = await server.take("s")
    cut = next(n for n in range(len(ids)) if "</tool_call>" in tokenizer.decode(ids[:n]))
    prompt = renderer.start([Message("user", "q")], TOOLS)
    suffix = renderer.extend("stop_string", [Message("tool", "1", name="get")])
    assert session.ledgers[1].ids() == [*prompt, *ids[:cut], *suffix, *renderer.assistant(Message("assistant", "end"))]
