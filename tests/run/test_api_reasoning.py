"""Reasoning models behind an API, and models that call badly: a strict server that refuses what such providers refuse."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.load import config_from
from agentrl.config.schema import ApiConfig
from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Message
from agentrl.engines.api_models import LiteLlmEngine
from agentrl.rollout.engine import Sampling
from agentrl.utils.errors import ConfigError, EnvError
from tests.conftest import Agentrl
from tests.rollout.loopback import Loopback, LoopbackServer, solve

TASKS = ["env.params.set_share=0", "env.params.calls=[2,4]", "rollout.max_turns=8"]
MODEL = "openai/gpt-5-mini"
FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking_blocks", "x_sign"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "none")


class Strict(Loopback):
    """Answers only requests that a strict provider takes: temperature 1, and a whole history as it was sent."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Any], temperature: float | None = 1.0) -> None:
        super().__init__(self._judged)
        self.solve, self.temperature, self.refused = answer, temperature, list[str]()
        self.said: dict[str, dict[str, Any]] = {}

    def _judged(self, body: dict[str, Any], number: int) -> Any:
        why = next(self._faults(body), None)
        if why is not None:
            self.refused.append(why)
            return {"status": 400, "message": why}
        answer = self.solve(body, number)
        if isinstance(answer, dict) and "role" in answer:
            for call in answer.get("tool_calls", ()):
                self.said[call["id"]] = json.loads(json.dumps(answer))
        return answer

    def _faults(self, body: dict[str, Any]) -> Any:
        if self.temperature is not None and body.get("temperature", 1) != self.temperature:
            yield f"Unsupported value: 'temperature' does not support {body['temperature']} with this model."
        pending: list[str] = []
        for place, row in enumerate(body["messages"]):
            if more := sorted(row.keys() - FIELDS):
                yield f"messages[{place}]: {more[0]}: extra fields are not permitted"
            if row["role"] == "tool":
                if row["tool_call_id"] not in pending:
                    yield f"messages[{place}]: no call has the id {row['tool_call_id']}"
                pending.remove(row["tool_call_id"])
                continue
            if pending:
                yield f"messages[{place}]: the call {pending[0]} has no answer"
            for call in row.get("tool_calls", ()):
                function, pending = call["function"], [*pending, call["id"]]
                if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function.get("name") or ""):
                    yield f"messages[{place}]: {function.get('name')!r} is no name of a function"
                try:
                    sound = isinstance(json.loads(function["arguments"]), dict)
                except ValueError:
                    sound = False
                if not sound:
                    yield f"messages[{place}]: the arguments {function['arguments']!r} are no JSON object"
                came = self.said.get(call["id"], {})
                for key in ("reasoning_content", "reasoning", "thinking_blocks", "x_sign"):
                    if row.get(key) != came.get(key):
                        yield f"messages[{place}]: {key} must be sent back as it came: {came.get(key)!r}, got {row.get(key)!r}"


def evaluate(server: Loopback, *more: str, model: str = f"api:{MODEL}", code: int = 0) -> list[dict[str, Any]]:
    assert (
        main(["eval", "key_value", "--model", model, f"api.base={server.url}", "--out", "out", "-n", "2", *TASKS, *more]) == code
    )
    rows = Path("out/trajectories.jsonl")
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def reasoning(**fields: Any) -> Callable[[dict[str, Any], int], Any]:
    """Solves a task, and reasons under these fields before each call, which gets an id of the provider's own."""

    def answer(body: dict[str, Any], number: int) -> Any:
        message = solve(body, number)
        if isinstance(message, str):
            return message
        message["tool_calls"][0]["id"] = f"toolu/{number}"  # type: ignore[index]
        return {**message, **fields}  # type: ignore[dict-item]

    return answer


