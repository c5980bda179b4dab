"""An environment served over MCP, to real clients."""

import base64
import json
import socket
import sys
from typing import Any

import pytest

from agentrl.config.schema import McpServerConfig
from agentrl.contrib.remote_envs.mcp_server import Served, build_server, opening
from agentrl.data.images import Image
from agentrl.data.trajectory import Message
from agentrl.env import Task, ToolEnv, tool
from agentrl.env.catalog import EnvRef
from tests.contrib.mcp.test_mcp import env_with, serving
from tests.env.toyenvs import call

SERVE = ["-m", "agentrl.cli.main", "env", "serve", "key_value", "calls=2", "--mcp", "--seed", "3"]


async def solve(client: Any) -> None:
    task = EnvRef("key_value", {"calls": 2}).build().make_task(3, "train")
    listed = [tool.name for tool in (await client.list_tools()).tools]
    assert listed == ["get", "set", "list", "add", "start_episode", "final_answer"]
    assert task.data["goal"] in client.instructions

    async def text(name: str, /, **arguments: Any) -> str:
        return str((await client.call_tool(name, arguments)).content[0].text)

    value = await text("get", key=task.gold["reads"][0])
    assert value == task.gold["answer"] and await text("add", x=int(value)) == value
    wrong = await client.call_tool("add", {"x": "many"})
    assert wrong.is_error and "wrong_type" in wrong.content[0].text
    assert '"episode": "over"' in await text("final_answer", text=value)
    assert "call start_episode" in await text("get", key="a")
    assert "report" in await text("start_episode", seed=5)


async def test_an_environment_served_over_stdio_and_over_http() -> None:
    from mcp import Client, StdioServerParameters

    with serving(*SERVE, "--http") as url:
        for server in (StdioServerParameters(command=sys.executable, args=SERVE), url):
            async with Client(server) as client:
                await solve(client)


def test_a_port_that_cannot_be_had_is_a_mistake_with_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.cli.main import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["env", "serve", "key_value", "--mcp", "--http", port]) == 2
        told = capsys.readouterr()
        assert f"127.0.0.1:{port}" in told.err and "in use" in told.err and "another port" in told.err
    assert main(["env", "serve", "key_value", "--mcp", "--http", "70000"]) == 2
    assert "--http 70000" in capsys.readouterr().err


async def test_the_pictures_of_a_served_environment_are_shown() -> None:
    """color_square is solved over MCP by who sees its picture."""
    from mcp import Client, StdioServerParameters

    serve = ["-m", "agentrl.cli.main", "env", "serve", "color_square", "--mcp", "--seed", "3"]
    async with Client(StdioServerParameters(command=sys.executable, args=serve)) as client:
        [shown] = (await client.call_tool("look", {})).content
        picture = Image.read(base64.b64decode(shown.data))
        color = EnvRef("color_square").build().make_task(3, "train").gold["answer"]
        assert picture.picture().getpixel((28, 28)) is not None and shown.mime_type == "image/png"
        ended = (await client.call_tool("final_answer", {"text": color})).content[0].text
        assert json.loads(ended.splitlines()[-1])["episode"] == "over"
    env = env_with(McpServerConfig(command=[sys.executable, *serve], tools=["look"]))
    await env.areset(seed=0)
    [message] = (await env.astep(call("look")))[0]
    assert message.images == (picture,) and message.content == picture.line, "imported again it is the same"
    await env.aclose()


class Gallery(ToolEnv):
    """An opening with two pictures, a tool with pictures within JSON, and one that fails."""

    id = "test/Gallery-v0"

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(f"gallery/{rng_seed}", rng_seed, split, {})

    def prompt(self, task: Task) -> list[Message]:
        one, two = shade(task.seed), shade(task.seed + 1)
        return [Message("system", "rules"), Message("user", f"first\n{one.line}\nthen\n{two.line}", images=(one, two))]

    @tool
    async def pair(self) -> dict[str, Any]:
        return {"left": shade(7), "n": float("nan")}

    @tool
    async def fail(self) -> None:
        raise RuntimeError("the roof leaks")


def shade(value: int) -> Image:
    from PIL import Image as Pictures

    return Image.of(Pictures.new("RGB", (4, 4), (value, value, value)))


async def test_a_served_opening_shows_its_pictures_and_a_fault_ends_the_episode_only() -> None:
    from mcp import Client

    served = Served(Gallery(), 3, "train")
    async with Client(build_server(served, await opening(served))) as client:
        assert shade(3).line in client.instructions and "call start_episode to be shown" in client.instructions
        kinds = [
            part.text if part.type == "text" else Image.read(base64.b64decode(part.data))
            for part in (await client.call_tool("start_episode", {})).content
        ]
        assert kinds == ["system: rules\n\nuser: first", shade(3), "then", shade(4)]
        text, left = (await client.call_tool("pair", {})).content
        assert json.loads(text.text) == {"left": shade(7).line, "n": "NaN"} and left.data == shade(7).data
        for wrong in ({"seed": "x"}, {"seed": -1}, {"sed": 1}):
            assert (await client.call_tool("start_episode", wrong)).is_error
        assert (await client.call_tool("final_answer", {})).is_error
        failed = await client.call_tool("fail", {})
        assert failed.is_error and "the roof leaks" in failed.content[0].text and "start_episode" in failed.content[0].text
        again = await client.call_tool("pair", {})
        assert again.is_error and "the episode is over" in again.content[0].text
        assert not (await client.call_tool("start_episode", {"seed": 8})).is_error
        assert not (await client.call_tool("pair", {})).is_error
    await served.env.aclose()
