"""The OpenAI-compatible server, driven by the real openai client."""

import asyncio
import json
import sys
from pathlib import Path

import openai
import pytest
import torch
from engine_models import forward_logprobs, load

from agentrl.backends.embedded.engine import EmbeddedEngine
from agentrl.backends.openai.server import OpenAiServer
from agentrl.errors import EngineError, ResourceError
from agentrl.render import make_renderer
from agentrl.render.chatml import CHATML_TEMPLATE
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.trajectory import Message, ToolCall

sys.path.append(str(Path(__file__).parent.parent / "render"))
from render_conversations import TOOLS
from render_tokenizers import CONTROL_TOKENS, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(CONTROL_TOKENS, CHATML_TEMPLATE)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return make_renderer(tokenizer)


class Scripted(Engine):
    """Answers with the given turns in order and keeps the prompts it saw."""

    def __init__(self, renderer, turns):
        self.turns = [renderer.assistant(turn) if isinstance(turn, Message) else turn for turn in turns]
        self.prompts = []

    async def generate(self, token_ids, sampling, request_key):
        self.prompts.append(list(token_ids))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        await asyncio.sleep(0.01)
        return Generation(turn, [-0.5] * len(turn), [3] * len(turn), "stop")

    async def start(self): ...
    async def abort(self, request_key): ...
    async def close(self): ...
    async def stats(self):
        return EngineStats()


def client_of(server, session="s"):
    return openai.AsyncOpenAI(base_url=server.url(session), api_key="unused", max_retries=0)


def call(name, **arguments):
    return Message("assistant", "", (ToolCall(name, arguments),))


async def agent_loop(client, question):
    """An agent as anybody would write it, which knows nothing of agentrl."""
    messages = [{"role": "user", "content": question}]
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for item in message.tool_calls:
            key = json.loads(item.function.arguments)["key"]
            messages.append({"role": "tool", "tool_call_id": item.id, "content": f"value of {key}"})


async def test_an_agent_with_tools_becomes_one_ledger(renderer):
    turns = [call("get", key="a"), call("get", key="b"), Message("assistant", "done")]
    engine = Scripted(renderer, turns)
    async with OpenAiServer(engine, renderer) as server, client_of(server) as client:
        assert await agent_loop(client, "Go.") == "done"
        (ledger,) = server.take("s").ledgers
        assert server.take("s").ledgers == []
    ids, sampled = ledger.ids(), ledger.sampled
    assert ids[sampled.argmax() :] and ids[: len(engine.prompts[-1])] == engine.prompts[-1]
    assert [i for i, flag in zip(ids, sampled, strict=True) if flag] == [i for turn in turns for i in renderer.assistant(turn)]
    assert set(ledger.versions[sampled]) == {3} and set(ledger.logprobs[sampled]) == {-0.5}
    assert set(ledger.turns[sampled]) == {0, 1, 2}
    expected = renderer.start([Message("user", "Go.")], TOOLS)
    for turn, key in zip(turns, "ab", strict=False):
        expected += renderer.assistant(turn) + renderer.extend("stop", [Message("tool", f"value of {key}")])
    assert ids == expected + renderer.assistant(turns[2])


