"""Distinct keys are planted wherever a secret may be, and looked for in everything that leaves the process."""

import io
import json
import logging
import re
import stat
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import pytest

from agentrl.config import to_toml
from agentrl.config.identity import check_references, without_secrets
from agentrl.config.load import config_from, load_config
from agentrl.config.schema import ApiConfig, JudgeConfig, McpServerConfig, SandboxConfig
from agentrl.contrib.agents.programs import Remote
from agentrl.contrib.judges.client import Judge, judge_call
from agentrl.contrib.judges.leaf import JudgeFault, VerdictRequest
from agentrl.contrib.mcp.client import McpSource
from agentrl.contrib.preflight.services import ApiModel, _ask
from agentrl.contrib.remote_envs.client import Link
from agentrl.contrib.remote_envs.server import EnvOffer
from agentrl.contrib.sandboxes.contract import SANDBOXES
from agentrl.contrib.sandboxes.sandbox_pool import provider_of
from agentrl.contrib.users import ModelUser, UserModel
from agentrl.data.trajectory import Message, Task, ToolCall, Trajectory
from agentrl.engines.api_models import LiteLlmEngine
from agentrl.env import Toolbox, ToolEnv, tool
from agentrl.env.address import EnvRequest
from agentrl.env.catalog import EnvRef
from agentrl.rollout.engine import Sampling
from agentrl.run.assembly import RunStart
from agentrl.run.evaluate import make_report
from agentrl.run.folder import RunFolder
from agentrl.run.trackers import TRACKERS, check_trackers, makers
from agentrl.utils import redaction
from agentrl.utils.errors import CatalogError, ConfigError, EnvError
from agentrl.utils.parsing import toml_table
from agentrl.utils.redaction import REDACTED, guard_process, guarded_output, learn, redact, redact_json, redact_said, remember
from agentrl.utils.search_path import give
from tests.rollout.loopback import LoopbackServer, completion

PLANTED = {
    name: f"planted-{name}-0123456789"
    for name in ("variable", "reference", "within", "flag", "equals", "header", "url", "query", "env", "param", "tool", "tracker")
}


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("_known", "_ordered", "_read"):
        monkeypatch.setattr(redaction, name, type(getattr(redaction, name))())
    monkeypatch.setenv("SOME_API_KEY", PLANTED["variable"])
    monkeypatch.setenv("REFERRED", PLANTED["reference"])
    monkeypatch.setenv("WITHIN", PLANTED["within"])
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)


@SANDBOXES.register("planted")
def _planted_sandbox(*, token: str) -> Any:
    return SimpleNamespace(token=token)


@TRACKERS.register("planted")
def _planted_tracker(run: Any, token: str) -> Any:
    return token


CONFIG = """
[env]
id = "key_value"
[model]
path = "m"
[tools.mcp.one]
command = ["server", "--api-key", "{flag}", "--token={equals}", "--header", "X-Api-Key: {header}", "--ref", "env:REFERRED"]
env = {{ SERVICE_TOKEN = "{env}", MODE = "production", OTHER = "env:REFERRED" }}
[tools.mcp.two]
url = "https://me:{url}@host/mcp?api_key={query}&x=${{env:WITHIN}}"
[env.tools.mcp.three]
command = ["server"]
env = {{ MODE = "production" }}
"""


def found_in(text: str) -> list[str]:
    return [name for name, secret in PLANTED.items() if secret in text]


def test_what_a_config_holds_leaves_only_in_its_own_private_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG.format(**PLANTED))
    config = load_config(tmp_path / "c.toml", [f"out={tmp_path}/runs", "name=r"])
    folder = RunFolder.create(config)
    held = {"flag", "equals", "header", "env", "url", "query"}
    assert set(found_in(folder.config.read_text())) == held  # of references only the name
    assert "env:REFERRED" in folder.config.read_text() and "${env:WITHIN}" in folder.config.read_text()
    assert stat.S_IMODE(folder.config.stat().st_mode) == 0o600 and stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    folder.keep_config(to_toml(config.model_copy(update={"seed": config.seed + 1})), 3)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder.config, *folder.history.iterdir())} == {0o600}
    everything = " ".join(PLANTED[name] for name in held)
    folder.write_summary({"status": "failed", "error": everything, "deep": [{everything: everything}]})
    assert found_in(folder.summary.read_text()) == []
    shared = str(without_secrets(config))  # of an `env` any value may be a password
    assert found_in(shared) == [] and "production" not in shared and found_in(to_toml(config)) != []
    redaction._known.clear(), redaction._ordered.clear()  # another process, which has only the file, as the viewer
    learn(toml_table(folder.config.read_text()))
    shown = redact_said(folder.config.read_text())
    assert found_in(shown) == [] and "production" in shown


