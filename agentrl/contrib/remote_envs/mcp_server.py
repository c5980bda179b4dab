"""Serve an environment by the Model Context Protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentrl.contrib.remote_envs.server import open_socket
from agentrl.contrib.toolkit.chat_forms import call_result, tool_list
from agentrl.contrib.toolkit.http_server import LocalServer
from agentrl.data.images import Image
from agentrl.data.trajectory import Message, ToolCall
from agentrl.env.base import ToolEnv
from agentrl.env.toolbox import error_text
from agentrl.env.tools import Tool
from agentrl.utils.errors import AgentrlError, EnvError, need_package
from agentrl.utils.parsing import json_text

HOST = "127.0.0.1"
START, ANSWER = "start_episode", "final_answer"


def _control_tool(name: str, description: str, properties: dict[str, Any], required: Sequence[str] = ()) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return Tool.from_schema(name, description, schema, dict)  # never called: `Served` answers


_STARTS = "Start an episode on the task of a seed; returns the task. The current episode ends."
_SAYS = "Say something to the user; if the user has nothing to add, this ends the episode."
_OWN_TOOLS = {
    START: _control_tool(START, _STARTS, {"seed": {"type": "integer", "minimum": 0}}),
    ANSWER: _control_tool(ANSWER, _SAYS, {"text": {"type": "string"}}, ["text"]),
}
Said = tuple[str, tuple[Image, ...]]
"""A text, and the images whose lines are in it."""


class Served:
    """One environment behind a server, with sequential episodes and calls."""

    def __init__(self, env: ToolEnv, seed: int, split: str) -> None:
        """Raises EnvError if a tool of the environment has the name of a server's own tool."""
        taken = [name for name in _OWN_TOOLS if name in env.toolbox]
        if taken:
            raise EnvError(f"{env.id}: a served environment cannot have a tool called {taken[0]!r}")
        self.env, self.seed, self.split = env, seed, split
        self._turns = asyncio.Lock()
        self._over = True

    async def start(self, seed: int) -> Said:
        """Start an episode; returns the opening messages as one text, and their images."""
        self._over = True
        observation, _ = await self.env.areset(seed=seed, options={"split": self.split})
        self._over = False
        return "\n\n".join(f"{message.role}: {message.content}" for message in observation), _images(observation)

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the environment and the server, in OpenAI's function format."""
        return [*self.env.toolbox.schemas(), *(tool.schema for tool in _OWN_TOOLS.values())]

    async def call(self, name: str, arguments: dict[str, Any]) -> tuple[Said, bool]:
        """Execute a call; returns the answer, and whether it is an error."""
        async with self._turns:
            try:
                return await self._call(name, arguments)
            except AgentrlError as fault:
                self._over = True
                return (f"{fault}; the episode is over: call {START} for another one", ()), True

    async def _call(self, name: str, arguments: dict[str, Any]) -> tuple[Said, bool]:
        if name in _OWN_TOOLS and (problem := _OWN_TOOLS[name].check(arguments)) is not None:
            return (error_text(problem.kind, problem.message), ()), True
        if name == START:
            return await self.start(arguments.get("seed", self.seed)), False
        if self._over:
            return (f"the episode is over; call {START} for another one", ()), True
        if name == ANSWER:
            return await self._step(Message("assistant", arguments["text"])), False
        said = await self._step(Message("assistant", tool_calls=(ToolCall(name, arguments),)))
        results = self.env.trajectory.turns[-1].results
        return said, bool(results) and results[-1].error is not None

    async def _step(self, message: Message) -> Said:
        observation, reward, terminated, truncated, info = await self.env.astep(message)
        self._over = terminated or truncated
        texts = [item.content for item in observation]
        if self._over:
            end = {"episode": "over", "stop": info["stop"]}
            if self.env.scorer is not None:
                end["reward"] = reward
            texts.append(json_text(end))
        return "\n".join(texts), _images(observation)


def _images(messages: Sequence[Message]) -> tuple[Image, ...]:
    return tuple(image for message in messages for image in message.images)


def build_server(served: Served, instructions: str) -> Any:
    """Build the SDK's low-level server for one environment. Raises DependencyError without the SDK."""
    need_package("mcp", "agentrl env serve --mcp needs the MCP SDK: pip install 'agentrl[mcp]'")
    import mcp_types as types
    from mcp.server.lowlevel import Server

    async def on_list_tools(context: Any, params: Any) -> Any:
        return types.ListToolsResult(tools=tool_list(served.tools()))

    async def on_call_tool(context: Any, params: Any) -> Any:
        (text, images), is_error = await served.call(params.name, dict(params.arguments or {}))
        return call_result(text, images, error=is_error)

    return Server(served.env.id, instructions=instructions, on_list_tools=on_list_tools, on_call_tool=on_call_tool)


async def opening(served: Served) -> str:
    """Start the first episode; returns its task as a server's instructions, which can only be text."""
    text, images = await served.start(served.seed)
    return text + (f"\n\nThe task has pictures: call {START} to be shown them." if images else "")


async def serve_mcp(env: ToolEnv, *, seed: int, split: str, port: int | None) -> None:
    """Serve one environment until the client leaves (stdio) or Ctrl-C (HTTP on 127.0.0.1:`port`, path /mcp).

    An episode on `seed` is open from the start, with its task in the server's instructions. Over HTTP all clients share one
    episode.
    """
    served = Served(env, seed, split)
    listener = None if port is None else open_socket(HOST, port, "--http")
    server = build_server(served, await opening(served))
    try:
        if listener is None:
            from mcp.server.stdio import stdio_server

            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
        else:
            await (await LocalServer().serve(server.streamable_http_app(), HOST, listener, lifespan="on"))
    finally:
        if listener is not None:
            listener.close()
        await env.aclose()
