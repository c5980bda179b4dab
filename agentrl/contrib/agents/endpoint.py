"""An HTTP endpoint in front of any engine. An agent that uses the openai or anthropic client, or a framework on top of them,
runs unchanged, and its tokens are recorded for training.

    async with Endpoint(engine, renderer) as endpoint:
        access = endpoint.open("episode-1")
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        ...                                   # the agent runs
        session = await endpoint.take("episode-1")
        session.ledgers, session.turns, session.messages, session.failure"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentrl.contrib.agents.protocols import ANTHROPIC, CHAT, RESPONSES, Exchange, Wire
from agentrl.contrib.agents.record import ServedEpisode
from agentrl.contrib.agents.session import AgentSession, Live, ServedPolicy, refusal_of
from agentrl.contrib.toolkit.chat_forms import call_result, tool_list
from agentrl.contrib.toolkit.http_server import MAX_BODY, LocalServer, open_listener
from agentrl.data.trajectory import Json
from agentrl.engines.chat_format import RequestError
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Engine, Sampling
from agentrl.utils.errors import AgentrlError, ResourceError, need_package
from agentrl.utils.network import exempt, strict_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


T = TypeVar("T")
LEAVE_S = 5
"""Seconds that `close` waits for clients that still read an answer."""
WIRES = (CHAT, RESPONSES, ANTHROPIC)
"""Supported protocols."""
_NAME = re.compile(r"[A-Za-z0-9._~-]+")


@dataclass(frozen=True, slots=True)
class Access:
    """An agent's access: base URLs for its openai and anthropic clients, and the API key."""

    session: str
    openai_url: str
    anthropic_url: str
    key: str = field(repr=False)


