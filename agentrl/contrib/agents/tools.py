"""The environment's tools for agents: one MCP server (streamable HTTP) for all episodes, each under a secret address."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.contrib.toolkit.chat_forms import call_result, tool_list
from agentrl.contrib.toolkit.http_server import uvicorn_config
from agentrl.data.trajectory import Json, ToolResult
from agentrl.utils.errors import AgentrlError, DependencyError, ResourceError
from agentrl.utils.network import strict_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


def load_server() -> None:
    """Import what serves."""
    for name in ("uvicorn", "starlette.applications", "mcp_types", "mcp.server.lowlevel", "mcp.server.streamable_http_manager"):
        importlib.import_module(name)


class ServedEpisode(Protocol):
    """The services of an episode for its agent."""

    def schemas(self) -> list[dict[str, Json]]: ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...

    async def say(self, text: str) -> list[str] | None: ...


class ToolServer:
    """`/t/{secret}/mcp`: the tools of the episode that was opened under the secret. `/t/{secret}/user`: a POST of
    {"text": ...} says it to the user and is answered with {"messages": [...], "over": ...}."""

    def __init__(self, host: str) -> None:
        """Raises DependencyError without the extra 'mcp'."""
        if find_spec("mcp") is None:
            raise DependencyError("tools for an agent need mcp: pip install 'agentrl[mcp]'")
        self._host, self._port = host, 0
        self._episodes: dict[str, ServedEpisode] = {}
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ResourceError if nothing can listen on the host."""
        import uvicorn

        listener = socket.socket()
        try:
            listener.bind((self._host, 0))
        except OSError as problem:
            listener.close()
            raise ResourceError(f"agent.host: cannot listen on {self._host}: {problem.strerror}") from problem
        self._port = listener.getsockname()[1]
        manager = self._manager()
        config = uvicorn_config(self._app(manager), self._host)
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._serve(manager, listener), name="the server of tools")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def _serve(self, manager: Any, listener: socket.socket) -> None:
        async with manager.run():  # entered and left by one task, as its task group demands
            await self._server.serve(sockets=[listener])

    async def close(self) -> None:
        """Stop listening; idempotent."""
        self._episodes.clear()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None

    def open(self, episode: ServedEpisode) -> str:
        """Serve an episode; returns its base URL, which nobody else can guess."""
        secret = secrets.token_urlsafe(32)
        self._episodes[secret] = episode
        return f"http://{self._host}:{self._port}/t/{secret}"

    def drop(self, url: str) -> None:
        """Serve it no longer."""
        self._episodes.pop(url.rpartition("/")[2], None)

    def _manager(self) -> Any:
        import mcp_types as types
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        async def on_list_tools(context: Any, params: Any) -> Any:
            return types.ListToolsResult(tools=tool_list(self._of(context.request).schemas()))

        async def on_call_tool(context: Any, params: Any) -> Any:
            try:
                result = await self._of(context.request).call(params.name, dict(params.arguments or {}))
            except AgentrlError as over:  # a fault or the end of the episode, which the episode itself has noted
                return call_result(str(over), error=True)
            return call_result(result.content, result.images, error=result.error is not None)

        # Stateless: which episode a request belongs to is in its address, so nothing is left behind by agents that are killed.
        server = Server("agentrl", on_list_tools=on_list_tools, on_call_tool=on_call_tool)
        return StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    def _app(self, manager: Any) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        episodes = self._episodes

        class Mounted:  # an object, since Starlette calls functions with a request
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                if scope["path_params"]["secret"] in episodes:
                    await manager.handle_request(scope, receive, send)
                else:
                    await JSONResponse({"error": "there is no such episode"}, 404)(scope, receive, send)

        return Starlette(
            routes=[
                Route("/t/{secret}/mcp", Mounted()),
                Route("/t/{secret}/user", self._user, methods=["POST"]),
            ]
        )

    def _of(self, request: Request) -> ServedEpisode:
        """Raises AgentrlError if the episode has ended since the request came."""
        found = self._episodes.get(str(request.path_params["secret"]))
        if found is None:
            raise AgentrlError("the episode is over")
        return found

    async def _user(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            text = strict_json(await request.body())["text"]
            if not isinstance(text, str):
                raise TypeError("text is not a string")
        except (ValueError, KeyError, TypeError) as problem:
            return JSONResponse({"error": f'expected {{"text": ...}}: {problem}'}, 400)
        try:
            replies = await self._of(request).say(text)
        except AgentrlError as over:
            return JSONResponse({"error": str(over)}, 404)
        return JSONResponse({"messages": replies or [], "over": replies is None})
