"""The endpoint, driven by the real openai client over chat completions."""

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import pytest
import pytest_asyncio

from agentrl.contrib.agents.endpoint import Endpoint
from agentrl.data.trajectory import Message, ToolCall
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.render import make_renderer
from agentrl.rollout.engine import Generation, Sampling
from agentrl.utils.errors import EngineError, PromptTooLongError, ResourceError
from tests.lazily import openai
from tests.players import Still
from tests.render.render_conversations import TOOLS
from tests.render.render_tokenizers import CONTROL_TOKENS, build_tokenizer


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return make_renderer(tokenizer)


class Scripted(Still):
    """Answers with the given turns in order and keeps the prompts it saw."""

    def __init__(self, renderer, turns):
        self.samplings = []
        self.turns = [renderer.assistant(turn) if isinstance(turn, Message) else turn for turn in turns]
        self.prompts = []

    async def generate(self, token_ids, sampling, request_key):
        self.prompts.append(list(token_ids))
        self.samplings.append(sampling)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        await asyncio.sleep(0.01)
        return Generation(turn, [-0.5] * len(turn), [3] * len(turn), "stop")


def client_of(server, session="s", **options):
    access = server.open(session, **options)
    return openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key, max_retries=0)


ROWS: Any = [{"role": "user", "content": "q"}]


def call(name, **arguments):
    return Message("assistant", "", (ToolCall(name, arguments),))


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
    first = Message("assistant", "", (ToolCall("get", {"key": "a"}),), reasoning=reasoning)
    turns = [first, *(Message("assistant", w) for w in "xy")]
    engine = Scripted(renderer, turns)
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        rows = [{"role": "user", "content": "q"}]
        answers = [{"role": "tool", "content": "7"}, {"role": "user", "content": "more"}]
        for answer in [*answers, None]:
            reply = (await client.chat.completions.create(model="policy", messages=rows, tools=TOOLS)).choices[0].message
            rows.append(reply.model_dump(exclude_none=True))
            if answer is not None:
                ids = {"tool_call_id": reply.tool_calls[0].id} if reply.tool_calls else {}
                rows.append({**answer, **ids})
        ledgers = (await server.take("s")).ledgers
    lengths = [len(renderer.assistant(turn)) for turn in turns]
    assert [sum(ledger.sampled) for ledger in ledgers] == [sum(lengths[:2]), lengths[2]]
    last = tokenizer.decode(engine.prompts[-1])
    assert last.count("<|im_start|>tools") == 1 and last.index("tools") > last.index("q<|im_end|>") and "so</think>" not in last
    assert tokenizer.decode(engine.prompts[1]).count("so</think>") == (1 if reasoning else 0)


async def streamed(client, **options):
    """The chunks of a streamed completion, and per choice: its text, its calls, why it ended, its logprobs."""
    create: Any = client.chat.completions.create
    chunks = [chunk async for chunk in await create(model="policy", stream=True, **options)]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"pieces": [], "calls": [], "finish": None, "logprobs": []})
            choice["pieces"] += [part.delta.content] if part.delta.content else []
            choice["calls"] += part.delta.tool_calls or []
            choice["finish"] = part.finish_reason or choice["finish"]
            choice["logprobs"] += part.logprobs.content if part.logprobs else []
    return chunks, choices


async def test_a_stream_holds_calls_back_until_their_turn_is_over(renderer):
    engine = Scripted(renderer, [Message("assistant", "look", (ToolCall("get", {"key": "a"}), ToolCall("list", {})))])
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        _, choices = await streamed(client, messages=ROWS, tools=TOOLS)
        calls = [(call.index, call.function.name, call.function.arguments) for call in choices[0]["calls"]]
        assert calls == [(0, "get", '{"key": "a"}'), (1, "list", "{}")]
        assert ("".join(choices[0]["pieces"]), choices[0]["finish"]) == ("look", "tool_calls")
        engine.turns = [EngineError("the replica died")]
        with pytest.raises(openai.InternalServerError, match="replica died"):
            await streamed(client, messages=ROWS)


class Breaks(Scripted):
    """Tells a few tokens and then fails."""

    async def stream(self, token_ids, sampling, request_key, told):
        told(self.turns[0][:2], [-0.5] * 2)
        await asyncio.sleep(0.01)
        raise EngineError("the replica died")


