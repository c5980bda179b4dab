"""An endpoint in front of any engine: an agent written with the openai or anthropic client, or with any framework on top
of them, is rolled out unchanged, and its tokens are recorded for training.

    async with Endpoint(engine, renderer) as endpoint:
        access = endpoint.open("episode-1")
        client = openai.AsyncOpenAI(base_url=access.openai_url, api_key=access.key)
        ...                                   # the agent runs
        session = await endpoint.take("episode-1")
        session.ledgers, session.turns, session.messages, session.failure"""

from __future__ import annotations

import asyncio
import hmac
import importlib.util
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from agentrl.contrib.agents.protocols import ANTHROPIC, CHAT, RESPONSES, Exchange, Wire
from agentrl.contrib.agents.session import AgentSession, Live, ServedPolicy, refusal_of
from agentrl.contrib.toolkit.http_server import uvicorn_config
from agentrl.data.trajectory import Json
from agentrl.engines.chat_format import RequestError
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Engine, Sampling
from agentrl.utils.errors import DependencyError, ResourceError
from agentrl.utils.network import exempt, strict_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


T = TypeVar("T")
MAX_BODY = 16 << 20
"""Bytes of a request's body."""
LEAVE_S = 5
"""Seconds that `close` waits for clients that still read an answer."""
WIRES = (CHAT, RESPONSES, ANTHROPIC)
"""The protocols."""
_NAME = re.compile(r"[A-Za-z0-9._~-]+")


@dataclass(frozen=True, slots=True)
class Access:
    """An agent's access: the base URL for its openai client, or the one for its anthropic client, and the API key."""

    session: str
    openai_url: str
    anthropic_url: str
    key: str = field(repr=False)


class Endpoint:
    """Serves `/s/{session}/v1/...`; a session is one agent's episode, and opens with its own key."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        model: str = "policy",
        sampling: Sampling | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        reached_as: str | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_body: int = MAX_BODY,
    ) -> None:
        """`sampling`: how every turn is sampled, whatever temperature, top_p or top_k a request asks for; its `max_tokens` is
        the upper limit of a turn. `port` 0 picks a free one. `reached_as`: the name or address of this machine in URLs, if it
        is not `host`. `decode`: the tokenizer's; without it a request for `logprobs` is refused. `max_body`: bytes.
        Raises DependencyError without the extra 'server'."""
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise DependencyError(f"the endpoint needs {package}: pip install 'agentrl[server]'")
        self._served = ServedPolicy(engine, renderer, sampling or Sampling(max_tokens=1024), decode)
        self._model = model
        self._host, self._port, self._reached_as = host, port, reached_as
        self._max_body = max_body
        self._sessions: dict[str, tuple[AgentSession, str]] = {}
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ResourceError if the port is taken."""
        import uvicorn

        # Bound here rather than by uvicorn, so that the port is known at once and a taken one is an error, not an exit.
        listener = socket.socket()
        try:
            listener.bind((self._host, self._port))
        except OSError as problem:
            listener.close()
            raise ResourceError(f"cannot listen on {self._host}:{self._port}: {problem.strerror}") from problem
        self._port = listener.getsockname()[1]
        exempt(self._reached_as or self._host)
        names = () if self._reached_as is None else (self._reached_as,)
        config = uvicorn_config(self._app(), self._host, names, self._max_body, timeout_graceful_shutdown=LEAVE_S)
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End all sessions and stop listening; idempotent."""
        for name in list(self._sessions):
            await self.take(name)
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def open(
        self, session: str, *, seed: int | None = None, engine: Engine | None = None, sampling: Sampling | None = None
    ) -> Access:
        """Begin a session, with a key that only this call returns. `seed`: of its sampling. `engine`, `sampling`: of its
        own, in place of the endpoint's.

        Raises ValueError for a name that is open already or cannot stand in a URL."""
        if not _NAME.fullmatch(session):
            raise ValueError(f"a session's name has letters, digits and . _ ~ - only, got {session!r}")
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already")
        key = f"agentrl-{secrets.token_urlsafe(32)}"
        served = replace(self._served, engine=engine or self._served.engine, sampling=sampling or self._served.sampling)
        self._sessions[session] = AgentSession(session, served, seed=seed), key
        base = f"http://{self._reached_as or self._host}:{self._port}/s/{session}"
        return Access(session, f"{base}/v1", base, key)

    def session(self, name: str) -> AgentSession:
        """An open session. Raises KeyError without one of that name."""
        return self._sessions[name][0]

    async def take(self, name: str) -> AgentSession:
        """End a session and return what it recorded. Requests under way are given up, and later ones refused.

        Raises KeyError without one of that name."""
        session, _ = self._sessions.pop(name)
        await session.close()
        return session

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                *(Route(f"/s/{{session}}/{wire.path}", partial(self._serve, wire), methods=["POST"]) for wire in WIRES),
                Route("/s/{session}/v1/models", self._models),
                Route("/s/{session}", self._record),
            ]
        )

    async def _serve(self, wire: Wire, request: Request) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        try:
            session = self._of(request)
            own = {name: getattr(session.sampling, name) for name in ("temperature", "top_p", "top_k")}
            exchange = Exchange(session, await self._body(request), self._model, own, self._served.decode)
            ask = wire.read(exchange)
            if exchange.body.get("stream"):
                live = Live(session, ask)
                await _unless_gone(request, live.begun())
                headers = {"cache-control": "no-cache"}
                return StreamingResponse(wire.told(exchange, ask, live), media_type="text/event-stream", headers=headers)
            answers = await _unless_gone(request, session.begin(ask))
            return JSONResponse(wire.write(exchange, ask, answers))
        except Exception as problem:  # the client is told of every failure in its own form
            return _refusal(wire, problem)

    def _of(self, request: Request) -> AgentSession:
        """The request's session. Raises RequestError without one, or its key is not in the request."""
        found = self._sessions.get(str(request.path_params["session"]))
        if found is None:
            raise RequestError("there is no such session", status=404, code="session_not_found")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        if not any(hmac.compare_digest(one.encode(), found[1].encode()) for one in given):
            raise RequestError("the API key is not this session's", status=401, code="invalid_api_key")
        return found[0]

    async def _body(self, request: Request) -> dict[str, Json]:
        """Raises RequestError for a body that is too large or not a JSON object."""
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self._max_body:
                raise RequestError(f"the body has more than {self._max_body} bytes", status=413, code="request_too_large")
        try:
            body = strict_json(data)
        except ValueError as problem:
            raise RequestError(f"the body is not JSON: {problem}") from None
        if not isinstance(body, dict):
            raise RequestError("the body is not a JSON object")
        return body

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "agentrl"}
        return self._show(request, lambda session: JSONResponse({"object": "list", "data": [model]}))

    async def _record(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return self._show(request, lambda session: JSONResponse(session.to_json()))

    def _show(self, request: Request, show: Callable[[AgentSession], Response]) -> Response:
        try:
            return show(self._of(request))
        except RequestError as problem:
            return _refusal(CHAT, problem)


def _refusal(wire: Wire, problem: Exception) -> Response:
    from starlette.responses import JSONResponse

    told = refusal_of(problem)
    return JSONResponse(wire.error(told), status_code=told.status)


async def _unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """The answer. If the client goes away, or the session ends, it is given up: what nobody reads must not be sampled, nor
    trained."""
    task, gone = asyncio.ensure_future(answer), asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
    if task.cancelled() or not task.done():
        raise RequestError("the session is over, or the client went away", status=404, code="session_not_found")
    return task.result()


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client has gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
