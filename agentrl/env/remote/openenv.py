"""OpenEnv's protocol over our environments: its client's messages over a WebSocket, and what it asks over HTTP.

By the source of openenv-core 0.3.0 (`openenv/core/env_server/http_server.py`, `types.py`): a message is an object with `type`
("reset", "step", "state", "close") and `data`; an answer has the type "observation", "state" or "error". One connection is
one session with one environment. Its own client sends no headers, so the address has the agents' token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.env.base import ToolEnv
from agentrl.env.remote import wire
from agentrl.env.remote.sessions import RefusedError, SessionLimits
from agentrl.errors import AgentrlError
from agentrl.serving import strict_json
from agentrl.tool.validate import Problem, compile_validator
from agentrl.trajectory import Json, Message, ToolCall

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket

_TEXT = {"type": "string"}
_OBJECT = {"type": "object"}
_CALL = {"type": "object", "properties": {"name": _TEXT, "arguments": _OBJECT}, "required": ["name", "arguments"]}
ACTION: dict[str, Json] = {
    "type": "object",
    "description": "One assistant turn: text, in which tool calls may be in the Hermes form, or text and tool calls.",
    "properties": {"text": _TEXT, "tool_calls": {"type": "array", "items": _CALL}, "metadata": _OBJECT},
    "additionalProperties": False,
}
OBSERVATION: dict[str, Json] = {
    "type": "object",
    "properties": {"messages": {"type": "array", "items": _OBJECT}, "tools": {"type": "array", "items": _OBJECT}},
}
STATE: dict[str, Json] = {
    "type": "object",
    "properties": {"episode_id": _TEXT, "step_count": {"type": "integer"}, "env_id": _TEXT},
}
_check_action = compile_validator("action", ACTION)


class PlayerGuard(Protocol):
    """Checks the token in an address."""

    def check_player(self, shown: str) -> None:
        """Raises RefusedError for another one."""
        ...


class PlaySession:
    """One connection's episodes, one after another. What it answers holds nothing of `Task.gold`, and not the state."""

    def __init__(self, env: ToolEnv) -> None:
        self.env, self._episode = env, ""

    async def answer(self, message: Mapping[str, Json]) -> dict[str, Json]:
        """The answer to one message. Raises _InvalidError for a message of another shape, and what the environment raises."""
        kind, data = message.get("type"), message.get("data", {})
        if not isinstance(data, dict):
            raise _InvalidError("data: expected an object")
        if kind == "reset":
            return {"type": "observation", "data": await self._reset(data)}
        if kind == "step":
            return {"type": "observation", "data": await self._step(data)}
        if kind == "state":
            record = self.env.trajectory
            state = {"episode_id": self._episode, "step_count": len(record.turns), "env_id": record.env_id}
            return {"type": "state", "data": state}
        return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")

    async def _reset(self, data: Mapping[str, Json]) -> Json:
        seed, split = data.get("seed"), data.get("split")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63):
            raise _InvalidError(f"seed: expected an integer from 0, got {seed!r}")
        self._episode = str(data.get("episode_id") or wire.new_id())
        observation, _ = await self.env.areset(seed=seed, options={} if split is None else {"split": str(split)})
        return self._seen(observation, None, False)

    async def _step(self, data: Mapping[str, Json]) -> Json:
        problem: Problem | None = _check_action(dict(data))
        if problem is not None:
            raise _InvalidError(problem.message)
        calls = tuple(ToolCall(call["name"], call["arguments"]) for call in data.get("tool_calls", ()))
        action = Message("assistant", data.get("text", ""), calls)
        observation, reward, terminated, truncated, _ = await self.env.astep(action)
        # nan: the episode could not be scored, which is no reward of 0.
        return self._seen(observation, None if reward != reward else reward, terminated or truncated)

    def _seen(self, messages: list[Message], reward: float | None, done: bool) -> Json:
        seen = {"messages": messages, "tools": self.env.toolbox.schemas()}
        return {"observation": seen, "reward": reward, "done": done}


class _InvalidError(Exception):
    """A message of another shape than OpenEnv's."""


def _error(code: str, message: str) -> dict[str, Json]:
    return {"type": "error", "data": {"message": message, "code": code}}


