"""`agentrl eval --model api:NAME` against real HTTP servers on loopback, healthy and not."""

import asyncio
import json
import os
import re
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from agentrl.cli.main import main
from agentrl.config.load import config_from
from agentrl.config.schema import ApiConfig, Choice, EnvConfig, TrainConfig
from agentrl.contrib.users import ModelUser
from agentrl.data.trajectory import Message
from agentrl.engines.api_models import LiteLlmEngine, Transcript
from agentrl.render.litellm_calls import read_answer, retry_after
from agentrl.rollout.engine import Sampling
from agentrl.run.engine_choice import EngineChoice
from agentrl.run.evaluate import EvalSession
from agentrl.utils.errors import ConfigError, EngineError, EnvError
from tests.conftest import Agentrl
from tests.contrib.preflight.preflighted import preflight
from tests.contrib.suites.toysuite import write_source, write_suite
from tests.rollout.loopback import Loopback, solve
from tests.run.own_spec import RIGHT, with_spec

TASKS = ["health.preflight=false", "env.params.set_share=0", "env.params.calls=[2,4]", "rollout.max_turns=8"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("agentrl.contrib.preflight.services.ANSWER_S", 5.0)
    monkeypatch.setenv("OPENAI_API_KEY", "none")


def evaluate(server: Loopback, *more: str, model: str = "api:openai/test", code: int = 0) -> dict[str, Any]:
    assert main(["eval", "key_value", "--model", model, f"api.base={server.url}", "--out", "out", *TASKS, *more]) == code
    report = Path("out/report.json")
    return json.loads(report.read_text()) if report.exists() else {}


def played(out: str = "out") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(out, "trajectories.jsonl").read_text().splitlines()]


def test_an_api_model_is_evaluated_with_tokens_latency_and_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(solve) as server:
        report = evaluate(server, "-n", "3", "-k", "2", "--all", "api.usd_per_million=[10, 20]")
        asked = len(server.requests)
        assert report["pass@1"]["mean"] == report["pass^2"]["mean"] == 1.0
        assert report["unscored"] == 0 and report["stops"] == {"done": 6} and report["metrics"]["success"] == 1.0
        turns = report["turns"] * 6
        assert turns == pytest.approx(asked)
        assert report["tokens"] == pytest.approx(10 * report["turns"])
        assert report["prompt_tokens"] == pytest.approx(100 * report["turns"])
        assert report["usd_total"] == pytest.approx(asked * (100 * 10 + 10 * 20) / 1e6)
        assert report["unpriced_turns"] == 0
        assert 0 < report["turn_seconds"]["p50"] <= report["turn_seconds"]["p95"] <= report["episode_seconds"]["p95"]
        table = capsys.readouterr().out
        assert "turn_seconds / p95" in table and "usd_total" in table and "pass^2" in table
        evaluate(server, "-n", "3", "-k", "2", "api.usd_per_million=[10, 20]")
        assert len(server.requests) == asked  # nothing was missing
        assert evaluate(server, "-n", "4", "-k", "2", "api.usd_per_million=[10, 20]")["tasks"] == 4
        assert len(server.requests) > asked
        evaluate(server, "-n", "3", "--seed", "5", code=2)


@pytest.mark.parametrize(("usage", "model", "per_turn"), [(False, "test", None), (True, "gpt-4.1-mini-2025-04-14", 56e-6)])
def test_what_nobody_knows_is_null_and_a_known_model_has_litellms_price(usage: bool, model: str, per_turn: float | None) -> None:
    """100 tokens of a prompt at 0.4 dollars a million, and 10 at 1.6."""
    with Loopback(solve, usage=usage) as server:
        prices = [] if usage else ["api.usd_per_million=[10, 20]"]
        report = evaluate(server, "-n", "1", *prices, model=f"api:openai/{model}")
    assert report["pass@1"]["mean"] == 1.0 and report["unpriced_turns"] == (0 if usage else report["turns"])
    if usage:
        assert report["usd_total"] == pytest.approx(report["turns"] * per_turn)
    else:
        assert report["tokens"] is report["prompt_tokens"] is report["usd"] is report["usd_total"] is None