async def test_edited_history_and_parallel_requests_fork(renderer):
    engine = Scripted(renderer, [Message("assistant", text) for text in ("one", "two", "three", "four")])
    async with OpenAiServer(engine, renderer) as server, client_of(server) as client:
        first = [{"role": "user", "content": "q"}]
        await client.chat.completions.create(model="policy", messages=first)
        follow = [*first, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
        edited = [*first, {"role": "assistant", "content": "changed"}, {"role": "user", "content": "more"}]
        await asyncio.gather(
            client.chat.completions.create(model="policy", messages=follow),
            client.chat.completions.create(model="policy", messages=follow),
        )
        await client.chat.completions.create(model="policy", messages=edited)
        ledgers = server.take("s").ledgers
    assert len(ledgers) == 3
    sampled = [i for ledger in ledgers for i in ledger.token_ids[ledger.sampled].tolist()]
    every = [i for text in ("one", "two", "three", "four") for i in renderer.assistant(Message("assistant", text))]
    assert sorted(sampled) == sorted(every)


# Shows the list of tools before the last message of a user, wherever it stands; drops reasoning before it.
MOVES = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' and loop.index0 == ns.last and tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}
{{- '<|im_start|>' + m.role + ' ' }}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""  # noqa: E501


@pytest.mark.parametrize("reasoning", ["so", None])
async def test_a_client_s_conversation_forks_where_the_template_rewrites_it(reasoning):
    tokenizer = build_tokenizer([*CONTROL_TOKENS, "<think>", "</think>"], MOVES)
    renderer = make_renderer(tokenizer)
    turns = [
        Message("assistant", "", (ToolCall("get", {"key": "a"}),), reasoning=reasoning),
        *(Message("assistant", w) for w in "xy"),
    ]
    engine = Scripted(renderer, turns)
    async with OpenAiServer(engine, renderer) as server, client_of(server) as client:
        rows = [{"role": "user", "content": "q"}]
        answers = [{"role": "tool", "content": "7"}, {"role": "user", "content": "more"}]
        for answer in [*answers, None]:
            reply = (await client.chat.completions.create(model="policy", messages=rows, tools=TOOLS)).choices[0].message
            rows.append(reply.model_dump(exclude_none=True))
            if answer is not None:
                ids = {"tool_call_id": reply.tool_calls[0].id} if reply.tool_calls else {}
                rows.append({**answer, **ids})
        ledgers = server.take("s").ledgers
    assert [sum(ledger.sampled) for ledger in ledgers] == [
        sum(len(renderer.assistant(turn)) for turn in part) for part in (turns[:2], turns[2:])
    ]
    last = tokenizer.decode(engine.prompts[-1])
    assert last.count("<|im_start|>tools") == 1 and last.index("tools") > last.index("q<|im_end|>") and "so</think>" not in last
    assert tokenizer.decode(engine.prompts[1]).count("so</think>") == (1 if reasoning else 0)


async def test_sessions_do_not_mix(renderer):
    engine = Scripted(renderer, [Message("assistant", str(i)) for i in range(8)])
    async with OpenAiServer(engine, renderer) as server:
        clients = [client_of(server, f"e{i}") for i in range(8)]
        rows = [{"role": "user", "content": "same"}]
        await asyncio.gather(*(c.chat.completions.create(model="policy", messages=rows) for c in clients))
        counts = [len(server.take(f"e{i}").ledgers) for i in range(8)]
        for client in clients:
            await client.close()
    assert counts == [1] * 8


async def test_streaming_clients_work(renderer):
    engine = Scripted(renderer, [Message("assistant", "look", (ToolCall("get", {"key": "a"}),))])
    async with OpenAiServer(engine, renderer) as server, client_of(server) as client:
        rows = [{"role": "user", "content": "q"}]
        stream = await client.chat.completions.create(model="policy", messages=rows, tools=TOOLS, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[0].delta.content == "look"
    assert chunks[0].delta.tool_calls[0].function.name == "get"
    assert chunks[-1].finish_reason == "tool_calls"


async def test_real_engine_logprobs_are_recorded(model_folder, renderer):
    engine = EmbeddedEngine(model_folder, device="cpu")
    await engine.start()
    sampling = Sampling(max_tokens=24, seed=5)
    async with OpenAiServer(engine, renderer, sampling=sampling) as server, client_of(server) as client:
        rows = [{"role": "user", "content": "q"}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=rows)
            assert answer.usage.completion_tokens <= 24
            rows += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
        ledgers = server.take("s").ledgers
    await engine.close()
    model = load(model_folder)
    for ledger in ledgers:
        ids = ledger.ids()
        expected = torch.cat([torch.zeros(1), forward_logprobs(model, ids[:1], ids[1:])])
        mask = torch.tensor(ledger.sampled)
        assert (expected[mask] - torch.tensor(ledger.logprobs)[mask]).abs().max() < 1e-4


async def test_a_stop_string_ends_the_turn_and_the_record_keeps_what_was_sampled(tokenizer, renderer):
    said = Message("assistant", "Thought: look.\nObservation: made up\nAnswer: 9")
    engine = Scripted(renderer, [said, Message("assistant", "Answer: 7")])
    first = [{"role": "user", "content": "q"}]
    async with OpenAiServer(engine, renderer, decode=tokenizer.decode) as server, client_of(server) as client:
        create = client.chat.completions.create
        answer = (await create(model="policy", messages=first, stop=["Observation:", "nowhere"])).choices[0]
        assert answer.message.content == "Thought: look.\n" and answer.finish_reason == "stop"
        follow = [*first, answer.message.model_dump(exclude_none=True), {"role": "user", "content": "Observation: 7"}]
        last = await create(model="policy", messages=follow, stop="never said", logprobs=True)
        (ledger,) = server.take("s").ledgers
    whole = renderer.assistant(said)
    sampled = ledger.token_ids[ledger.sampled & (ledger.turns == 0)].tolist()
    assert sampled == whole[: len(sampled)] and len(sampled) < len(whole)
    assert "Observation:" in tokenizer.decode(sampled) and "Observation:" not in tokenizer.decode(sampled[:-1])
    # the next prompt is what the model sampled, closed, and goes on from there: nothing of the rest is in it
    assert engine.prompts[1] == [*engine.prompts[0], *sampled, *renderer.extend("length", [Message("user", "Observation: 7")])]
    assert last.choices[0].message.content == "Answer: 7"
    table = last.choices[0].logprobs.content
    assert "".join(entry.token for entry in table) == tokenizer.decode(renderer.assistant(Message("assistant", "Answer: 7")))
    assert {entry.logprob for entry in table} == {-0.5} and table[0].bytes == list(table[0].token.encode())
    assert last.usage.completion_tokens == len(table)


async def test_usage_and_logprobs_come_with_a_stream_too(tokenizer, renderer):
    engine = Scripted(renderer, [Message("assistant", "yes")])
    async with OpenAiServer(engine, renderer, decode=tokenizer.decode) as server, client_of(server) as client:
        rows = [{"role": "user", "content": "q"}]
        stream = await client.chat.completions.create(
            model="policy", messages=rows, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
    assert len(chunks[0].choices[0].logprobs.content) == chunks[-1].usage.completion_tokens > 0
    assert chunks[-1].choices == [] and chunks[-2].choices[0].finish_reason == "stop"


async def test_what_cannot_be_done_is_refused_by_name(renderer):
    engine = Scripted(renderer, [EngineError("the replica died")])
    rows = [{"role": "user", "content": "q"}]
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    async with OpenAiServer(engine, renderer) as server, client_of(server) as client:
        create = client.chat.completions.create
        for options, reason in [
            ({"n": 2}, "n: only 1"),
            ({"logprobs": True}, "logprobs: not supported by this server: it was made without a tokenizer"),
            ({"logprobs": True, "top_logprobs": 3}, "top_logprobs: only 0"),
            ({"stop": ["x"]}, "stop: not supported by this server"),
            ({"stop": [""]}, "stop: expected a string"),
            ({"frequency_penalty": 1.0}, "not supported: frequency_penalty"),
            ({"tool_choice": "required"}, "tool_choice"),
        ]:
            with pytest.raises(openai.BadRequestError, match=reason):
                await create(model="policy", messages=rows, **options)
        with pytest.raises(openai.BadRequestError, match="expected text"):
            await create(model="policy", messages=image)
        with pytest.raises(openai.InternalServerError, match="replica died"):
            await create(model="policy", messages=rows)
        assert (await client.models.list()).data[0].id == "policy"
        assert server.take("s").ledgers == []
        with pytest.raises(ResourceError, match="cannot listen"):
            await OpenAiServer(engine, renderer, port=server._port).start()