def test_references_are_resolved_late_and_remembered() -> None:
    row = {"a": "env:REFERRED", "b": ["x${env:WITHIN}y", "env:NOT a name"], "c": 3}
    assert redact(PLANTED["reference"]) == PLANTED["reference"]
    found = redaction.resolve_references(row, "k")
    assert found == {"a": PLANTED["reference"], "b": [f"x{PLANTED['within']}y", "env:NOT a name"], "c": 3}
    assert redact(f"<{PLANTED['reference']}> {PLANTED['within']}") == f"<{REDACTED}> {REDACTED}"
    with pytest.raises(ConfigError, match=r"k\.z: the environment variable NOWHERE_SET is not set"):
        redaction.resolve_references({"z": "env:NOWHERE_SET"}, "k")


def test_logs_and_prints_and_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err, seen = io.StringIO(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    handler = logging.StreamHandler(seen)
    log = logging.getLogger("planted")
    log.addHandler(handler)
    remember(PLANTED["param"])
    try:
        with guarded_output():
            print("a", PLANTED["variable"], file=sys.stderr)
            print(f"b {PLANTED['param']}")
            log.warning("c %s", PLANTED["param"])
            try:
                raise ValueError(f"401: Incorrect API key provided: {PLANTED['variable']}, sk-abcdefghijklmnop1234")
            except ValueError:
                log.exception("d")
    finally:
        log.removeHandler(handler)
    assert sys.stdout is out and (out.getvalue(), err.getvalue()) == (f"b {REDACTED}\n", f"a {REDACTED}\n")
    assert found_in(seen.getvalue()) == [] and "sk-abc" not in seen.getvalue()
    assert seen.getvalue().startswith(f"c {REDACTED}\nd\nTraceback") and "ValueError: 401: Incorrect" in seen.getvalue()


async def test_a_tool_that_echoes_a_secret_tells_nobody() -> None:
    remember(PLANTED["tool"])

    @tool
    def echo(text: str) -> dict[str, str]:
        "Say it again."
        return {"said": f"{text} {PLANTED['tool']}"}

    @tool
    def fail() -> str:
        "Fail."
        raise RuntimeError(f"refused {PLANTED['tool']}")

    box = Toolbox([echo, fail])
    result = await box.call(ToolCall("echo", {"text": "x"}, id="1"))
    assert found_in(str(result)) == [] and result.value == {"said": f"x {REDACTED}"}
    assert found_in(str(await box.call(ToolCall("echo", {"wrong": PLANTED["tool"]}, id="1")))) == []
    with pytest.raises(EnvError) as failed:
        await box.call(ToolCall("fail", {}, id="2"))
    assert found_in(str(failed.value)) == [] and "refused" in str(failed.value)
    served: Any = SimpleNamespace(content=json.dumps({"said": PLANTED["tool"]}).encode())
    assert Link("http://h", "")._json(served) == {"said": REDACTED}  # by a tool of a remote environment


async def test_a_server_that_does_not_start_says_so_without_its_keys() -> None:
    pytest.importorskip("mcp")
    server = McpServerConfig(command=["false", "--token", PLANTED["flag"], "--r=${env:REFERRED}"], env={"A_KEY": PLANTED["env"]})
    with pytest.raises(EnvError) as failed:
        await McpSource("s", server).session().open()
    assert found_in(str(failed.value)) == [] and "'s'" in str(failed.value)
    missing = McpServerConfig(command=["true", "env:NOWHERE_SET"])
    with pytest.raises(ConfigError, match="NOWHERE_SET is not set"):
        await McpSource("s", missing).session().open()


@pytest.mark.parametrize(("text", "stays"), [
    ("model.tokenizer = 'Qwen/Qwen3-0.6B'", True), ("optim.max_tokens = 100000", True), ("https://example.com/a:b@c", True),
    ("a bearer of good news", True), ("skating-rinks-are-closed-today", True),
    ("Authorization: Bearer abcdefgh12345678", False), ("https://u:secretpw@h/x", False),
    ("hf_abcdefghijklmnopqrstuvwx", False),
], ids=range(8))  # fmt: skip
def test_what_looks_like_a_secret(text: str, stays: bool) -> None:
    """By number: pytest puts the name of a test into an environment variable, whose addresses are looked at too."""
    assert (redact_said(text) == text) is stays and redact(text) == text


def test_names_that_are_no_secrets() -> None:
    table: dict[str, Any] = {
        "token_env": "NAME_OF_VARIABLE", "tokenizer": "some/tokenizer", "max_tokens": "12345678", "key": "short",
        "SSH_AUTH_SOCK": "/tmp/agent.sock", "command": ["run", "--tokens", "12345678", "--key-file", "/etc/keys/one"],
    }  # fmt: skip
    learn(table)
    assert redact_json(table) == table


def _tracker(value: str) -> object:
    config = config_from({"env": {"id": "key_value"}, "trackers": [{"name": "planted", "args": {"token": value}}]})
    check_trackers(RunStart(config))
    return makers(config.trackers, cast(Any, None))[0][1]()


@pytest.mark.parametrize(("key", "used"), [
    ("reward.judge.api_base", lambda it: judge_call(JudgeConfig(api_base=it), VerdictRequest("openai/m", (), {}, 1))["api_base"]),
    ("api.base", lambda it: LiteLlmEngine("openai/x", ApiConfig(base=it)).request([], [], Sampling(max_tokens=1))["api_base"]),
    ("agent.url", lambda it: redaction.resolve_references(Remote(it)._url, "agent.url")),
    ("trackers.planted.args.token", _tracker),
    ("env.sandbox.args.token", lambda it: vars(provider_of(SandboxConfig(provider="planted", args={"token": it})))["token"]),
])  # fmt: skip
def test_every_address_and_argument_may_be_a_reference(key: str, used: Callable[[str], object]) -> None:
    assert used("http://h/${env:WITHIN}") == f"http://h/{PLANTED['within']}"
    assert redact(PLANTED["within"]) == REDACTED
    with pytest.raises(ConfigError, match=f"{re.escape(key)}: the environment variable NOWHERE_SET is not set"):
        used("http://${env:NOWHERE_SET}/")


def test_an_actor_of_ray_redacts_what_goes_to_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    guard_process({"api": {"base": f"http://u:{PLANTED['url']}@h"}})
    guard_process()
    print(PLANTED["url"], PLANTED["variable"])
    print(PLANTED["url"], file=sys.stderr)
    assert (out.getvalue(), err.getvalue()) == (f"{REDACTED} {REDACTED}\n", f"{REDACTED}\n")


class Leaky(ToolEnv):
    id, summary = "t/Leaky-v0", "says what it was given"

    def __init__(self, *, token: Any = "", **base: Any) -> None:
        super().__init__(**base)
        self.token = token


def test_parameters_of_an_environment_may_be_references_and_stay_references_until_it_is_built() -> None:
    give(Leaky, "leaky-by-reference")
    pair = (1, 2)
    ref = EnvRef("given:leaky-by-reference", {"token": {"a": ["x${env:WITHIN}", "env:REFERRED"], "pair": pair}})
    assert redact(PLANTED["reference"]) == PLANTED["reference"]
    assert cast(Any, ref.build()).token == {"a": [f"x{PLANTED['within']}", PLANTED["reference"]], "pair": pair}
    assert redact(PLANTED["reference"]) == REDACTED and found_in(str(ref)) == []
    plain: Any = EnvRef("given:leaky-by-reference", {"token": pair}).build()
    assert plain.token is pair, "what refers to nothing stays as it is"
    with pytest.raises(ConfigError, match=r"env\.params\.token: the environment variable NOWHERE_SET is not set"):
        EnvRef("given:leaky-by-reference", {"token": "env:NOWHERE_SET"}).build()


def test_a_client_of_an_environment_s_server_reads_none_of_its_variables() -> None:
    give(Leaky, "leaky-served")
    offer = EnvOffer(EnvRef("given:leaky-served", {"token": "env:REFERRED"}))
    assert cast(Any, offer.build(EnvRequest("given:leaky-served"))).token == PLANTED["reference"], "the owner's own reference"
    wrappers = [{"name": "system_prompt", "args": {"text": "${env:SOME_API_KEY}"}}]
    for more in ({"params": {"token": ["env:SOME_API_KEY"]}}, {"wrappers": wrappers}):
        with pytest.raises(CatalogError, match=r"(params|wrappers).*a client has no variables of the server's machine"):
            offer.build(EnvRequest("given:leaky-served", **more))


@pytest.mark.parametrize(("row", "refused"), [
    ({"env": {"id": "key_value", "params": {"x": ["env:REFERRED"]}}}, None),
    ({"env": [{"id": "key_value", "wrappers": [{"name": "w", "args": {"x": "${env:WITHIN}"}}]}]}, None),
    ({"env": {"id": "key_value"}, "trackers": [{"name": "wandb", "args": {"x": "env:REFERRED"}}]}, None),
    ({"env": {"id": "key_value"}, "api": {"base": "http://${env:WITHIN}@h"}}, None),
    ({"env": {"id": "key_value"}, "model": {"path": "env:REFERRED"}}, "model.path = 'env:REFERRED': a reference"),
    ({"env": {"id": "key_value"}, "engine_args": {"key": "a${env:WITHIN}"}}, "engine_args.key = 'a${env:WITHIN}': a ref"),
    ({"env": {"id": "key_value"}, "name": "a-${env:REFERRED}"}, "name = 'a-${env:REFERRED}': a reference"),
    ({"env": {"id": "key_value"}, "name": "$REFERRED"}, "name = '$REFERRED': shell variables and"),
    ({"env": {"id": "key_value"}, "out": "~nobody_here/x"}, "out = '~nobody_here/x': shell variables and"),
    ({"env": {"id": "key_value"}, "out": "${SCRATCH}/runs"}, "out = '${SCRATCH}/runs': shell variables and"),
    ({"env": {"id": "key_value"}, "model": {"path": "$HOME/m"}}, "model.path = '$HOME/m': shell variables and"),
    ({"env": {"id": "key_value"}, "api": {"base": "http://${ env:WITHIN }@h"}}, "http://${ env:WITHIN }@h': not a valid ref"),
    ({"env": {"id": "key_value", "params": {"x": "${oc.env:REFERRED}"}}}, "env.params.x = '${oc.env:REFERRED}': not a valid ref"),
    ({"env": {"id": "key_value", "params": {"x": "it costs $5, ${ENV} says"}}}, None),
    ({"env": {"id": "key_value", "params": {"x": "env:NOWHERE_SET"}}}, "env.params.x: the environment variable NOWHERE_SET"),
])  # fmt: skip
def test_a_reference_is_resolved_or_refused_by_its_key_before_a_run(row: dict[str, Any], refused: str | None) -> None:
    config = config_from({"model": {"path": "m"}} | row)
    with nullcontext() if refused is None else pytest.raises(ConfigError, match=re.escape(refused)):
        check_references(config)


class Doorkeeper(LoopbackServer):
    """Writes down who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.who: list[str | None] = []

    def handle(self, handler: Any) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.who.append(handler.headers.get("Authorization"))
        self.send(handler, json.dumps(completion({"role": "assistant", "content": "hi"}, body, True)))


async def test_a_password_in_an_address_reaches_the_server_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of litellm's two ways to ask, the asynchronous one fails on an address with a password in it."""
    pytest.importorskip("litellm")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-provider-0123456789")
    password = "p@ss/word-0123456789"
    with Doorkeeper() as server:
        base = f"http://me:{quote(password, safe='')}@127.0.0.1:{server.http.server_port}/v1"
        engine = LiteLlmEngine("openai/x", ApiConfig(base=base, retries=0))
        ids = engine.renderer.start([Message("user", "go")], [])
        assert len((await engine.generate(ids, Sampling(max_tokens=4), "one")).token_ids) == 1
        judge = Judge(JudgeConfig(api_base=base))
        with pytest.raises(JudgeFault, match="is not JSON"):  # it answers "hi"
            judge._attempt(VerdictRequest("openai/x", ({"role": "user", "content": "a"},), {"type": "object"}, 4))
        user = ModelUser("tea", model="openai/x", api_base=base)
        assert await user.reply([Message("assistant", "hello")]) == "hi"
        _ask(ApiModel("k", "api.base", base, UserModel("openai/x", {"api_base": base}).request([])))
    raw = "Basic " + b64encode(f"me:{password}".encode()).decode()
    assert server.who == [raw] * 4
    assert redact(f"{base} {raw} {password}") == f"{base.replace(quote(password, safe=''), REDACTED)} Basic {REDACTED} {REDACTED}"


ECHOES = """
import os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
server = MCPServer("leaky")

@server.tool()
def text() -> str:
    return f"the key is {os.environ['LEAKY_KEY']}"

@server.tool()
def table() -> dict[str, dict[str, str]]:
    return {"deep": {"key": os.environ["LEAKY_KEY"]}}

@server.tool()
def fail() -> str:
    raise ToolError(f"401: {os.environ['LEAKY_KEY']} is refused")

@server.tool()
def die() -> str:
    print(f"ends with {os.environ['LEAKY_KEY']}", file=sys.stderr, flush=True)
    os._exit(3)

server.run("stdio")
"""


class Seeded(Leaky):
    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "go")]

    def make_task(self, seed: int, split: str) -> Task:
        return Task(id="t", seed=seed)