def test_an_outage_is_null_never_zero_and_is_run_again() -> None:
    with Loopback(lambda body, number: {"status": 503}) as server:
        report = evaluate(server, "-n", "2", "api.retries=0", code=1)
    assert report["unscored"] == 2 and report["pass@1"] is None and report["reward"] is None and report["usd_total"] is None
    assert report["stops"] == {"engine_error": 2}
    assert list(report["errors"].values()) == [2] and next(iter(report["errors"])).startswith("engine_error: ")
    assert [row["reward"] for row in played()] == [None, None]
    with Loopback(solve) as server:
        # Another address, the same evaluation: what was out is asked again.
        report = evaluate(server, "-n", "2")
    assert report["unscored"] == 0 and report["pass@1"]["mean"] == 1.0


def test_ctrl_c_keeps_what_is_done_and_the_same_command_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        if number == 9:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
        return solve(body, number)

    with Loopback(answer) as server:
        words = "rollout key_value --model api:openai/test -n 8 --out out --max-concurrent 1"
        args = [*words.split(), f"api.base={server.url}", *TASKS]
        assert main(args) == 130
        kept = Path("out/trajectories.jsonl").read_text().splitlines()
        assert 0 < len(kept) < 8 and all(json.loads(line)["reward"] == 1.0 for line in kept)
        assert f"interrupted: {len(kept)} of 8 episodes are in out; the same command runs the rest" in capsys.readouterr().out
        assert main(args) == 0
    rows = played()
    assert [row["task"]["seed"] for row in rows] == list(range(8))
    assert [json.dumps(row) for row in rows if json.dumps(row) in kept] == kept


