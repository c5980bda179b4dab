"""The conformance suite of the Model Context Protocol against `agentrl env serve --mcp`, and against the client of `tools.mcp`.

`make peers` plays it (AGENTRL_PEERS=1), with npm: the suite and the Node.js that it needs are installed below build/peers.
`SERVER` and `CLIENT` are the tables: what is equal, what is refused by name (the method is answered with "Method not found", or
the error names the reason), and what is not offered.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(os.environ.get("AGENTRL_PEERS") != "1", reason="`make peers` plays it"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm"),
    pytest.mark.timeout(900),
]
pytest.importorskip("mcp", reason="needs the MCP SDK: pip install 'agentrl[mcp]'")
from tests.contrib.mcp.test_mcp import serving  # noqa: E402 - it imports the SDK

PACKAGES = ("@modelcontextprotocol/conformance@0.1.16", "node@22")
FOLDER = ROOT / "build" / "peers" / "mcp"

EQUAL, REFUSED, NOT_OFFERED = "equal", "refused by name", "not offered"
SERVER = {
    **dict.fromkeys([
        "server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-image", "tools-call-error",
        "json-schema-2020-12", "server-sse-multiple-streams", "dns-rebinding-protection"
    ], EQUAL),
    **dict.fromkeys([
        "logging-set-level", "completion-complete", "tools-call-with-logging", "resources-list", "resources-read-text",
        "resources-read-binary", "resources-templates-read", "resources-subscribe", "resources-unsubscribe", "prompts-list",
        "prompts-get-simple", "prompts-get-with-args", "prompts-get-embedded-resource", "prompts-get-with-image"
    ], REFUSED),
    **dict.fromkeys([  # of mixed content, text and an image are offered; a resource is not
        "tools-call-audio", "tools-call-embedded-resource", "tools-call-mixed-content", "tools-call-with-progress",
        "tools-call-sampling", "tools-call-elicitation", "elicitation-sep1034-defaults", "elicitation-sep1330-enums",
        "server-sse-polling"
    ], NOT_OFFERED),
}  # fmt: skip
CLIENT = {
    **dict.fromkeys(["initialize", "tools_call", "sse-retry"], EQUAL),
    "elicitation-sep1034-client-defaults": REFUSED,
    **dict.fromkeys(["auth/metadata-default", "auth/basic-cimd", "auth/scope-step-up", "auth/pre-registration"], NOT_OFFERED),
}
"""Of the 22 scenarios of OAuth four are played: the client authorizes nowhere, so all end alike, in an error with HTTP 401."""

ENV = '''
"""The tools that the suite calls."""

from typing import Any

from agentrl.env import Message, Task, ToolEnv
from agentrl.utils.errors import ToolError
from agentrl.data.images import Image
from agentrl.env import Tool, tool

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}


def red() -> Image:
    from PIL import Image as Pictures

    return Image.of(Pictures.new("RGB", (1, 1), (255, 0, 0)))


async def anything(**arguments: Any) -> str:
    return "ok"


class Conformance(ToolEnv):
    """The tools that the suite calls."""

    id = "test/Conformance-v0"
    tools = [Tool.from_schema("json_schema_2020_12_tool", "a tool with a schema of draft 2020-12", SCHEMA, anything)]

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"conformance/{rng_seed}", rng_seed, split, {})

    def prompt(self, task: Task) -> list[Message]:
        return [Message("user", "call the tools")]

    @tool
    async def test_simple_text(self) -> str:
        """a text"""
        return "This is a simple text response for testing."

    @tool
    async def test_image_content(self) -> Image:
        """an image"""
        return red()

    @tool
    async def test_multiple_content_types(self) -> list[Any]:
        """a text and an image"""
        return ["Multiple content types test:", red()]

    @tool
    async def test_error_handling(self) -> str:
        """an error"""
        raise ToolError("This tool intentionally returns an error for testing")
'''

PLAYS = """
import asyncio, sys
from agentrl.config.schema import McpServerConfig
from agentrl.utils.errors import EnvError, ToolError
from agentrl.contrib.mcp.client import McpSource

async def main():
    session = McpSource("suite", McpServerConfig(url=sys.argv[-1], timeout=20.0)).session()
    try:
        for tool in await session.open():
            try:
                print(await tool.invoke(None, {"a": 5, "b": 3} if tool.name == "add_numbers" else {}))
            except ToolError as refusal:
                print(refusal)
    except EnvError as problem:
        sys.exit(str(problem))
    finally:
        await session.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def suite() -> list[str]:
    """The words that begin the suite's command."""
    modules = FOLDER / "node_modules"
    if not (modules / ".bin" / "node").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-save", "--prefix", str(FOLDER), *PACKAGES], check=True, capture_output=True)
    return [str(modules / ".bin" / "node"), str(modules / "@modelcontextprotocol/conformance/dist/index.js")]


def outcomes(folder: Path, asked: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """From the suite's files of results: the outcome of each scenario, and what the suite said of it."""
    found, said = {}, {}
    for file in folder.rglob("checks.json"):
        name = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", str(file.parent.relative_to(folder)))
        name = name if name in asked else name.removeprefix("server-")
        checks = [one for one in json.loads(file.read_text()) if one["status"] == "FAILURE"]
        said[name] = "; ".join(str(one.get("errorMessage") or one.get("description")) for one in checks)
        refused = "-32601" in said[name] or "Elicitation not supported" in said[name]
        found[name] = EQUAL if not checks else REFUSED if refused else NOT_OFFERED
    return found, said


def shown(title: str, table: dict[str, str]) -> str:
    counts = ", ".join(f"{list(table.values()).count(kind)} {kind}" for kind in (EQUAL, REFUSED, NOT_OFFERED))
    return "\n".join([f"\n{title}: {counts}", *(f"  {kind:16} {name}" for name, kind in table.items())])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "envs" / "conformance").mkdir(parents=True)
    (tmp_path / "envs" / "conformance" / "env.py").write_text(ENV)
    words = ("-m", "agentrl", "env", "serve", "conformance", "--mcp", "--http")
    with serving(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}) as url:
        yield url


def test_the_server(suite: list[str], served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    subprocess.run([*suite, "server", "--url", served, "--suite", "all", "-o", str(out)], capture_output=True, timeout=300)
    found, said = outcomes(out, SERVER)
    with capsys.disabled():
        print(shown("agentrl env serve --mcp", {name: found.get(name, "missing") for name in SERVER}))
    assert found == SERVER, {name: said.get(name) for name in found if found[name] != SERVER.get(name)}


def test_the_client(suite: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "client.py").write_text(PLAYS)
    command, found, said = f"{sys.executable} {tmp_path / 'client.py'}", dict[str, str](), dict[str, str]()
    for scenario in CLIENT:
        out = tmp_path / scenario.replace("/", "_")
        done = subprocess.run(
            [*suite, "client", "--command", command, "--scenario", scenario, "-o", str(out), "--verbose"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        one, words = outcomes(out, CLIENT)
        found |= one
        said |= {name: f"{text} {done.stdout[-500:]} {done.stderr[-500:]}" for name, text in words.items()}
    with capsys.disabled():
        print(shown("the client of tools.mcp", {name: found.get(name, "missing") for name in CLIENT}))
    assert found == CLIENT, {name: said.get(name) for name in CLIENT if found.get(name) != CLIENT[name]}
