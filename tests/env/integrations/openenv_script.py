"""Run by test_integrations.py with an interpreter that has openenv-core: a real server, a real client, both ways."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.generic_client import GenericEnvClient

from agentrl.catalog import EnvRef
from agentrl.env.integrations.openenv import OpenEnv, openenv_app
from agentrl.errors import EnvError
from agentrl.reward import compile_spec, load_spec
from agentrl.trajectory import Message, ToolCall


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
        for turn in ref.build().gold_turns(task):
            calls = [{"name": c.name, "arguments": c.arguments} for c in turn.tool_calls]
            text = turn.content + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            result = await one.step({"text": text})
        other = await two.step({"text": "nothing"})
        return {"reward": result.reward, "done": result.done, "other": other.reward}


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
    return {
        "state": env.trajectory.state,
        "terminated": env.trajectory.terminated,
        "unreachable": unreachable,
    }


async def main() -> None:
    print(json.dumps({"export": await export(), "import": await imported()}))


asyncio.run(main())