async def test_an_engine_that_fails_in_a_stream_ends_it_with_its_error(renderer):
    engine = Breaks(renderer, [Message("assistant", "only the begin")])
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        with pytest.raises(openai.APIError, match="the replica died"):
            await streamed(client, messages=ROWS)
        session = await server.take("s")
    assert str(session.failure) == "the replica died" and session.ledgers == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded(model_folder):
    # No tags of calls, which a stream would hold back.
    engine = EmbeddedEngine(model_folder, device="cpu", unused=[0, 2, 3, 4, 5, *range(342, 400)])
    await engine.start()
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_comes_token_by_token_and_is_the_whole_answer(embedded, renderer, tokenizer):
    """Of two choices sampled side by side: deltas are the message, begin early, and have the ledger's logprobs."""
    asked = {"messages": ROWS, "n": 2, "logprobs": True}
    async with Endpoint(embedded, renderer, sampling=Sampling(max_tokens=90), decode=tokenizer.decode) as server:
        async with client_of(server, "early", seed=1) as client:
            before, first = (await embedded.stats()).sampled_tokens, None
            create: Any = client.chat.completions.create
            async for chunk in await create(model="policy", stream=True, **asked):
                if first is None and chunk.choices[0].delta.content:
                    first = (await embedded.stats()).sampled_tokens - before
            assert first is not None and first < 40 < (await embedded.stats()).sampled_tokens - before
        async with client_of(server, "streamed", seed=1) as client:
            chunks, choices = await streamed(client, **asked, stream_options={"include_usage": True})
        session = await server.take("streamed")
        async with client_of(server, "whole", seed=1) as client:
            whole = await client.chat.completions.create(model="policy", **asked)  # type: ignore[call-overload]
    assert len(whole.choices) == len(choices) == len(session.ledgers) == 2
    for choice, ledger in zip(whole.choices, session.ledgers, strict=True):
        told = choices[choice.index]
        assert "".join(told["pieces"]) == choice.message.content and len(told["pieces"]) > 8
        assert told["finish"] == choice.finish_reason == "length"
        assert [entry.token for entry in told["logprobs"]] == [entry.token for entry in choice.logprobs.content]
        assert [entry.logprob for entry in told["logprobs"]] == pytest.approx(ledger.logprobs[ledger.sampled].tolist())
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and chunks[-2].choices[0].finish_reason == "length"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stop_string_ends_sampling_and_the_ledger_holds_what_was_sampled(embedded, renderer, tokenizer):
    """Of two tokens: the client sees the text before it, and the next prompt goes on from what was sampled."""
    ledgers = []
    async with Endpoint(embedded, renderer, sampling=Sampling(max_tokens=90)) as server:
        async with client_of(server, "free", seed=4) as client:
            said = (await client.chat.completions.create(model="policy", messages=ROWS)).choices[0].message.content
            ids = (ledger := (await server.take("free")).ledgers[0]).token_ids[ledger.sampled].tolist()
        pieces = [tokenizer.decode([number]) for number in ids]
        at = next(i for i in range(15, 80) if pieces[i].isascii() and pieces[i + 1].isascii() and pieces[i + 1].strip())
        stop = pieces[at][-1] + pieces[at + 1][0]
        count = next(n for n in range(len(ids)) if stop in tokenizer.decode(ids[:n]))
        for name in ("stopped", "streamed"):
            async with client_of(server, name, seed=4) as client:
                asked = {"messages": ROWS, "stop": [stop, "nowhere"]}
                if name == "stopped":
                    create: Any = client.chat.completions.create
                    answer = (await create(model="policy", **asked)).choices[0]
                    content, finish = answer.message.content, answer.finish_reason
                else:
                    choice = (await streamed(client, **asked))[1][0]
                    content, finish = "".join(choice["pieces"]), choice["finish"]
                assert (content, finish) == (said[: said.index(stop)], "stop")
                follow = [*ROWS, {"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
                await client.chat.completions.create(model="policy", messages=follow, max_tokens=3)
            ledgers += (await server.take(name)).ledgers
    prompt = renderer.start([Message("user", "q")], [])
    suffix = renderer.extend("stop_string", [Message("user", "go on")])
    assert len(ledgers) == 2
    for ledger in ledgers:
        assert ledger.ids()[:-3] == [*prompt, *ids[:count], *suffix]
        assert ledger.sampled.tolist() == [False] * len(prompt) + [True] * count + [False] * len(suffix) + [True] * 3


async def test_what_cannot_be_done_is_refused_by_name(renderer):
    engine = Scripted(renderer, [PromptTooLongError("no room"), EngineError("the replica died")])
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        create = client.chat.completions.create
        for options, reason in [
            ({"stream": True, "extra_body": {"stream_options": 1}}, "stream_options: expected an object"),
            ({"n": 0}, "n: expected a whole number of at least 1, got 0"),
            ({"max_tokens": "many"}, "max_tokens: expected a whole number"),
            ({"logprobs": True}, "logprobs: not supported by this server: it was made without a tokenizer"),
            ({"logprobs": True, "top_logprobs": 3}, "top_logprobs: only 0"),
            ({"stop": ["x"]}, "stop: Scripted does not know the text of its tokens"),
            ({"stop": [""]}, "stop: expected a string"),
            ({"frequency_penalty": 1.0}, "frequency_penalty: not supported"),
            ({"tool_choice": "required"}, "tool_choice"),
        ]:
            with pytest.raises(openai.BadRequestError, match=reason):
                await create(model="policy", messages=ROWS, **options)
        with pytest.raises(openai.BadRequestError, match="expected text"):
            await create(model="policy", messages=image)
        with pytest.raises(openai.BadRequestError, match="no room") as failed:
            await create(model="policy", messages=ROWS)
        assert failed.value.code == "context_length_exceeded" and server.session("s").failure is None
        with pytest.raises(openai.InternalServerError, match="replica died") as failed:
            await create(model="policy", messages=ROWS)
        assert failed.value.status_code == 503 and str(server.session("s").failure) == "the replica died"
        assert (await client.models.list()).data[0].id == "policy"
        assert server.session("s").ledgers == []
        with pytest.raises(ResourceError, match="cannot listen"):
            await Endpoint(engine, renderer, port=server._port).start()


async def posted(access, body, path="/v1/chat/completions", **headers):
    """What a POST is answered, by plain httpx: status and body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(headers=headers) as client:
        answer = await client.post(access.anthropic_url + path, content=data)
    return answer.status_code, answer.json()


async def test_a_session_opens_with_its_own_key_only(renderer):
    """Of two sessions each has a key that the other's requests are refused with; nothing of a refused request is sampled."""
    engine = Scripted(renderer, [Message("assistant", "mine")])
    body = {"model": "policy", "messages": ROWS}
    async with Endpoint(engine, renderer) as server:
        one, two = server.open("one"), server.open("two")
        assert one.key != two.key and len(one.key) > 40 and one.key not in repr(one)
        with pytest.raises(ValueError, match="'one' is open already"):
            server.open("one")
        with pytest.raises(ValueError, match="letters, digits"):
            server.open("a/b")
        wrongs = [{}, bearer(two.key), bearer(one.key[:-1]), {"authorization": "Bearer"}, {"x-api-key": two.key}]
        for wrong in (*wrongs, {"authorization": one.key}):
            status, told = await posted(one, body, **wrong)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key"), wrong
            for path in ("/s/one", "/s/one/v1/models"):
                async with httpx.AsyncClient() as client:
                    assert (await client.get(one.anthropic_url.removesuffix("/s/one") + path, headers=wrong)).status_code == 401
        assert engine.prompts == []
        for right in (bearer(one.key), {"x-api-key": one.key}):
            async with httpx.AsyncClient(headers=right) as client:
                assert (await client.get(one.anthropic_url)).json() == {"session": "one", "ledgers": []}
        gone = dataclasses.replace(one, anthropic_url=one.anthropic_url.replace("/one", "/three"))
        status, told = await posted(gone, body, **bearer(one.key))
        assert (status, told["error"]["code"]) == (404, "session_not_found")
        status, told = await posted(one, b"{", **bearer(one.key))
        assert status == 400 and told["error"]["type"] == "invalid_request_error" and "not JSON" in told["error"]["message"]
        assert (await posted(one, body, **bearer(one.key)))[0] == 200
        assert len((await server.take("one")).turns) == 1 and (await server.take("two")).turns == []
        assert (await posted(one, body, **bearer(one.key)))[0] == 404
        with pytest.raises(KeyError):
            await server.take("one")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


class Waiting(Scripted):
    """Begins an answer and never ends it; `given_up` counts those that were cancelled."""

    given_up = 0

    async def generate(self, token_ids, sampling, request_key):
        self.prompts.append(list(token_ids))
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1


async def test_what_is_under_way_ends_with_its_session_and_with_its_client(renderer):
    engine = Waiting(renderer, [])
    body = {"model": "policy", "messages": ROWS, "n": 2}
    async with Endpoint(engine, renderer) as server:
        access = server.open("s")
        async with httpx.AsyncClient(headers=bearer(access.key)) as client:
            url = f"{access.openai_url}/chat/completions"
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=body, timeout=0.2)
            async with asyncio.timeout(5):
                while engine.given_up < 2:
                    await asyncio.sleep(0.01)
            asked = asyncio.ensure_future(client.post(url, json=body))
            async with asyncio.timeout(5):
                while len(engine.prompts) < 4:
                    await asyncio.sleep(0.01)
            session = await server.take("s")
            assert (await asked).status_code == 404
    assert engine.given_up == 4 and session.ledgers == [] and session.turns == [] and session.failure is None


async def test_each_choice_is_a_ledger_and_the_one_that_is_continued_goes_on(renderer):
    said = ["first", "second", "third"]
    engine = Scripted(renderer, [Message("assistant", text) for text in [*said, "end"]])
    async with Endpoint(engine, renderer) as server, client_of(server) as client:
        answer = await client.chat.completions.create(model="policy", messages=ROWS, n=3)
        assert [choice.message.content for choice in answer.choices] == said
        ids = [renderer.assistant(Message("assistant", text)) for text in [*said, "end"]]
        assert answer.usage.completion_tokens == sum(map(len, ids[:3]))
        follow = [*ROWS, {"role": "assistant", "content": "second"}, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="policy", messages=follow)
        session = await server.take("s")
    prompt = renderer.start([Message("user", "q")], [])
    assert [ledger.ids() for ledger in session.ledgers] == [
        prompt + ids[0],
        prompt + ids[1] + renderer.extend("stop", [Message("user", "more")]) + ids[3],
        prompt + ids[2],
    ]
    assert [ledger.token_ids[ledger.sampled].tolist() for ledger in session.ledgers] == [ids[0], ids[1] + ids[3], ids[2]]
    assert [(turn.index, turn.ledger, turn.end + 1) for turn in session.turns] == [
        (0, 0, len(prompt + ids[0])),
        (1, 1, len(prompt + ids[1])),
        (2, 2, len(prompt + ids[2])),
        (3, 1, len(session.ledgers[1])),
    ]
    assert [message.content for message in session.messages] == ["q", "second", "more", "end"]
    assert set(session.ledgers[1].turns[session.ledgers[1].sampled]) == {1, 3}


async def test_turns_are_sampled_as_the_run_says_whatever_the_agent_asks(renderer, caplog):
    engine = Scripted(renderer, [Message("assistant", "a")] * 3)
    own = Sampling(max_tokens=9, temperature=0.8, top_p=0.9)
    async with Endpoint(engine, renderer, sampling=own) as server, client_of(server) as client:
        create: Any = client.chat.completions.create
        for asked in ({"temperature": 0.1, "top_p": 0.9}, {"temperature": 0.0, "max_tokens": 4}, {"max_completion_tokens": 99}):
            await create(model="policy", messages=ROWS, **asked)
        session = await server.take("s")
    assert [(s.temperature, s.top_p, s.max_tokens) for s in engine.samplings] == [(0.8, 0.9, 9), (0.8, 0.9, 4), (0.8, 0.9, 9)]
    assert session.other == {"temperature": 2}
    assert [record.getMessage() for record in caplog.records if "an agent requests" in record.getMessage()] == [
        "an agent requests temperature = 0.1; ignored, its turns use the run's sampling (logged once)"
    ]


async def test_members_of_a_group_sample_apart_although_their_agents_ask_with_one_seed(renderer):
    engine = Scripted(renderer, [Message("assistant", "a")] * 10)
    async with Endpoint(engine, renderer) as server:
        for name, seed in (("a", 1), ("b", 2), ("again", 1), ("free", None)):
            async with client_of(server, name, seed=seed) as client:
                create: Any = client.chat.completions.create
                for options in ({"seed": 7}, {}):
                    await create(model="policy", messages=ROWS, **options)
    seeds = [sampling.seed for sampling in engine.samplings]
    a, b, again, free = seeds[:2], seeds[2:4], seeds[4:6], seeds[6:]
    assert a == again and free == [7, None] and len({*a, *b}) == 4
