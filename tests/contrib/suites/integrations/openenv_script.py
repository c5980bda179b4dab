"""Run by test_integrations.py with an interpreter that has openenv-core: a real server, a real client, both ways."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient

from agentrl.contrib.remote_envs.openenv import OpenEnv, openenv_app
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.catalog import EnvRef
from agentrl.reward import compile_spec, load_spec
from agentrl.utils.errors import EnvError


def serve(app) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


async def export() -> dict[str, object]:
    ref = EnvRef("key_value", {"calls": 2})
    url = serve(openenv_app(ref.build, compile_spec(load_spec(ref.default_reward()))))
    task = ref.build().make_task(5, "train")
    async with GenericEnvClient(url) as one, GenericEnvClient(url) as two:
        first = await one.reset(seed=5)
        await two.reset(seed=6)
        assert first.observation["messages"][-1]["content"] == task.data["goal"]
        assert [t["function"]["name"] for t in first.observation["tools"]] == ["get", "set", "list", "add"]
        schema = json.load(urllib.request.urlopen(f"{url}/schema"))
        assert set(schema) == {"action", "observation", "state"} and "text" in schema["action"]["properties"]
        for turn in ref.build().gold_turns(task):
            calls = [{"name": c.name, "arguments": c.arguments} for c in turn.tool_calls]
            text = turn.content + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            result = await one.step({"text": text})
        assert (await one.state())["step_count"] == len(ref.build().gold_turns(task))
        other = await two.step({"text": "nothing"})
        try:
            await two.step({"txt": "nothing"})
        except RuntimeError as problem:
            refused = str(problem)
        return {"reward": result.reward, "done": result.done, "other": other.reward, "refused": refused}


async def exported_behind_a_token() -> dict[str, object]:
    """`agentrl env serve --http`: the real client plays at the address that is printed for it, and nowhere else."""
    from agentrl.contrib.remote_envs.server import EnvApp, EnvOffer
    from agentrl.contrib.remote_envs.sessions import Secret, SessionLimits

    ref, secret = EnvRef("key_value", {"calls": 2}), Secret("a-token-of-the-tests-only")
    url = serve(EnvApp(EnvOffer(ref), secret, SessionLimits(episodes=1)).asgi())
    task = ref.build().make_task(5, "heldout")
    refused = []
    for wrong in (url, f"{url}/openenv/{secret.token}"):
        try:
            await GenericEnvClient(wrong).connect()
        except ConnectionError as problem:
            refused.append("403" in str(problem) or "404" in str(problem) or str(problem))
    async with GenericEnvClient(f"{url}/openenv/{secret.player}") as client:
        seen = [(await client.reset(seed=5, split="heldout")).observation]
        async with GenericEnvClient(f"{url}/openenv/{secret.player}") as more:
            try:
                await more.reset(seed=1)
            except RuntimeError as problem:
                full = str(problem)
        for turn in ref.build().gold_turns(task):
            calls = [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
            result = await client.step({"text": turn.content, "tool_calls": calls})
            seen.append(result.observation)
        seen.append(await client.state())
    gold = [name for name in ("gold", "env_state") if name in json.dumps(seen)]
    return {"reward": result.reward, "done": result.done, "refused": refused, "full": full, "gold": gold}


class Guess(Action):
    n: int


class Hint(Observation):
    text: str


class Game(Environment):
    """Guess a number between 1 and 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.tries = 1, 0

    def reset(self, seed=None, episode_id=None, **more):
        self.number, self.tries = 1 + (seed or 0) % 9, 0
        return Hint(text="guess a number from 1 to 9")

    def step(self, action, timeout_s=None, **more):
        self.tries += 1
        if action.n == self.number:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if action.n < self.number else "lower", reward=0.0)

    @property
    def state(self):
        return State(step_count=self.tries)


async def imported() -> dict[str, object]:
    env = OpenEnv(url=serve(create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=4)))
    observation, _ = await env.areset(seed=2)
    number = 1 + env.task.data["seed"] % 9
    assert observation[0].content == "guess a number from 1 to 9"

    async def act(**arguments) -> str:
        turn = Message("assistant", tool_calls=(ToolCall("act", arguments),))
        return (await env.astep(turn))[0][0].content

    assert "wrong_type" in await act(n="two") and "missing_argument" in await act()
    assert await act(n=0) == "higher" and await act(n=number) == "right"
    gone = OpenEnv(url="http://127.0.0.1:9", timeout=2.0)
    try:
        await gone.areset(seed=0)
    except EnvError as fault:
        unreachable = str(fault)
    return {"state": env.trajectory.state, "terminated": env.trajectory.terminated, "unreachable": unreachable}


async def imported_tools() -> dict[str, object]:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Sums(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("sums")

            @server.tool
            def add(a: int, b: int) -> int:
                """the sum of two numbers"""
                return a + b

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **more):
            return Observation(done=False, reward=0.0)

        def _step_impl(self, action, timeout_s=None, **more):
            raise ValueError("only tools")

        @property
        def state(self):
            return State(step_count=0)

    env = OpenEnv(
        url=serve(create_fastapi_app(Sums, CallToolAction, CallToolObservation, max_concurrent_envs=4)), name="theirs/Sums-v0"
    )
    await env.areset(seed=2)
    assert env.trajectory.env_id == "theirs/Sums-v0"
    answers = []
    for arguments in ({"a": 2, "b": 3}, {"a": "x", "b": 3}):
        turn = Message("assistant", tool_calls=(ToolCall("add", arguments),))
        answers.append((await env.astep(turn))[0][0].content)
    await env.aclose()
    return {"tools": env.trajectory.tools, "answers": answers}


async def main() -> None:
    parts = {"export": export, "token": exported_behind_a_token, "import": imported, "tools": imported_tools}
    print(json.dumps({name: await part() for name, part in parts.items()}))


asyncio.run(main())