@pytest.mark.parametrize(("fields", "text"), [
    ({"reasoning_content": "first a"}, "first a"),
    ({"reasoning": "first a", "x_sign": "encrypted"}, "first a"),
    ({"thinking_blocks": [{"type": "thinking", "thinking": "first a", "signature": "S"}]}, "first a"),
    ({"x_sign": "encrypted"}, None),
])  # fmt: skip
def test_a_reasoning_model_is_scored_and_hears_its_reasoning_again(
    fields: dict[str, Any], text: str | None, agentrl: Agentrl
) -> None:
    with Strict(reasoning(**fields)) as server:
        rows = evaluate(server, "eval.temperature=0", "api.args={drop_params=true, reasoning_effort='low'}")
        assert server.refused == [] and all(body["reasoning_effort"] == "low" for body in server.requests)
        assert all("temperature" not in body and body["max_completion_tokens"] > 100 for body in server.requests)
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    turns = [turn["message"] for row in rows for turn in row["turns"] if turn["message"]["tool_calls"]]
    assert len(turns) >= 4 and {turn["reasoning"] for turn in turns} == {text}
    assert (f"({text})" in agentrl("show", "out", "--episode", "trajectories.0").out) == (text is not None)


def test_a_temperature_that_is_refused_is_named_with_the_fix_before_an_episode(
    capsys: pytest.CaptureFixture[str], agentrl: Agentrl
) -> None:
    with Strict(solve) as server:
        assert evaluate(server, "eval.temperature=0", code=2) == [] and server.requests == []  # litellm knows the model
        said = " ".join(capsys.readouterr().err.split())
        assert "--model (openai/gpt-5-mini)" in said and "The parameter temperature = 0.0 is refused" in said
        assert "set api.args.drop_params = true or eval.temperature = 1" in said
        mine = "api:openai/mine"  # litellm does not
        assert evaluate(server, "eval.temperature=0", model=mine, code=2) == [] and len(server.requests) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert 'set api.args.additional_drop_params = ["temperature"] or eval.temperature = 1' in said
        assert not Path("out").exists()
        assert [row["reward"] for row in evaluate(server, "eval.temperature=1", model=mine)] == [1.0, 1.0]
        words = ["key_value", "--model", mine, f"api.base={server.url}", "rollout.temperature=0.5"]
        assert "or rollout.temperature = 1" in " ".join(agentrl("rollout", *words, code=2).err.split())


def test_the_preflight_asks_with_the_parameters_of_the_run() -> None:
    with Loopback(solve) as server:
        more = ["api.args={reasoning_effort='high', extra_body={x=1}}", "eval.temperature=0.3", "rollout.top_p=0.9"]
        evaluate(server, *more, "rollout.max_turn_tokens=77", model="api:openai/mine")
    first, *rest = [{key: value for key, value in body.items() if key != "messages"} for body in server.requests]
    assert rest and all(body == first for body in rest)
    assert first["reasoning_effort"] == "high" and first["x"] == 1 and first["max_tokens"] == 77
    assert (first["temperature"], first["top_p"], first["tools"][0]["function"]["name"]) == (0.3, 0.9, "get")


