"""An environment as a Model Context Protocol server, so that any MCP client can act in it."""

from __future__ import annotations

import asyncio
import json
import socket
from importlib.util import find_spec
from typing import Any

from agentrl.env.base import ToolEnv
from agentrl.errors import ConfigError, DependencyError, EnvError
from agentrl.trajectory import Message, ToolCall

HOST = "127.0.0.1"
START, ANSWER = "start_episode", "final_answer"

_OWN_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    START: (
        "Start an episode on the task of a seed; returns the task. The current episode ends.",
        {"type": "object", "properties": {"seed": {"type": "integer"}}, "additionalProperties": False},
    ),
    ANSWER: (
        "Say something to the user; if the user has nothing to add, this ends the episode.",
        {
            "type": "object",
            "properties": {"text": {"type": "string"}},
            "required": ["text"],
            "additionalProperties": False,
        },
    ),
}


class Served:
    """One environment behind a server: one episode at a time, one call after another."""

    def __init__(self, env: ToolEnv, seed: int, split: str) -> None:
        """Raises EnvError if a tool of the environment has the name of one of the server's own tools."""
        taken = [name for name in _OWN_TOOLS if name in env.toolbox]
        if taken:
            raise EnvError(f"{env.id}: a served environment cannot have a tool called {taken[0]!r}")
        self.env, self.seed, self.split = env, seed, split
        self._turns = asyncio.Lock()
        self._over = True

    async def start(self, seed: int) -> str:
        """Start an episode; returns the opening messages as text."""
        observation, _ = await self.env.areset(seed=seed, options={"split": self.split})
        self._over = False
        return "\n\n".join(f"{message.role}: {message.content}" for message in observation)

    def tools(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(name, description, input schema) of the environment's tools and the server's own."""
        functions = [schema["function"] for schema in self.env.toolbox.schemas()]
        env_tools = [(f["name"], f.get("description", ""), f["parameters"]) for f in functions]
        return [*env_tools, *((name, text, schema) for name, (text, schema) in _OWN_TOOLS.items())]

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Make one call; returns (text, whether it is an error)."""
        async with self._turns:
            if name == START:
                return await self.start(int(arguments.get("seed", self.seed))), False
            if self._over:
                return f"the episode is over; call {START} for another one", True
            if name == ANSWER:
                return await self._step(Message("assistant", str(arguments.get("text", "")))), False
            text = await self._step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))
            return text, self.env.trajectory.turns[-1].results[-1].error is not None

    async def _step(self, message: Message) -> str:
        observation, reward, terminated, truncated, info = await self.env.astep(message)
        self._over = terminated or truncated
        texts = [item.content for item in observation]
        if self._over:
            end = {"episode": "over", "stop": info["stop"]}
            if self.env.scorer is not None:
                end["reward"] = reward
            texts.append(json.dumps(end))
        return "\n".join(texts)


def build_server(served: Served, instructions: str) -> Any:
    """The SDK's low-level server over one environment. Raises DependencyError without the SDK."""
    if find_spec("mcp") is None:
        raise DependencyError("agentrl env serve --mcp needs the MCP SDK: pip install 'agentrl[mcp]'")
    import mcp_types as types
    from mcp.server.lowlevel import Server

    async def on_list_tools(context: Any, params: Any) -> Any:
        listed = [types.Tool(name=n, description=d, input_schema=s) for n, d, s in served.tools()]
        return types.ListToolsResult(tools=listed)

    async def on_call_tool(context: Any, params: Any) -> Any:
        text, is_error = await served.call(params.name, dict(params.arguments or {}))
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    return Server(served.env.id, instructions=instructions, on_list_tools=on_list_tools, on_call_tool=on_call_tool)


def serve_mcp(env: ToolEnv, *, seed: int, split: str, port: int | None) -> None:
    """Serve one environment until the client leaves (stdio) or Ctrl-C (HTTP on 127.0.0.1:`port`, path /mcp).

    An episode on `seed` is open from the start; its task is in the server's instructions. Over HTTP all
    clients share one episode.
    """
    asyncio.run(_serve(env, seed, split, port))


def _listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1:`port`. Raises ConfigError if the port is not available."""
    try:
        return socket.create_server((HOST, port))
    except (OSError, OverflowError) as problem:
        raise ConfigError(f"--http {port}: cannot listen on {HOST}:{port}: {problem}; try another port") from problem


async def _serve(env: ToolEnv, seed: int, split: str, port: int | None) -> None:
    served = Served(env, seed, split)
    listener = None if port is None else _listen(port)
    server = build_server(served, await served.start(seed))
    try:
        if listener is None:
            from mcp.server.stdio import stdio_server

            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
        else:
            import uvicorn

            from agentrl.serving import uvicorn_config

            app = server.streamable_http_app()
            config = uvicorn_config(app, HOST, lifespan="on")
            await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        if listener is not None:
            listener.close()
        await env.aclose()
