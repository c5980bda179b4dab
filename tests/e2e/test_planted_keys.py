"""Keys planted wherever a run and an evaluation may hold one are left in config.toml alone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.utils import redaction
from tests.conftest import proof
from tests.e2e.inside import logging_kept
from tests.rollout.loopback import Answer, Loopback

pytestmark = [proof, pytest.mark.timeout(500)]

PLAIN = {name: f"plain-{name}-0123456789abcdef" for name in ("param", "flag", "equals", "base")}
REFERRED = {name: f"referred-{name}-0123456789abcdef" for name in ("provider", "server", "judge", "tracker", "within", "given")}
PLANTED = {**PLAIN, **REFERRED}

ENV = '''
import logging
import sys

from agentrl.env import Message, Task, ToolCall, ToolEnv
from agentrl.env import tool


class Leaky(ToolEnv):
    """Say 1."""

    id = "my/Leaky-v0"
    summary = "repeats its own token"

    def __init__(self, *, service_token="", **base):
        super().__init__(**base)
        self.service_token = service_token

    def make_task(self, rng_seed, split):
        return Task(f"leaky/{split}/{rng_seed}", rng_seed, split, {"who": rng_seed, "split": split}, {"answer": "1"})

    def prompt(self, task):
        print("printed", self.service_token, file=sys.stderr, flush=True)
        logging.getLogger("leaky").error("logged %s", self.service_token)
        return [Message("user", f"Task {task.seed} of {task.split}.")]

    @tool(read_only=True)
    async def look(self) -> str:
        """look"""
        return f"the token is {self.service_token}"

    @tool(read_only=True)
    async def broken(self) -> str:
        """fail"""
        raise RuntimeError(f"no such {self.service_token}")

    def state(self):
        return {"headers": f"token: {self.service_token}"}

    def gold_turns(self, task):
        return [Message("assistant", tool_calls=(ToolCall("look", {}), ToolCall("leak", {}))), Message("assistant", "1")]
'''

SERVER = """
import json, os, sys
said = " ".join([*sys.argv, os.environ["SERVER_KEY"]])
print("begun with", said, file=sys.stderr, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "leaky", "version": said}}
    tools = {"tools": [{"name": "leak", "description": "leak", "inputSchema": {"type": "object", "properties": {}}}]}
    text = {"content": [{"type": "text", "text": said}]}
    found = {"initialize": about, "tools/list": tools, "tools/call": text, "ping": {}}.get(asked["method"])
    answer = {"result": found} if found is not None else {"error": {"code": -32601, "message": "no such method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""

TRACKER = """
from pathlib import Path

from agentrl.run.trackers import TRACKERS, Tracker


@TRACKERS.register("leaky")
class Leaky(Tracker):
    def __init__(self, run, token=""):
        Path("tracker").write_text(f"{len(token)} {token[:8]}")
        raise ConnectionError(f"401: {token} is not known")

    def row(self, phase, step, values): ...

    def close(self, status, summary): ...
"""

CONFIG = """
name = "run"
steps = 1
trackers = [{{ name = "tensorboard" }}, {{ name = "leaky", args = {{ token = "env:TRACKER" }} }}]
trajectories_every = 1
engine = "embedded"
env = {{ id = "leaky", reward = "spec.json", params = {{ service_token = "{param}" }} }}
model.init = {{ layers = 1, hidden = 16, mlp = 16, heads = 2, kv_heads = 1, head_dim = 8 }}
sft = {{ min_steps = 1, max_steps = 1, gate = 0.0, gate_every = 1, gate_tasks = 1, batch = 2 }}
rollout = {{ groups = 1, group_size = 2, max_turns = 2, max_turn_tokens = 8 }}
algorithm.minibatch = 2
cluster.backend = "inline"
eval = {{ tasks = 1, every = 0 }}
health.lint = false
reward.judge = {{ api_base = "http://${{env:WITHIN}}:${{env:JUDGE}}@127.0.0.1:{port}/v1", cache = "verdicts" }}
api.base = "http://me:{base}@127.0.0.1:{port}/v1"
[tools.mcp.one]
command = ["{python}", "server.py", "--api-key", "{flag}", "--token={equals}"]
env = {{ SERVER_KEY = "env:SERVER" }}
"""

SPEC = {
    "agentrl_reward": 1,
    "name": "marked",
    "root": {"op": "sum", "of": [
        {"use": "cost.tokens", "weight": 0.5, "args": {"max": 100}},
        {"use": "judge", "weight": 0.5, "args": {"model": "openai/judge-2026-01-01", "prompt": "Mark:\n{transcript}"}},
    ]},
    "success": {"use": "number.close", "args": {"expect": {"$": "/task/gold/answer"}}},
}  # fmt: skip


class Echo(Loopback):
    """A provider that repeats what it was sent: a judge's reasons, a policy's calls, an error's body."""

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.keys: set[str] = set()
        self.now = threading.local()  # of the request of this thread

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        self.now.told = f"{handler.headers.get('Authorization', '')} {handler.path}"
        with self.lock:
            self.keys.add(self.now.told)
        super().handle(handler)

    def reply(self, body: dict[str, Any], number: int) -> Answer:
        text, told = json.dumps(body["messages"]), self.now.told
        if body["model"].startswith("judge"):
            return json.dumps({"score": 0.5, "reason": f"you sent {told}"})
        if "Task 1 " in text or "Mark" in text:
            return {"status": 400, "message": f"Incorrect API key provided: {told} {REFERRED['provider']}"}
        if any(row["role"] == "tool" for row in body["messages"]):
            return f"1 {told} {REFERRED['provider']}"
        calls = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            for n, name in enumerate(("look", "leak", "broken")[: 3 if "Task 2 " in text else 2])
        ]
        return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("_known", "_ordered", "_read"):
        monkeypatch.setattr(redaction, name, type(getattr(redaction, name))())
    work, home, temporary = tmp_path / "work", tmp_path / "home", tmp_path / "temporary"
    for folder in (work / "envs" / "leaky", work / "plugins", home, temporary):
        folder.mkdir(parents=True)
    (work / "envs" / "leaky" / "env.py").write_text(ENV)
    (work / "plugins" / "tracker.py").write_text(TRACKER)
    (work / "server.py").write_text(SERVER)
    (work / "spec.json").write_text(json.dumps(SPEC))
    monkeypatch.chdir(work)
    for name, value in {"HOME": str(home), "TMPDIR": str(temporary), "OPENAI_API_KEY": REFERRED["provider"],
                        "SERVER": REFERRED["server"], "JUDGE": REFERRED["judge"], "TRACKER": REFERRED["tracker"],
                        "WITHIN": REFERRED["within"], "GIVEN": REFERRED["given"]}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    factory = logging.getLogRecordFactory()
    with logging_kept():
        yield tmp_path
    logging.setLogRecordFactory(factory)


def found_under(folder: Path, given: Path) -> dict[str, set[str]]:
    """The names of the keys in each file, but the config that was given."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path != given:
            content = path.read_bytes()
            if names := {name for name, key in PLANTED.items() if key.encode() in content}:
                found[str(path.relative_to(folder))] = names
    return found


def test_no_key_is_anywhere_but_in_the_private_config(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if find_spec("mcp") is None or find_spec("litellm") is None:  # litellm is only imported as the run does it
        pytest.skip("needs agentrl[mcp] and agentrl[litellm]")
    given = place / "work" / "c.toml"
    with Echo() as server:
        given.write_text(CONFIG.format(**PLAIN, python=sys.executable, port=server.http.server_port))
        assert main(["train", "c.toml"]) == 0
        evaluated = main(["eval", "--config", "c.toml", "--model", "api:openai/x", "-n", "3", "--split", "heldout", "--out",
                          "judged", "health.preflight=false", "api.retries=0"])  # fmt: skip
        sent = " ".join(server.keys)
    assert evaluated in (0, 1) and ("Bearer" in sent or "Basic" in sent)
    said = capfd.readouterr()
    run = place / "work" / "runs" / "run"
    assert (place / "work" / "tracker").read_text() == f"{len(REFERRED['tracker'])} referred", "the reference was resolved"
    rows = [json.loads(line) for line in (place / "work" / "judged" / "trajectories.jsonl").read_text().splitlines()]
    told = json.dumps(rows)
    assert [
        name for name in ("the token is [redacted]", "Incorrect API key provided: ", "1 Basic [red") if name not in told
    ] == []
    verdicts = [path.read_text() for path in (place / "work" / "verdicts").rglob("*.json")]
    assert verdicts and all("you sent B" in text and "[redacted]" in text for text in verdicts)
    private = {str(path.relative_to(place)) for path in (run / "config.toml", *(run / "history").glob("*")) if path.exists()}
    found = found_under(place, given)
    assert {path: names for path, names in found.items() if path not in private} == {}
    assert found[str((run / "config.toml").relative_to(place))] == set(PLAIN)
    assert {stat.S_IMODE((place / path).stat().st_mode) for path in private} == {0o600}
    streams = {"stdout": said.out, "stderr": said.err}
    assert {(name, where) for name, key in PLANTED.items() for where, text in streams.items() if key in text} == set()


def test_no_key_is_in_what_processes_of_ray_leave(place: Path) -> None:
    """Training processes and a worker that Ray started: the same places, and Ray's own logs."""
    if find_spec("mcp") is None or find_spec("litellm") is None:
        pytest.skip("needs agentrl[mcp] and agentrl[litellm]")
    given, session = place / "work" / "c.toml", Path(tempfile.mkdtemp(prefix="hk-", dir="/tmp"))  # a short path, for sockets
    on_ray = ["cluster.backend=ray", "cluster.startup_timeout=180.0", "rollout.workers=1", "env.params.service_token=env:GIVEN"]
    judged = ["--config", "c.toml", "--model", "api:openai/x", "-n", "3", "--split", "heldout", "--out", "judged"]
    variables = {**os.environ, "RAY_TMPDIR": str(session), "PYTHONPATH": str(Path(__file__).parents[2])}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        run = [sys.executable, "-m", "agentrl", *words]
        return subprocess.run(run, env=variables, capture_output=True, text=True, timeout=400, check=False)

    try:
        with Echo() as server:
            given.write_text(CONFIG.format(**PLAIN, python=sys.executable, port=server.http.server_port))
            trained = command("train", "c.toml", *on_ray)
            evaluated = command("eval", *judged, *on_ray, "health.preflight=false", "api.retries=0")
        assert (trained.returncode, evaluated.returncode in (0, 1)) == (0, True), trained.stderr + evaluated.stderr
        run, private = place / "work" / "runs" / "run", {"work/runs/run/config.toml"}
        assert found_under(place, given).keys() <= private | {
            f"work/runs/run/history/{one.name}" for one in run.glob("history/*")
        }
        assert found_under(session, given) == {}
        files = [path for path in run.rglob("*") if path.is_file() and path.name in ("config.toml", "summary.json", "log.txt")]
        assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in files if path.name == "config.toml"} == {0}
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        rows = (place / "work" / "judged" / "trajectories.jsonl").read_text()
        assert "the token is [redacted]" in rows
        logs = "".join(path.read_text(errors="replace") for path in session.rglob("worker-*") if path.is_file())
        assert "printed [redacted]" in logs and "logged [redacted]" in logs, "a worker printed, and its output was searched"
        streams = trained.stdout + trained.stderr + evaluated.stdout + evaluated.stderr
        assert {name for name, key in PLANTED.items() if key in streams} == set()
    finally:
        shutil.rmtree(session, ignore_errors=True)