async def test_secrets_in_a_servers_answers_are_in_nothing_that_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Text, structured content, an error answer and the end of a server that prints its key."""
    pytest.importorskip("mcp")
    (tmp_path / "leaky.py").write_text(ECHOES)
    learn({"tools": {"mcp": {"leaky": {"env": {"LEAKY_KEY": PLANTED["tool"]}}}}})
    config = McpServerConfig(command=[sys.executable, str(tmp_path / "leaky.py")], env={"LEAKY_KEY": PLANTED["tool"]})
    env = Seeded()
    env.add_source(McpSource("leaky", config))
    await env.areset(seed=0)
    answers = []
    with pytest.raises(EnvError) as dead:
        for number, name in enumerate(("text", "table", "fail", "die")):
            call = ToolCall(name, {}, f"call_{number}", raw="")
            answers.append((await env.astep(Message("assistant", "", (call,))))[0][0].content)
    await env.aclose()
    assert len(answers) == 3 and all(REDACTED in answer for answer in answers) and found_in(str(answers)) == []
    folder = RunFolder(tmp_path / "run")
    folder.trajectories.mkdir(parents=True)
    folder.write_trajectories("step_000001", [env.trajectory])
    kept = (folder.trajectories / "step_000001.jsonl").read_text()
    assert "401: [redacted] is refused" in kept and found_in(kept) == []
    assert "it wrote: ends with" in str(dead.value) and found_in(str(dead.value) + caplog.text) == []


def test_a_task_that_holds_a_secret_is_one_task_before_and_after_its_episodes_were_written() -> None:
    """A resumed evaluation counted it twice, and left both out of pass@k for too few samples."""
    remember(said := 'pg"pass1234')
    played = [Trajectory("e", Task("t", 0, data={"password": said}), member=member, success=True) for member in (0, 1)]
    read = Trajectory.from_json(json.loads(redact(json.dumps(played[0].to_json()))))
    report = make_report([read, played[1]], 2)
    assert report["tasks"] == 1 and report["pass@2"]["mean"] == 1.0
