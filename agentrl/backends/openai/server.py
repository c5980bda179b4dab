"""An OpenAI-compatible endpoint in front of any engine: an agent written with the openai client, or with any
framework on top of it, is rolled out unchanged, and its tokens are recorded for training.

    async with OpenAiServer(engine, renderer) as server:
        client = openai.AsyncOpenAI(base_url=server.url("episode-1"), api_key="unused")
        ...                                   # the agent runs
        ledgers = server.take("episode-1").ledgers

A streaming request gets its turn as a stream, but all at once when it has been sampled: the engine protocol returns
whole turns, and tool calls can only be parsed from a whole turn.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentrl.backends.openai.messages import RequestError, read_sampling, read_stops, wants_logprobs, write_message
from agentrl.backends.openai.session import AgentSession, StopStrings
from agentrl.errors import AgentrlError, DependencyError, EngineError, RenderError, ResourceError
from agentrl.render.base import Renderer
from agentrl.rollout.engine import Engine, Generation, Sampling
from agentrl.trajectory import Json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class OpenAiServer:
    """Serves `/s/{session}/v1/chat/completions`; a session is one agent's episode."""

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
    ) -> None:
        """`sampling`: defaults for what a request leaves unset; its `max_tokens` is also the upper limit.
        `port` 0 picks a free one. `decode`: the tokenizer's; without it a request for `logprobs` or with `stop`
        strings is refused. Raises DependencyError without the extra 'server'."""
        for package in ("starlette", "uvicorn"):
            if importlib.util.find_spec(package) is None:
                raise DependencyError(f"the server needs {package}: pip install 'agentrl[server]'")
        self._engine, self._renderer, self._model = engine, renderer, model
        self._sampling = sampling or Sampling(max_tokens=1024)
        self._host, self._port = host, port
        self._decode = decode
        self._sessions: dict[str, AgentSession] = {}
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
        config = uvicorn.Config(self._app(), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server = self._task = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def url(self, session: str) -> str:
        """The `base_url` for an openai client whose calls belong to `session`."""
        return f"http://{self._host}:{self._port}/s/{session}/v1"

    def take(self, session: str) -> AgentSession:
        """Return what a session recorded and forget it; an empty session if it made no request."""
        return self._sessions.pop(session, AgentSession(session))

    def _app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/s/{session}/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/s/{session}/v1/models", self._models),
                Route("/s/{session}", self._record),
            ]
        )

    async def _complete(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        key = str(request.path_params["session"])
        try:
            body = await request.json()
            answer = await self._answer(self._sessions.setdefault(key, AgentSession(key)), body)
        except (RequestError, RenderError, ValueError) as problem:
            return JSONResponse(_error(str(problem), "invalid_request_error"), status_code=400)
        except (EngineError, AgentrlError) as problem:
            return JSONResponse(_error(str(problem), "server_error"), status_code=503)
        if body.get("stream"):
            options = body.get("stream_options") or {}
            return StreamingResponse(_stream(answer, bool(options.get("include_usage"))), media_type="text/event-stream")
        return JSONResponse(answer)

    async def _answer(self, session: AgentSession, body: dict[str, Json]) -> dict[str, Json]:
        sampling = read_sampling(body, self._sampling, self._renderer.stop_token_ids)
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        texts, logprobs = read_stops(body), wants_logprobs(body)
        stops = StopStrings(texts, self._decoder("stop")) if texts else None
        decode = self._decoder("logprobs") if logprobs else None
        answer = await session.complete(self._engine, self._renderer, body.get("messages") or [], tools, sampling, stops)
        row = write_message(answer.message)
        ended = answer.stopped or answer.generation.finish == "stop"
        finish = ("tool_calls" if "tool_calls" in row else "stop") if ended else "length"
        sampled = len(answer.generation.token_ids)
        table = None if decode is None else _logprobs(answer.generation, decode)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [{"index": 0, "message": row, "finish_reason": finish, "logprobs": table}],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": answer.prompt_tokens + sampled,
            },
        }

    def _decoder(self, field: str) -> Callable[[Sequence[int]], str]:
        if self._decode is None:
            raise RequestError(f"{field}: not supported by this server: it was made without a tokenizer (decode=...)")
        return self._decode

    async def _models(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "agentrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _record(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        key = str(request.path_params["session"])
        return JSONResponse(self._sessions.get(key, AgentSession(key)).to_json())


def _error(message: str, kind: str) -> dict[str, Json]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _logprobs(generation: Generation, decode: Callable[[Sequence[int]], str]) -> dict[str, Json]:
    """One entry per sampled token, special ones included: log pi under the distribution that was sampled from."""
    content = []
    for token_id, logprob in zip(generation.token_ids, generation.logprobs, strict=True):
        token = decode([token_id])
        # A token that holds only part of a character decodes to U+FFFD, which does not reveal its bytes.
        raw = None if "\ufffd" in token else list(token.encode())
        content.append({"token": token, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return {"content": content, "refusal": None}


async def _stream(answer: dict[str, Json], usage: bool) -> AsyncIterator[str]:
    """The finished turn as a stream of two chunks (three with usage), so that clients that stream work, although nothing
    arrives early."""
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for part, finish, table in ((delta, None, choice["logprobs"]), ({}, choice["finish_reason"], None)):
        chunk = {**head, "choices": [{"index": 0, "delta": part, "finish_reason": finish, "logprobs": table}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    if usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': answer['usage']})}\n\n"
    yield "data: [DONE]\n\n"