@pytest.mark.parametrize("words", ["rollout key_value", "eval key_value", "eval key_value function_calling"])
def test_ctrl_c_while_the_engine_ends_is_an_interruption(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    close = EvalSession.close

    async def signalled(self: EvalSession) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(20)

    monkeypatch.setattr(EvalSession, "close", signalled)
    args = [*words.split(), "--policy", "gold", "-n", "2", "--out", "out"]
    assert main(args) == 130
    assert "interrupted: 2 of 2 episodes are in out" in capsys.readouterr().out
    monkeypatch.setattr(EvalSession, "close", close)
    assert main(args) == 0


def engine(server: Loopback, **options: Any) -> Any:
    """The engine of a config with these keys of [api], and arguments of the run's engine; its first wait is 0.01 s."""
    table = {"env": {"id": "key_value"}, "model": {"path": "api:openai/test"}, "api": {"base": server.url, **options}}
    made: Any = EngineChoice(config_from({**table, "engine_args": {"cache": False}})).maker().make_with(Transcript())
    made._backoff = 0.01
    return made


async def ask(asked: Any) -> str:
    await asked.start()
    prompt = asked.renderer.start([Message("user", "q")], [])
    generation = await asked.generate(prompt, Sampling(max_tokens=8), "e")
    return asked.renderer.parse(generation.token_ids, generation.finish).content


async def test_a_full_queue_is_waited_for_as_long_as_it_says() -> None:
    busy = {"status": 429, "headers": {"Retry-After": "0.6"}}
    with Loopback(lambda body, number: busy if number < 2 else "yes") as server:
        assert await ask(engine(server)) == "yes"
        waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
        assert len(waits) == 2 and min(waits) >= 0.6
        server.times.clear()
    full = {"status": 429, "headers": {"Retry-After": "3600"}}
    refused = pytest.raises(EngineError, match=r"^RateLimitError: openai/test: .*\(1 attempts\)")
    with Loopback(lambda body, number: full) as server, refused:
        await ask(engine(server))


async def test_attempts_are_bounded_and_what_no_retry_helps_is_asked_once() -> None:
    for status, attempts in ((500, 3), (429, 3), (400, 1), (422, 1)):
        with Loopback(lambda body, number, status=status: {"status": status}) as server:
            with pytest.raises(EngineError, match=rf"\({attempts} attempts\)"):
                await ask(engine(server, retries=2))
            assert len(server.requests) == attempts
    late = pytest.raises(EngineError, match=r"^Timeout.*\(2 attempts\)")
    with Loopback(lambda body, number: {"status": 200, "sleep": 2.0}) as server, late:
        await ask(engine(server, retries=1, timeout=0.2))
    with Loopback(lambda body, number: None if number == 0 else "back") as server:
        assert await ask(engine(server)) == "back"


KEY = r"\(environment variable OPENAI_API_KEY\)"
QUOTA = "You exceeded your current quota, please check your plan and billing details."


@pytest.mark.parametrize(("status", "message", "says"), [
    (401, "Incorrect API key provided", rf"refuses the key {KEY}: .*Incorrect API key provided\. Set one"),
    (403, "You may not", rf"refuses the key {KEY}"),
    (404, "The model `test` does not exist", r"has no such model: .*\. Correct its name"),
    (402, "pay first", rf"no quota or credit left for the key {KEY}: .*\. Add credit"),
    (429, f"{QUOTA} insufficient_quota", "no quota or credit left"),
    (400, "Your credit balance is too low", "no quota or credit left"),
    (400, "billing_hard_limit_reached", "no quota or credit left"),
    (403, "Insufficient credits", "no quota or credit left"),
])  # fmt: skip
async def test_a_refused_key_account_or_model_ends_it_at_once(status: int, message: str, says: str) -> None:
    """Each of hundreds of episodes asked in vain, and was called unscored for a fault of the server."""
    with Loopback(lambda body, number: {"status": status, "message": message}) as server:
        with pytest.raises(ConfigError, match=rf"^API model \(openai/test\): {server.url} .*{says}"):
            await ask(engine(server, retries=2))
        assert len(server.requests) == 1
    # A limit of a minute, in the words that one provider has for it, passes.
    minute = {"status": 429, "message": f"{QUOTA} Please retry in 1 s. RESOURCE_EXHAUSTED"}
    with Loopback(lambda body, number: minute if number == 0 else "yes") as server:
        assert await ask(engine(server)) == "yes"


async def test_a_request_that_is_refused_after_others_were_answered_is_an_episodes_own() -> None:
    with Loopback(lambda body, number: {"status": 403, "message": "flagged"} if number else "yes") as server:
        asked = engine(server)
        assert await ask(asked) == "yes"
        with pytest.raises(EngineError, match=r"flagged.*\(1 attempts\)"):
            await ask(asked)


@pytest.mark.parametrize(
    ("model", "variable"),
    [("openai/m", "OPENAI_API_KEY"), ("anthropic/claude-x", "ANTHROPIC_API_KEY"), ("gemini/g", "GEMINI_API_KEY"),
     ("fireworks_ai/m", "FIREWORKS")],
)  # fmt: skip
async def test_a_key_that_is_missing_is_named_at_the_first_call(
    model: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litellm calls most of these an error of the server, which was tried again and again."""
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=rf"\({model}\): its provider refuses the key \(environment variable .*{variable}"):
        await ask(LiteLlmEngine(model, ApiConfig(retries=2), backoff=0.01))


def test_an_evaluation_whose_key_is_refused_ends_with_that(capsys: pytest.CaptureFixture[str]) -> None:
    with Loopback(lambda body, number: {"status": 401, "message": "Incorrect API key"}) as server:
        evaluate(server, "-n", "20", "--max-concurrent", "1", code=2)
        assert len(server.requests) == 1
    assert "refuses the key (environment variable OPENAI_API_KEY)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("said", "choice", "why"), [
    ("", {"finish_reason": "error"}, "finish_reason 'error', which means failure, not a normal end"),
    ("", {"finish_reason": "insufficient_system_resource"}, "insufficient_system_resource"),
    (None, {"finish_reason": "content_filter"}, "content_filter"),
    ("I would", {"finish_reason": "SAFETY"}, "SAFETY"),
    ("I would", {"finish_reason": "refusal"}, "refusal"),
    ("I would", {"finish_reason": "timeout"}, "timeout"),
    ("", {"error": {"message": "upstream", "code": 502}}, "the provider failed: .*upstream"),
    (None, {"message": {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}}, "layout"),
])  # fmt: skip
async def test_an_answer_that_the_provider_broke_off_is_none(said: str | None, choice: dict[str, Any], why: str) -> None:
    """Each was an empty answer of the model, which was scored 0."""
    message = {"role": "assistant", "content": said, "choice": choice}
    with Loopback(lambda body, number: dict(message)) as server:
        with pytest.raises(EngineError, match=f"NoAnswer: openai/test: .*{why}"):
            await ask(engine(server))
        with pytest.raises(EnvError, match=f"plays the user.*{why}"):
            await ModelUser("buy", model="openai/test", api_base=server.url, api_key="none").reply([Message("assistant", "hi")])


async def test_an_answer_that_was_cut_is_not_taken_for_a_whole_one() -> None:
    words = ["length", "max_tokens", "model_length", "max_output_tokens"]
    cut = {"role": "assistant", "content": "12"}
    with Loopback(lambda body, number: {**cut, "choice": {"finish_reason": words[number]}}) as server:
        asked = engine(server)
        await asked.start()
        prompt = asked.renderer.start([Message("user", "q")], [])
        found = [(await asked.generate(prompt, Sampling(max_tokens=8), word)).finish for word in words]
    assert found == ["length"] * 4


async def test_a_call_without_arguments_has_none() -> None:
    message = ChatCompletionMessage.model_validate(
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": ""}}]}
    )
    assert [(call.name, call.arguments) for call in read_answer(message)[2]] == [("now", {})]


async def test_a_refusal_is_what_a_model_said() -> None:
    with Loopback(lambda body, number: {"role": "assistant", "content": None, "refusal": "I will not"}) as server:
        assert await ask(engine(server)) == "I will not"


@pytest.mark.parametrize("key", ["api.base", "reward.judge.api_base"])
@pytest.mark.parametrize("more", ["?key=kept-to-itself", "${env:QUERY}", "#kept-to-itself"])
def test_an_address_with_a_query_is_refused_before_anything_is_asked(
    key: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUERY", "?key=kept-to-itself")
    with Loopback(solve) as server:
        Path("run.toml").write_text(
            f'[env]\nid = "key_value"\n[{key.rpartition(".")[0]}]\n{key.rpartition(".")[2]} = "{server.url}{more}"\n'
        )
        first = "" if key == "api.base" else f"api.base={server.url}"
        words = ["eval", "key_value", "--config", "run.toml", "--model", "api:openai/test", "-n", "1", "--out", "out", first]
        assert main([word for word in words if word]) == 2
        assert server.requests == []
    said = " ".join(capsys.readouterr().err.split())
    assert f"{key}: the address {server.url} has a query or fragment (? or #)" in said and f"write {server.url}, and" in said
    assert "OPENAI_API_KEY" in said and "kept-to-itself" not in said
    with pytest.raises(ConfigError, match=r"api_base: the address http://h/v1 has a query or fragment"):
        ModelUser("tea", model="openai/x", api_base="http://h/v1?key=a")


@pytest.mark.parametrize("most", [2, 3])
async def test_so_many_requests_are_under_way_and_each_has_its_price(most: int) -> None:
    """Keys of the section `api`; `retries` and `timeout` have the attempts above."""
    running: list[int] = []
    lock, now = threading.Lock(), 0

    def slow(body: dict[str, Any], number: int) -> str:
        nonlocal now
        with lock:
            now += 1
            running.append(now)
        time.sleep(0.2)
        with lock:
            now -= 1
        return "yes"

    with Loopback(slow) as server:  # it hears us at api.base
        made = engine(server, concurrency=most, usd_per_million=[10, 20])
        await made.start()
        prompt = made.renderer.start([Message("user", "q")], [])
        turns = await asyncio.gather(*(made.generate(prompt, Sampling(max_tokens=8), f"e{n}") for n in range(6)))
    assert max(running) == most and len(server.requests) == 6
    assert {turn.usage.usd for turn in turns} == {(100 * 10 + 10 * 20) / 1e6}


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert retry_after({"retry-after": "Thu, 01 Jan 2026 00:00:07 GMT"}, now) == 7.0
    assert retry_after({"retry-after": "Thu, 01 Jan 2026 00:00:07"}, now) == 7.0  # without a zone: UTC, as -0000
    assert retry_after({"retry-after": "soon"}) is None
    assert retry_after({}) is None


# -- asked once before a run -------------------------------------------------------------------------

MARK = {"use": "judge", "args": {"model": "openai/j-2026-01-01", "prompt": "{transcript}"}}


def test_one_model_of_several_environments_is_asked_once_and_each_other_too(tmp_path: Path) -> None:
    pytest.importorskip("agentrl.contrib.judges")
    with Loopback(lambda body, number: "ready") as server:
        config = with_spec(
            tmp_path,
            {"op": "mean", "of": [MARK, {**MARK, "args": {**MARK["args"], "prompt": "again {transcript}"}}]},  # type: ignore[dict-item]
            reward={"judge": {"api_base": server.url}},
            api={"base": server.url},
            rollout={"context": {"name": "compact", "args": {"tokens": 100, "summary_tokens": 20}}, "summary_model": "openai/w"},
        )
        preflight(config)
        assert sorted(body["model"] for body in server.requests) == ["j-2026-01-01", "w"]


USERS = """
from agentrl.contrib.users import ModelUser
from agentrl.env import Message, Task, ToolEnv
from agentrl.env.users import UserModel
from tests.conftest import Agentrl


class Helped(ToolEnv):
    id = "tests/Helped-v0"
    reward = "mine.json"

    def __init__(self, *, options=None, **base):
        super().__init__(**base)
        self.options = dict(options or {})

    def user_models(self):
        return [UserModel("openai/u", self.options)]

    def make_task(self, rng_seed, split):
        return Task(f"t/{split}/{rng_seed}", rng_seed, split, {}, {"answer": 4})

    async def setup(self, task):
        self.user = ModelUser("get help", model="openai/u", max_retries=0, **self.options)

    async def prompt(self, task):
        return [Message("user", await self.ask_user([Message("assistant", "Hello?")]))]
"""


@pytest.mark.parametrize(("answer", "says"), [
    ({"status": 404}, r"the user of environment 'helped' \(openai/u\): .* has no such model"),
    ({"status": 401}, r"the user of environment 'helped' \(openai/u\): .* refuses the key"),
    (None, r"the user of environment 'helped' \(openai/u\): .* \(its api_base\) does not answer within 5 s"),
])  # fmt: skip
def test_the_model_that_plays_the_user_is_asked_once_before_a_run(
    answer: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    helped()
    with Loopback(lambda body, number: answer) as server:
        asks = f'env.params.options={{api_base="{server.url}", api_key="mine"}}'
        args = ["eval", "helped", "--model", "api:openai/x", asks, "-n", "2"]
        assert main([*args, f"api.base={server.url}", "health.preflight=false", "--out", "unasked"]) == 1
        assert [(row["reward"], row["stop"]) for row in played("unasked")] == [(None, "env_error")] * 2
        before = len(server.requests)
        with Loopback(lambda body, number: "ready") as policy:
            assert main([*args, f"api.base={policy.url}"]) == 2
            assert [body["model"] for body in policy.requests] == ["x"]
        asked = server.requests[before:]
        assert [(body["model"], body["temperature"]) for body in asked] == [("u", 0.0)]
    assert re.search(says, " ".join(capsys.readouterr().err.split()))


def test_nobody_asks_the_users_model_if_its_gold_user_plays() -> None:
    helped()
    with Loopback(lambda body, number: "ready") as user:
        options = {"api_base": user.url, "api_key": "mine"}
        for wrappers, asked in (([], ["u"]), ([Choice(name="gold_user")], [])):
            env = EnvConfig(id="helped", params={"options": options}, wrappers=wrappers)
            before = len(user.requests)
            preflight(TrainConfig(env=env))
            assert [body["model"] for body in user.requests[before:]] == asked


def helped() -> None:
    folder = Path("envs/helped")
    folder.mkdir(parents=True)
    (folder / "env.py").write_text(USERS)
    (folder / "mine.json").write_text(json.dumps({"agentrl_reward": 1, "name": "mine", "root": RIGHT}))


def adds(body: dict[str, Any], number: int) -> dict[str, Any] | str:
    """Adds every term, and is done; leaves out the second of two for the model "forgetful"."""
    asked, last = body["messages"][0]["content"], body["messages"][-1]
    terms = asked.removeprefix("Add ").split(", ")
    if last["role"] == "tool":
        return "Done."
    terms = terms[:1] if "forgetful" in body["model"] else terms
    call = [{"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": json.dumps({"value": int(term)})}}
            for n, term in enumerate(terms)]  # fmt: skip
    return {"role": "assistant", "content": "", "tool_calls": call}


def test_eval_prints_and_stores_the_suites_table_and_compares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentrl: Agentrl
) -> None:
    monkeypatch.setenv("AGENTRL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    write_suite(tmp_path)
    source = write_source(tmp_path / "checkout")
    assert main(["env", "install", "sums", "--from", str(source)]) == 0
    with Loopback(adds) as server:
        words = ["--split", "all", f"api.base={server.url}", "health.preflight=false"]
        models = ["--model", "api:openai/good", "--model", "api:openai/forgetful"]
        shown = agentrl("eval", "sums", *models, *words, "--out", "out").out
    assert "sums 1.2: its own metrics, over 6 of its 6 tasks (all)" in shown
    names = sorted(path.name for path in Path("out").iterdir() if path.is_dir())
    reports = {name: json.loads((Path("out") / name / "report.json").read_text()) for name in names}
    rows = {name: {row["name"]: row["value"] for row in one["official"]["sums"]["rows"]} for name, one in reports.items()}
    good, forgetful = (next(rows[name] for name in names if word in name) for word in ("good", "forgetful"))
    assert good == {"easy": 100, "hard": 100, "odd": 100, "overall": 100}
    # One term is all of "easy"; of the two of "hard" and "odd" the second is left out.
    assert forgetful == {"easy": 100, "hard": 0, "odd": 0, "overall": pytest.approx(100 / 3)}
    assert [report["tasks"] for report in reports.values()] == [6, 6], "each task once, though -n was not given"
    comparison = json.loads((Path("out") / "comparison.json").read_text())["official"]["sums"]
    assert comparison["same"] and comparison["rows"][-1]["values"] == [pytest.approx(100), pytest.approx(100 / 3)]
    assert "sums: its own metrics" in agentrl("eval", "--compare", *(f"out/{name}" for name in names)).out
    # A part of it is spread over its kinds, and says that it is a part; more of it plays what was played, and others.
    with Loopback(adds) as server:
        few = [*models[:2], "--split", "all", f"api.base={server.url}", "health.preflight=false", "--out", "few"]
        told = agentrl("eval", "sums", *few, "-n", "3").out
        first = [row["task"]["id"] for row in played("few")]
        assert main(["eval", "sums", *few, "-n", "5"]) == 0
    assert "over 3 of its 6 tasks (all); only a part, so not a result of the benchmark" in told
    assert [name[:-1] for name in first] == ["easy", "hard", "odd"]
    more = [row["task"]["id"] for row in played("few")]
    assert set(first) < set(more) and len(more) == 5
    # As many others are not the same tasks.
    with Loopback(adds) as server:
        few[4:] = [f"api.base={server.url}", "health.preflight=false", "--out", "other"]
        assert main(["eval", "sums", *few, "-n", "5", "--seed", "2"]) == 0
    assert {row["task"]["id"] for row in played("other")} != set(more)
    assert "they are not over the same tasks: few: 5 tasks of all" in agentrl("eval", "--compare", "few", "other").out
    # Another source is another evaluation, which does not continue this one; what changed is named.
    (source / "data" / "extra.json").write_text("[]")
    told = agentrl("eval", "sums", *models, *words, "--out", "out", code=2)
    assert "data/extra.json was changed" in told.out and "the files of env.params.source" in told.err