class Endpoint(LocalServer):
    """Serves `/s/{session}/v1/...`. A session is one agent's episode, with its own key."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        model: str = "policy",
        sampling: Sampling | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        """`sampling`: used for every turn, whatever temperature, top_p or top_k a request asks for; its `max_tokens` limits a
        turn. `port`: 0 picks a free one. `decode`: the tokenizer's; without it requests for `logprobs` are refused. `max_body`:
        bytes. Raises DependencyError without the extra 'server'."""
        for package in ("starlette", "uvicorn"):
            need_package(package, f"the endpoint needs {package}: pip install 'agentrl[server]'")
        self._served = ServedPolicy(engine, renderer, sampling or Sampling(max_tokens=1024), decode)
        self._model = model
        self._host, self._port = host, port
        self._max_body = max_body
        self._sessions: dict[str, tuple[AgentSession, str]] = {}

    async def start(self) -> None:
        """Start serving. Raises ResourceError if the port is taken."""
        listener = _listen(self._host, self._port, f"cannot listen on {self._host}:{self._port}")
        self._port = listener.getsockname()[1]
        await self.serve(self._app(), self._host, listener, max_body=self._max_body, timeout_graceful_shutdown=LEAVE_S)
        exempt(self._host)

    async def close(self) -> None:
        """End all sessions and stop listening; idempotent."""
        for name in list(self._sessions):
            await self.take(name)
        await self.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def open(self, session: str, *, seed: int | None = None, **served: Any) -> Access:
        """Open a session and return its access; only this call returns the key. `seed`: of its sampling. `served`: fields of
        ServedPolicy that override the endpoint's.

        Raises ValueError for an open session's name, or one that is invalid in a URL."""
        if not _NAME.fullmatch(session):
            raise ValueError(f"a session's name has letters, digits and . _ ~ - only, got {session!r}")
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already")
        key = f"agentrl-{secrets.token_urlsafe(32)}"
        self._sessions[session] = AgentSession(session, replace(self._served, **served), seed=seed), key
        base = f"http://{self._host}:{self._port}/s/{session}"
        return Access(session, f"{base}/v1", base, key)

    def session(self, name: str) -> AgentSession:
        """Return an open session. Raises KeyError for an unknown name."""
        return self._sessions[name][0]

    async def take(self, name: str) -> AgentSession:
        """Close a session and return it with its record. Cancels its requests, and refuses later ones. Raises KeyError for an
        unknown name."""
        session, _ = self._sessions.pop(name)
        await session.close()
        return session

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        models = [{"id": self._model, "object": "model", "created": 0, "owned_by": "agentrl"}]
        return Starlette(
            routes=[
                *(Route(f"/s/{{session}}/{wire.path}", partial(self._serve, wire), methods=["POST"]) for wire in WIRES),
                Route("/s/{session}/v1/models", partial(self._show, lambda _: {"object": "list", "data": models})),
                Route("/s/{session}", partial(self._show, AgentSession.to_json)),
            ]
        )

    async def _serve(self, wire: Wire, request: Request) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            session = self._of(request)
            try:
                body = strict_json(await request.body())  # the server limits it to `max_body`
            except ValueError as problem:
                raise RequestError(f"the body is not JSON: {problem}") from None
            if not isinstance(body, dict):
                raise RequestError("the body is not a JSON object")
            exchange = Exchange(session, body, self._model)
            ask = wire.read(exchange)
            if exchange.body.get("stream"):
                live = Live(session, ask)
                await _answer_or_cancel(request, live.wait_for_start())
                headers = {"cache-control": "no-cache"}
                return StreamingResponse(wire.events(exchange, ask, live), media_type="text/event-stream", headers=headers)
            answers = await _answer_or_cancel(request, session.begin(ask))
            return JSONResponse(wire.write(exchange, ask, answers))
        except Exception as problem:  # the client must see every failure in its protocol's form
            return _refusal(wire, problem)

    def _of(self, request: Request) -> AgentSession:
        """Return the request's session. Raises RequestError for an unknown one or a wrong key."""
        found = self._sessions.get(str(request.path_params["session"]))
        if found is None:
            raise RequestError("there is no such session", status=404, code="session_not_found")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(one.encode(), found[1].encode()) for one in given):
            raise RequestError("the API key is not this session's", status=401, code="invalid_api_key")
        return found[0]

    async def _show(self, show: Callable[[AgentSession], Json], request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            return JSONResponse(show(self._of(request)))
        except RequestError as problem:
            return _refusal(CHAT, problem)


def _listen(host: str, port: int, refused: str) -> socket.socket:
    """Open a listener. Raises ResourceError, which begins with `refused`, if the port is taken."""
    try:
        return open_listener(host, port)
    except OSError as problem:
        raise ResourceError(f"{refused}: {problem.strerror}") from problem


def _refusal(wire: Wire, problem: Exception) -> Response:
    from starlette.responses import JSONResponse

    refusal = refusal_of(problem)
    return JSONResponse(wire.error(refusal), status_code=refusal.status)


async def _answer_or_cancel(request: Request, answer: Awaitable[T]) -> T:
    """Await the answer; cancel it if the client disconnects or the session ends, so that nothing unread is sampled or trained."""

    async def disconnected() -> None:  # the body must have been read
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(answer), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
    if task.cancelled() or not task.done():
        raise RequestError("the session is over, or the client went away", status=404, code="session_not_found")
    return task.result()


# The environment's tools for agents: one MCP server (streamable HTTP) for all episodes, each under a secret URL


SERVES = ("uvicorn", "starlette.applications", "mcp_types", "mcp.server.lowlevel", "mcp.server.streamable_http_manager")
"""Modules imported for serving."""


class ToolServer(LocalServer):
    """`/t/{secret}/mcp`: the tools of the episode opened under the secret. `/t/{secret}/user`: a POST of {"text": ...} sends a
    message to the user and is answered with {"messages": [...], "over": ...}."""

    def __init__(self, host: str) -> None:
        """Raises DependencyError without the extra 'mcp'."""
        need_package("mcp", "tools for an agent need mcp: pip install 'agentrl[mcp]'")
        self._host, self._port = host, 0
        self._episodes: dict[str, ServedEpisode] = {}

    async def start(self) -> None:
        """Start serving. Raises ResourceError if it cannot listen on the host."""
        import mcp_types as types
        from mcp.server.lowlevel import Server
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        async def on_list_tools(context: Any, params: Any) -> Any:
            return types.ListToolsResult(tools=tool_list(self._of(context.request).schemas()))

        async def on_call_tool(context: Any, params: Any) -> Any:
            try:
                result = await self._of(context.request).call(params.name, dict(params.arguments or {}))
            except AgentrlError as over:  # an error or the end of the episode, which the episode has recorded
                return call_result(str(over), error=True)
            return call_result(result.content, result.images, error=result.error is not None)

        # Stateless: the URL identifies the episode, so that killed agents leave nothing behind.
        server = Server("agentrl", on_list_tools=on_list_tools, on_call_tool=on_call_tool)
        manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
        listener = _listen(self._host, 0, f"agent.host: cannot listen on {self._host}")
        self._port = listener.getsockname()[1]
        await self.serve(self._app(manager), self._host, listener, manager.run())

    async def close(self) -> None:
        """Stop listening; idempotent."""
        self._episodes.clear()
        await self.stop()

    def open(self, episode: ServedEpisode) -> str:
        """Serve an episode; returns its secret base URL."""
        secret = secrets.token_urlsafe(32)
        self._episodes[secret] = episode
        return f"http://{self._host}:{self._port}/t/{secret}"

    def drop(self, url: str) -> None:
        """Stop serving an episode."""
        self._episodes.pop(url.rpartition("/")[2], None)

    def _app(self, manager: Any) -> Any:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        episodes = self._episodes

        class Mounted:  # an object, since Starlette passes functions a request
            async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
                if scope["path_params"]["secret"] in episodes:
                    await manager.handle_request(scope, receive, send)
                else:
                    await JSONResponse({"error": "there is no such episode"}, 404)(scope, receive, send)

        return Starlette(routes=[Route("/t/{secret}/mcp", Mounted()), Route("/t/{secret}/user", self._user, methods=["POST"])])

    def _of(self, request: Request) -> ServedEpisode:
        """Return the request's episode. Raises AgentrlError if it has ended."""
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