class OpenEnvFace:
    """The routes over environments that `build` makes, which score themselves."""

    def __init__(
        self, build: Callable[[], ToolEnv], name: str, summary: str, limits: SessionLimits, player: PlayerGuard | None
    ) -> None:
        self._build, self._name, self._summary, self._limits, self._player = build, name, summary, limits, player
        self._running = 0

    def routes(self, prefix: str) -> list[Any]:
        """Starlette's routes; with a `player` the prefix has the token as `{player}`."""
        from starlette.routing import Route, WebSocketRoute

        return [
            Route(f"{prefix}/health", self._health),
            Route(f"{prefix}/metadata", self._metadata),
            Route(f"{prefix}/schema", self._schema),
            Route(f"{prefix}/reset", self._one_reset, methods=["POST"]),
            Route(f"{prefix}/step", self._one_step, methods=["POST"]),
            WebSocketRoute(f"{prefix}/ws", self._ws),
        ]

    def _guard(self, path: Mapping[str, Any]) -> None:
        if self._player is not None:
            self._player.check_player(str(path["player"]))

    def _json(self, request: Request, body: Callable[[], Json], status: int = 200) -> Response:
        from starlette.responses import Response

        try:
            self._guard(request.path_params)
        except RefusedError as refused:
            return Response(wire.dumps({"detail": str(refused)}), refused.status, media_type="application/json")
        return Response(wire.dumps(body()), status, media_type="application/json")

    async def _health(self, request: Request) -> Response:
        return self._json(request, lambda: {"status": "healthy"})

    async def _metadata(self, request: Request) -> Response:
        return self._json(request, lambda: {"name": self._name, "description": self._summary})

    async def _schema(self, request: Request) -> Response:
        return self._json(request, lambda: {"action": ACTION, "observation": OBSERVATION, "state": STATE})

    async def _one_reset(self, request: Request) -> Response:
        """As openenv-core: over plain HTTP a reset is an episode that ends at once, since requests belong to no session."""
        try:
            self._guard(request.path_params)
        except RefusedError:
            return self._json(request, dict)  # which says so
        if self._running >= self._limits.episodes:
            return self._json(request, lambda: {"detail": "Server at capacity"}, 503)
        self._running += 1
        session = None
        try:
            data = strict_json(await self._body(request) or b"{}")
            session = PlaySession(self._build())
            answer = await session.answer({"type": "reset", "data": data})
        except (_InvalidError, ValueError, AgentrlError) as problem:
            text = str(problem)
            return self._json(request, lambda: {"detail": text}, 422)
        finally:
            self._running -= 1
            if session is not None:
                await session.env.aclose()
        return self._json(request, lambda: answer["data"])

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._limits.body:
                raise _InvalidError(f"a request of more than {self._limits.body} bytes (--max-body)")
        return bytes(body)

    async def _one_step(self, request: Request) -> Response:
        return self._json(request, lambda: {"detail": "a step over plain HTTP belongs to no episode; connect to /ws"}, 409)

    async def _ws(self, socket: WebSocket) -> None:
        from starlette.websockets import WebSocketDisconnect

        try:
            self._guard(socket.path_params)
        except RefusedError:
            await socket.close(1008)
            return
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            if self._running >= self._limits.episodes:
                # Said to its first message: a client that finds the connection closed as it sends reads no reason.
                await self._receive(socket)
                full = f"Server at capacity: {self._running}/{self._limits.episodes} sessions active"
                await socket.send_text(json.dumps(_error("CAPACITY_REACHED", full)))
                await socket.close()
                return
            self._running += 1
            session = PlaySession(self._build())
            try:
                await self._converse(socket, session)
            finally:
                self._running -= 1
                await session.env.aclose()

    async def _receive(self, socket: WebSocket) -> str | None:
        """The next message; None, and the connection is closed, if none comes for as long as a session may be silent."""
        try:
            async with asyncio.timeout(self._limits.idle):
                return await socket.receive_text()
        except TimeoutError:
            await socket.close(1001, f"no message for {self._limits.idle:g} s")
            return None

    async def _converse(self, socket: WebSocket, session: PlaySession) -> None:
        while (text := await self._receive(socket)) is not None:
            try:
                message = strict_json(text)
            except ValueError as problem:
                await socket.send_text(wire.dumps(_error("INVALID_JSON", str(problem))).decode())
                continue
            try:
                if isinstance(message, dict) and message.get("type") == "close":
                    await socket.close()
                    return
                answer = await session.answer(message if isinstance(message, dict) else {})
            except _InvalidError as problem:
                answer = _error("VALIDATION_ERROR", str(problem))
            except (AgentrlError, TypeError) as fault:
                answer = _error("EXECUTION_ERROR", str(fault))
            except Exception as fault:  # an author's code may raise anything
                answer = _error("EXECUTION_ERROR", f"{type(fault).__name__}: {fault}")
            await socket.send_text(wire.dumps(answer).decode())