def test_an_evaluation_says_at_which_temperature_it_samples(capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(solve) as server:
        evaluate(server, "eval.temperature=0.3", "rollout.top_p=0.9", model="api:openai/mine")
        assert "[eval] eval.temperature = 0.3, rollout.top_p = 0.9\n" in capsys.readouterr().out
        evaluate(server, "eval.temperature=0", "--out", "greedy", model="api:openai/mine")
        assert (said := capsys.readouterr().out).count("[eval] eval.temperature = 0 (greedy)\n") == 1 and "hardly" not in said
        evaluate(server, "eval.temperature=0", "-k", "2", "--out", "greedy", model="api:openai/mine")
        assert "the 2 greedy episodes of a task hardly differ" in capsys.readouterr().out
        evaluate(server, "--out", "gold", model="policy:gold")
        assert "temperature" not in capsys.readouterr().out


def test_a_server_without_tools_is_refused_before_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("agentrl.contrib.preflight")

    def no_tools(body: dict[str, Any], number: int) -> Any:
        return {"status": 400, "message": "tools: not enabled"} if "tools" in body else "ready"

    with Loopback(no_tools) as server:
        assert evaluate(server, model="api:openai/mine", code=2) == [] and len(server.requests) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "refuses the request that the run would make" in said and "It refuses tools; take a model" in said


def test_headers_are_sent_with_references_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT", "tenant-0123456789")
    seen: list[Any] = []

    class Headers(Loopback):
        def handle(self, handler: Any) -> None:
            seen.append((handler.headers["X-Tenant"], handler.headers["Authorization"][:5]))
            super().handle(handler)

    with Headers(solve) as server:
        base = server.url.replace("http://", "http://me:password-0123@")
        evaluate(server, "api.args={extra_headers={X-Tenant='env:TENANT'}}", f"api.base={base}", model="api:openai/mine")
    assert set(seen) == {("tenant-0123456789", "Basic")}
    assert "tenant-0123456789" not in "".join(path.read_text() for path in Path("out").iterdir())


@pytest.mark.parametrize(("key", "words"), [
    ("api.args={messages=[]}", "api.args: messages is set by the conversation"),
    ("api.args={model='x'}", "api.args: model is set by"),
    ("api.args={temperature=1}", "api.args: temperature is set by eval.temperature"),
    ("api.args={api_base='x'}", "api.args: api_base is set by api.base"),
    ("api.args={extra_headers='x'}", "api.args: extra_headers: expected a table"),
    ("reward.judge.args={max_tokens=9}", "reward.judge.args: max_tokens is set by max_tokens of the judge leaf"),
])  # fmt: skip
def test_an_argument_that_has_a_key_is_refused_by_name(key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from({"env": {"id": "key_value"}}, [key])
    assert words in str(caught.value)


class Anthropic(LoopbackServer):
    """Anthropic's own interface: answers a call after two thoughts, of which one is encrypted, and then text."""

    def handle(self, handler: Any) -> None:
        self.requests.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        blocks = [*THOUGHTS, {"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"key": "a"}}]
        content = blocks if len(self.requests) == 1 else [{"type": "text", "text": "7"}]
        answer = {"id": "m", "type": "message", "role": "assistant", "model": "c", "content": content, "stop_reason": "end_turn",
                  "usage": {"input_tokens": 1, "output_tokens": 2}}  # fmt: skip
        self.send(handler, json.dumps(answer))


THOUGHTS = [{"type": "thinking", "thinking": "first a", "signature": "S"}, {"type": "redacted_thinking", "data": "D"}]


async def test_signatures_go_back_to_a_provider_whose_form_is_another() -> None:
    """Also after a rewrite, which begins a new ledger with the messages that the episode knows."""
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}
    with Anthropic() as server:
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
        config = ApiConfig(base=server.url.removesuffix("/v1"), args=thinking)
        made = LiteLlmEngine("anthropic/claude-sonnet-4-5", config, options={"api_key": "none"})
        await made.start()
        begun = made.renderer.start([Message("user", "q")], [tool])
        sampling = Sampling(max_tokens=2000, temperature=1.0)
        first = await made.generate(begun, sampling, "e")
        turn = made.renderer.parse(first.token_ids, first.finish)
        assert turn.reasoning == "first a" and [call.id for call in turn.tool_calls] == ["call_0_0"]
        answer = Message("tool", "7", tool_call_id="call_0_0", name="get")
        going = [*begun, *first.token_ids, *made.renderer.extend(first.finish, [answer])]
        assert made.renderer.start([Message("user", "q"), turn, answer], [tool]) == going
        await made.generate(going, sampling, "e")
    _, said, heard = server.requests[1]["messages"]
    assert said["content"][:2] == THOUGHTS and said["content"][2]["id"] == heard["content"][0]["tool_use_id"] == "toolu_1"


# -- judges and users --------------------------------------------------------------------------------


async def test_a_user_with_reasoning_hears_its_own_messages_again() -> None:
    tool = {"type": "function", "function": {"name": "press", "parameters": {"type": "object", "properties": {}}}}

    def play(body: dict[str, Any], number: int) -> Any:
        if number:
            return "I pressed it."
        call = {"id": "own/1", "type": "function", "function": {"name": "press", "arguments": "{times"}}
        return {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}

    with Strict(play) as server:
        refused = ModelUser("tea", model="openai/u", api_base=server.url, tools=[tool])
        with pytest.raises(EnvError, match="'temperature' does not support"):
            await refused.reply([Message("assistant", "Hello?")])
        server.requests.clear()
        more: Any = {"seed": 7, "additional_drop_params": ["temperature"]}
        user = ModelUser("tea", model="openai/u", api_base=server.url, tools=[tool], **more)
        heard = [Message("assistant", "Hello?")]
        said = await user.reply(heard)
        assert isinstance(said, Message) and said.tool_calls[0].error
        heard += [said, Message("tool", "malformed", tool_call_id=said.tool_calls[0].id)]
        assert await user.reply(heard) == "I pressed it."
        assert [(body["tools"], body["seed"]) for body in server.requests] == [([tool], 7)] * 2
        roles = [message["role"] for message in server.requests[1]["messages"]]
        assert roles == ["system", "user", "assistant", "tool"] and server.requests[1]["messages"][3]["content"] == "malformed"


# -- calls that are malformed ------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "not JSON": {"name": "get", "arguments": '{"key": '},
    "a list": {"name": "get", "arguments": '["a"]'},
    "a string": {"name": "get", "arguments": '"a"'},
    "null": {"name": "get", "arguments": "null"},
    "two objects": {"name": "get", "arguments": '{"key": "a"}{"key": "b"}'},
    "no name": {"name": "", "arguments": '{"key": "a"}'},
    "nested too deep": {"name": "get", "arguments": '{"key": ' + "[" * 80 + "]" * 80 + "}"},
    "a name that is none": {"name": "get the key", "arguments": '{"key": "a"}'},
    "no arguments": {"name": "get", "arguments": ""},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ids", ["own", "same"])
def test_a_malformed_call_is_answered_corrected_and_scored(shape: str, ids: str) -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        if body["messages"][-1]["role"] == "user" and "tools" in body and body["messages"][-1]["content"].startswith("Answer"):
            return "ready"
        if not any(row["role"] == "assistant" for row in body["messages"]):
            bad = {"id": f"bad/{number}" if ids == "own" else "x", "type": "function", "function": SHAPES[shape]}
            good = {"id": f"good/{number}" if ids == "own" else "x", "type": "function",
                    "function": {"name": "get", "arguments": '{"key": "a"}'}}  # fmt: skip
            return {"role": "assistant", "content": None, "tool_calls": [bad, good]}
        first = next(place for place, row in enumerate(body["messages"]) if row["role"] == "assistant")
        return solve({**body, "messages": [*body["messages"][:first], *body["messages"][first + 3 :]]}, number)

    with Strict(answer, temperature=None) as server:
        rows = evaluate(server, model="api:openai/mine")
        assert server.refused == []
    assert [row["reward"] for row in rows] == [1.0, 1.0]
    assert all(row["turns"][0]["results"][0]["error"] for row in rows)
    assert len({call["id"] for row in rows[:1] for turn in row["turns"] for call in turn["message"]["tool_calls"]}) >= 3


# -- outages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_an_outage_of_the_moment_is_tried_again(status: int) -> None:
    down = {"status": status}
    with Loopback(lambda body, number: down if number in (1, 2) else solve(body, number)) as server:
        rows = evaluate(server, "-n", "1", "rollout.max_episodes=1", model="api:openai/mine")
    assert [row["reward"] for row in rows] == [1.0]


def test_a_refused_connection_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with Loopback(solve) as server:
        pass
    rows = evaluate(server, "health.preflight=false", "-n", "1", "api.retries=1", model="api:openai/mine", code=1)
    assert "refuses the connection: no server listens there" in rows[0]["error"]
    assert caplog.text.count("refuses the connection") == 1
