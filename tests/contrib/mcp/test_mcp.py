"""MCP with real server processes on this machine: their tools in an episode."""

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.config.schema import McpServerConfig, ToolsConfig
from agentrl.contrib.mcp.client import McpSource
from agentrl.data.trajectory import Message, StopReason, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.utils.errors import CatalogError, ConfigError, EnvError
from tests.env.toyenvs import Notes, call
from tests.waits import until

SERVER = '''
import asyncio, os, sys
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
stock = {"tea": 3}

@server.tool()
def count(name: str) -> int:
    """how many there are"""
    if name not in stock:
        raise ToolError(f"no {name} here")
    return stock[name]

@server.tool()
def sell(name: str, n: int = 1) -> str:
    stock[name] -= n
    return "sold"

@server.tool()
def pid() -> int:
    return os.getpid()

@server.tool()
def setting() -> str:
    return os.environ.get("SHOP_NAME", "none")

@server.tool()
async def sleep() -> int:
    await asyncio.sleep(60)

if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "shop.py"
    path.write_text(SERVER)
    return path


@pytest.fixture
def stdio(script: Path) -> McpServerConfig:
    return McpServerConfig(command=[sys.executable, str(script)], timeout=30.0)


def env_with(config: McpServerConfig, build: Callable[[], Any] | None = None, name: str = "shop") -> Notes:
    """An environment with the tools of a server, which `build` makes in this process."""
    env = Notes()
    env.add_source(McpSource(name, config, build))
    return env


async def answer(env: Notes, name: str, /, **arguments: Any) -> str:
    content: str = (await env.astep(call(name, **arguments)))[0][0].content
    return content


def gone(pid: int) -> bool:
    return until(lambda: not Path(f"/proc/{pid}").exists(), 20)


async def test_each_episode_has_its_own_session_over_stdio(stdio: McpServerConfig) -> None:
    one, two = env_with(stdio), env_with(stdio)
    await asyncio.gather(one.areset(seed=0), two.areset(seed=1))
    assert one.toolbox.names == ("write", "hang", "quit", "count", "sell", "pid", "setting", "sleep")
    assert await answer(one, "sell", name="tea", n=2) == "sold"
    assert await answer(one, "count", name="tea") == "1"
    assert await answer(two, "count", name="tea") == "3", "the servers are not shared"
    pids = [int(await answer(env, "pid")) for env in (one, two)]
    assert len(set(pids)) == 2
    # Errors of the server and of the arguments reach the model; schemas come from the server.
    assert "no coffee here" in await answer(one, "count", name="coffee")
    assert "missing_argument" in await answer(one, "count")
    assert [t["function"]["name"] for t in one.trajectory.tools][3] == "count"
    await asyncio.gather(one.aclose(), two.aclose())
    assert all([await asyncio.to_thread(gone, pid) for pid in pids]), "a closed episode leaves no process"
    assert one.toolbox.names == ("write", "hang", "quit")


IN_A_NOTEBOOK = """
import asyncio, io, sys
sys.stderr = io.StringIO()  # as a notebook has it, from the SDK's import on
from agentrl.config.schema import McpServerConfig
from agentrl.contrib.mcp.client import McpSource

async def main():
    session = McpSource("shop", McpServerConfig(command=sys.argv[1:])).session()
    print(sorted(tool.name for tool in await session.open()))
    await session.close()

asyncio.run(main())
"""


def test_a_process_whose_stderr_is_no_file_can_start_servers(script: Path) -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NOTEBOOK, sys.executable, str(script)], capture_output=True, text=True)
    assert "count" in done.stdout, done.stderr


def test_the_gymnasium_face_works_too(stdio: McpServerConfig) -> None:
    env = env_with(stdio)
    env.reset(seed=0)
    assert env.step(call("count", name="tea"))[0][0].content == "3"
    with pytest.raises(TypeError, match="another process"):
        env.fork()
    pid = int(env.step(call("pid"))[0][0].content)
    env.step("done")
    assert gone(pid)


@pytest.mark.parametrize(
    ("late", "stop", "unscored"), [({}, StopReason.TOOL_TIMEOUT, True), ({"late": "policy"}, StopReason.MAX_TOOL_TIME, False)]
)
async def test_the_config_says_whose_doing_a_late_call_is(
    stdio: McpServerConfig, late: dict[str, str], stop: StopReason, unscored: bool
) -> None:
    env = env_with(McpServerConfig.model_validate({**stdio.model_dump(), **late}))
    await env.areset(seed=0)
    pid = int(await answer(env, "pid"))
    env.toolbox.replace(env.toolbox["sleep"].with_options(timeout=0.1))
    if unscored:
        with pytest.raises(EnvError, match="sleep"):
            await env.astep(call("sleep"))
    else:
        observation, _, terminated, truncated, info = await env.astep(call("sleep"))
        assert (observation, terminated, truncated) == ([], False, True)
        assert info["error"] == "tool sleep: no answer within 0.1 s"
    assert (env.trajectory.stop, env.trajectory.stop.infrastructure) == (stop, unscored)
    assert await asyncio.to_thread(gone, pid)


async def test_cancelling_while_the_server_starts_leaves_nothing(stdio: McpServerConfig) -> None:
    env = env_with(stdio)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    task = asyncio.create_task(env.areset(seed=0))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.trajectory.stop is StopReason.CANCELLED
    assert set(children.read_text().split()) <= before


@pytest.mark.slow
async def test_servers_that_do_not_start_say_why_and_are_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.contrib.mcp.client._CLOSE_SECONDS", 60.0)
    began = time.monotonic()
    cases = [
        (McpServerConfig(command=["no-such-program-here"]), "no-such-program-here"),
        (McpServerConfig(command=[sys.executable, "-c", "pass"]), "shop"),
        (McpServerConfig(command=["sleep", "30"], timeout=0.3), "no answer within 0.3 s"),
        (McpServerConfig(url="http://127.0.0.1:9/mcp", timeout=5.0), "http://127"),
    ]
    for config, says in cases:
        env = env_with(config)
        with pytest.raises(EnvError, match=says):
            await env.areset(seed=0)
        assert env.log == ["teardown"] and env.trajectory.stop is StopReason.ENV_ERROR
    assert time.monotonic() - began < 50, "a server that hangs at its start was waited for as for an open session's end"
    for config in (McpServerConfig(), McpServerConfig(command=["x"], url="http://y")):
        with pytest.raises(ConfigError, match="either a command"):
            McpSource("shop", config)


@contextmanager
def serving(*args: str, **how: Any) -> Iterator[str]:
    """The address of a server over HTTP: python with `args` and a port; `how` is Popen's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, *args, str(port)], start_new_session=True, **how)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait(20)


async def test_over_http_and_through_a_config(script: Path) -> None:
    with serving(str(script)) as url:
        tools = ToolsConfig(sets=["calculator"], mcp={"shop": McpServerConfig(url=url, tools=["count"])})
        env = pickle.loads(pickle.dumps(EnvRef("key_value", {"calls": 2}, tools=tools))).build()
        await env.areset(seed=0)
        assert env.toolbox.names == ("get", "set", "list", "add", "calculate", "count")
        calls = (ToolCall("count", {"name": "tea"}), ToolCall("calculate", {"expression": "2*3"}))
        assert [m.content for m in (await env.astep(Message("assistant", tool_calls=calls)))[0]] == ["3", "6"]
        await env.aclose()
    with pytest.raises(CatalogError, match="no tool set 'calculater'"):
        EnvRef("key_value", tools=ToolsConfig(sets=["calculater"])).build()


def test_the_tools_section_of_a_config_reaches_the_environment(tmp_path: Path, stdio: McpServerConfig) -> None:
    path = tmp_path / "run.toml"
    words = ", ".join(f'"{word}"' for word in stdio.command)
    path.write_text(
        f'[env]\nid = "key_value"\n[tools]\nsets = ["dates"]\n[tools.mcp.shop]\ncommand = [{words}]\n'
        'tools = ["count", "setting"]\nprefix = "shop_"\nmax_output = 30\ntimeout = 20.0\n'
        'check = "off"\nenv = { SHOP_NAME = "corner" }\n'
    )
    config = load_config(path)
    env = EnvRef.of(config.the_env, config.tools).build()
    env.reset(seed=0)
    assert env.toolbox.names[4:] == ("add_days", "days_between", "weekday", "shop_count", "shop_setting")
    options = env.toolbox["shop_count"].options
    assert (options.timeout, options.max_output) == (20.0, 30)
    turn = Message("assistant", tool_calls=(ToolCall("shop_setting", {}), ToolCall("shop_count", {"name": "tea"})))
    assert [message.content for message in env.step(turn)[0]] == ["corner", "3"]
    # Not checked here: the server's own words about the missing argument reach the policy, cut to max_output.
    refused = json.loads(env.step(call("shop_count"))[0][0].content)
    assert refused["error"] == "tool_error" and "missing argument" not in refused["message"]
    assert "validation error for count" in refused["message"] and len(refused["message"].encode()) <= 4 * 30
    env.close()


async def test_a_server_that_cannot_be_made_and_another_version_of_the_sdk_are_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The latter was "no answer within 60 s", after as many."""
    with pytest.raises(EnvError, match=r"'shop'.*KeyError: 'SHOP'"):
        await asyncio.wait_for(env_with(McpServerConfig(), lambda: {}["SHOP"]).areset(seed=0), 5)
    monkeypatch.delattr("mcp.Client")
    session = McpSource("shop", McpServerConfig(timeout=60.0), build=lambda: None).session()
    with pytest.raises(EnvError, match=r"MCP server 'shop' .*ImportError: cannot import name 'Client'"):
        await asyncio.wait_for(session.open(), 10)
    await session.close()


KEYED = """
import os
from mcp.server import MCPServer
server = MCPServer("keyed")
@server.tool(description="Asks with " + os.environ["KEY"])
def ask(key: str = os.environ["KEY"]) -> str:
    return key
server.run()
"""


async def test_a_secret_in_a_tools_description_is_not_for_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keyed.py").write_text(KEYED)
    monkeypatch.setenv("SHOP_KEY", "Zq9-planted+secret/42==")
    command = [sys.executable, str(tmp_path / "keyed.py")]
    session = McpSource("keyed", McpServerConfig(command=command, env={"KEY": "env:SHOP_KEY"})).session()
    try:
        (tool,) = await session.open()
    finally:
        await session.close()
    function: Any = tool.schema["function"]
    assert function["description"] == "Asks with [redacted]"
    assert function["parameters"]["properties"]["key"]["default"] == "[redacted]"
