"""OpenEnv in both directions: serve its clients, and play on its servers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import httpx

from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.sessions import RefusedError, Secret, SessionLimits
from agentrl.contrib.toolkit.chat_forms import declarations
from agentrl.data.images import Image
from agentrl.data.trajectory import Json, Message, Task, ToolCall
from agentrl.env.authoring import SPLITS
from agentrl.env.base import ScorerLike, ToolEnv
from agentrl.env.call_options import compile_validator
from agentrl.env.toolbox import as_text
from agentrl.env.tools import Tool
from agentrl.utils.errors import AgentrlError, ConfigError, EnvError, RemoteEnvError, ToolError, need_package
from agentrl.utils.network import strict_json
from agentrl.utils.parsing import read_json

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.websockets import WebSocket


# Serve OpenEnv's protocol: messages over a WebSocket, and some HTTP routes.
#
# After the source of openenv-core 0.3.0 (`openenv/core/env_server/http_server.py`, `types.py`): a message is an object with
# `type` ("reset", "step", "state", "close") and `data`; an answer has the type "observation", "state" or "error". One connection
# is one session with one environment. OpenEnv's client sends no headers, so the URL contains the agents' token.

log = logging.getLogger(__name__)
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

_action_check = cache(partial(compile_validator, "action", ACTION))
"""Compiled on first use: it takes longer than the rest of the import."""


class PlaySession:
    """Sequential episodes of one connection. Answers contain neither `Task.gold` nor the state."""

    def __init__(self, env: ToolEnv) -> None:
        self.env, self._episode = env, ""

    async def answer(self, message: Mapping[str, Json]) -> dict[str, Json]:
        """Answer a message. Raises _InvalidError for an invalid one, and errors of the environment."""
        kind, data = message.get("type"), message.get("data", {})
        if not isinstance(data, dict):
            raise _InvalidError("data: expected an object")
        if kind == "state":
            record = self.env.trajectory
            state = {"episode_id": self._episode, "step_count": len(record.turns), "env_id": record.env_id}
            return {"type": "state", "data": state}
        reward, done = None, False
        if kind == "reset":
            seed, split = data.get("seed"), data.get("split")
            if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63):
                raise _InvalidError(f"seed: expected an integer from 0, got {seed!r}")
            self._episode = str(data.get("episode_id") or wire.new_id())
            observation, _ = await self.env.areset(seed=seed, options={} if split is None else {"split": str(split)})
        elif kind == "step":
            if (problem := _action_check()(dict(data))) is not None:
                raise _InvalidError(problem.message)
            calls = tuple(ToolCall(call["name"], call["arguments"]) for call in data.get("tool_calls", ()))
            action = Message("assistant", data.get("text", ""), calls)
            observation, scored, terminated, truncated, _ = await self.env.astep(action)
            # nan: the episode could not be scored, which is not a reward of 0.
            reward, done = None if scored != scored else scored, terminated or truncated
        else:
            return _error("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        seen = {"messages": observation, "tools": self.env.toolbox.schemas()}
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}}


class _InvalidError(Exception):
    """A message that is invalid in OpenEnv's protocol."""


def _error(code: str, message: str) -> dict[str, Json]:
    return {"type": "error", "data": {"message": message, "code": code}}


class OpenEnvFace:
    """HTTP routes for environments that `build` makes, which score themselves."""

    def __init__(
        self, build: Callable[[], ToolEnv], name: str, summary: str, limits: SessionLimits, player: Secret | None
    ) -> None:
        self._build, self._name, self._summary, self._limits, self._player = build, name, summary, limits, player
        self._running = 0

    def routes(self, prefix: str) -> list[Any]:
        """Return Starlette's routes; with a `player` token, `prefix` contains `{player}`."""
        from starlette.routing import Route, WebSocketRoute

        answers: dict[str, Json] = {
            "health": {"status": "healthy"},
            "metadata": {"name": self._name, "description": self._summary},
            "schema": {"action": ACTION, "observation": OBSERVATION, "state": STATE},
        }
        routes = [Route(f"{prefix}/{name}", partial(self._answer, body)) for name, body in answers.items()]
        return [*routes, WebSocketRoute(f"{prefix}/ws", self._ws)]

    def _guard(self, path: Mapping[str, Any]) -> None:
        if self._player is not None and not hmac.compare_digest(str(path["player"]).encode(), self._player.player.encode()):
            raise RefusedError(401, "token", "this address has another token than the server printed for OpenEnv")

    async def _answer(self, body: Json, request: Request) -> Response:
        from starlette.responses import Response

        try:
            self._guard(request.path_params)
        except RefusedError as refused:
            return Response(wire.dumps({"detail": str(refused)}), refused.status, media_type="application/json")
        return Response(wire.dumps(body), media_type="application/json")

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
                # Answer its first message: a client that finds the connection closed when it sends reads no reason.
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
        """Return the next message; None, after closing the connection, if it is idle too long."""
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
            except Exception as fault:  # an environment's code may raise anything
                log.exception("a message to environment %s failed", self._name)
                answer = _error("EXECUTION_ERROR", f"{type(fault).__name__}: {fault}")
            await socket.send_text(wire.dumps(answer).decode())


LARGEST = 100 << 20
"""Maximum bytes of a message, as in OpenEnv's client."""


def openenv_app(build: Callable[..., ToolEnv], scorer: ScorerLike | None = None, sessions: int = 64) -> Any:
    """Build an ASGI app that serves an environment to OpenEnv's clients, with a separate instance per connection.

    `build` makes an environment (`EnvRef.build`). Actions are `{"text": ...}`, or with `tool_calls`. `agentrl env serve ID
    --http` serves the same behind a token.
    """
    from starlette.applications import Starlette

    one = build()
    one.close()
    make = build if scorer is None else partial(build, scorer=scorer)
    return Starlette(routes=OpenEnvFace(make, one.id, one.summary, SessionLimits(episodes=sessions), None).routes(""))


class OpenEnv(ToolEnv):
    """An environment behind an OpenEnv server, played through one tool, `act`. If the server's actions are tool calls (MCP
    environments), it is played through the server's tools.

    The parameters of `act` are the fields of the server's action type. The state sums the rewards.
    """

    id = "openenv/Client-v0"
    reward = "openenv"
    shared = frozenset({"url", "token", "headers"})

    def __init__(self, *, url: str, rules: str = "", timeout: float = 60.0, name: str = "", token: str = "", **base: Any) -> None:
        """`url`: of the server. `rules`: system message. `timeout`: seconds per answer. `name`: of the environment in records.
        `token`: sent as `Authorization: Bearer TOKEN`. Raises DependencyError without websockets."""
        need_package("websockets", "OpenEnv needs websockets: pip install 'agentrl[openenv]'")
        super().__init__(**base)
        self.id = name or self.id  # type: ignore[misc]
        self.url, self.rules, self.timeout = url.rstrip("/"), rules, timeout
        self.token, self.headers = token, {"Authorization": f"Bearer {token}"} if token else {}
        self.socket: Any = None
        self.total: float | None = None
        self.steps, self.over, self.first = 0, False, ""

    def make_task(self, rng_seed: int, split: str) -> Task:
        """Draw the server's seeds: even ones for training, odd ones held out."""
        seed = rng_seed * 2 % 2**31 + SPLITS.index(split)
        return Task(f"openenv/{split}/{rng_seed}", rng_seed, split, {"seed": seed})

    async def setup(self, task: Task) -> None:
        from websockets.asyncio.client import connect

        self.total, self.steps, self.over = None, 0, False
        address = self.url.replace("http", "ws", 1) + "/ws"
        try:
            # No limit on pongs, which tunnels drop and a busy server sends late: the deadline of each answer decides.
            limits: dict[str, Any] = {"open_timeout": self.timeout, "max_size": LARGEST, "ping_timeout": None}
            self.socket = await connect(address, additional_headers=self.headers, proxy=None, **limits)
        except Exception as fault:  # websockets has an exception class per stage
            raise RemoteEnvError(f"OpenEnv server {self.url}: {type(fault).__name__}: {fault}") from fault
        schema = _schemas.get(self.url)
        if schema is None:  # on the loop, so that many can wait at once
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=self.timeout, headers=self.headers) as client:
                    schema = _schemas[self.url] = _action((await client.get(f"{self.url}/schema")).raise_for_status().json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as fault:
                raise EnvError(f"OpenEnv server {self.url}: no action schema: {type(fault).__name__}: {fault}") from fault
        result = await self._ask("reset", {"seed": task.data["seed"]})
        tools = [Tool.from_schema("act", "take one action", schema, _calls())]
        if {"tool_name", "arguments"} <= schema["properties"].keys():  # a server of tools
            listed = await self._ask("step", {"type": "list_tools"})
            calls = declarations(listed["observation"]["tools"])
            tools = [Tool.from_declaration(one, _calls(one["function"]["name"])) for one in calls]
        for tool in tools:
            # Longer than the answer's own deadline, whose error names the server.
            self.toolbox.add(replace(tool, method=True).with_options(parallel=False, timeout=self.timeout + 5.0))
        self.first = _show_fields(result.get("observation", {})) or "Begin."

    async def teardown(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            await socket.close()

    def prompt(self, task: Task) -> list[Message]:
        rules = [Message("system", self.rules)] if self.rules else []
        return [*rules, Message("user", self.first)]

    def state(self) -> Json:
        # A server that ends an episode without any reward could not score it, which is not 0.
        return {"reward": self.total if self.over else self.total or 0.0, "steps": self.steps, "done": self.over}

    async def act(self, action: Mapping[str, Json]) -> str | list[str | Image]:
        """Take one step on the server. Raises ToolError if its episode is over, or if it refuses the action."""
        if self.over:
            raise ToolError("the episode is over")
        result = await self._ask("step", dict(action))
        self.steps += 1
        if (reward := result.get("reward")) is not None:
            self.total = (self.total or 0.0) + float(reward)
        if result.get("done"):
            self.over = True
            self.finish()
        observation = result.get("observation", {})
        if isinstance(observation.get("error"), dict) and "error_type" in observation["error"]:
            raise ToolError(str(observation["error"].get("message", observation["error"])))
        return _show_fields(observation) if "tool_name" not in observation else _result(observation.get("result"))

    async def _ask(self, kind: str, data: Json) -> dict[str, Json]:
        """Send a message and return the data of its answer. Raises RemoteEnvError if the server is gone, ToolError for an invalid
        action, EnvError if the server failed."""
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(self.timeout):
                await self.socket.send(json.dumps({"type": kind, "data": data}))
                answer = read_json(await self.socket.recv())
        except TimeoutError:
            raise RemoteEnvError(f"OpenEnv server {self.url}: no answer to {kind} within {self.timeout:g} s") from None
        except (OSError, WebSocketException) as fault:
            raise RemoteEnvError(f"OpenEnv server {self.url}: the connection ended: {fault}") from fault
        except ValueError as fault:
            raise EnvError(f"OpenEnv server {self.url}: an answer that is no JSON: {fault}") from fault
        form = answer.get("type") if isinstance(answer, dict) else None
        body: dict[str, Json] = data if form is not None and isinstance(data := answer.get("data"), dict) else {}
        seen = body.get("observation") if form == "observation" else body or None
        if not isinstance(seen, dict) or form not in (("state" if kind == "state" else "observation"), "error"):
            raise EnvError(f"OpenEnv server {self.url}: it answers {str(answer)[:80]} to {kind}, expected an observation")
        if form != "error":
            return body
        errors = body.get("errors")  # for fields of an invalid action
        first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else None
        field = "" if first is None else f": {'.'.join(map(str, first.get('loc', ())))}: {first.get('msg', '')}"
        message = f"{body.get('message')} ({body.get('code')}{field})"
        if kind == "step" and body.get("code") == "VALIDATION_ERROR":
            raise ToolError(message)
        raise EnvError(f"OpenEnv server {self.url}: {message}")


_schemas: dict[str, dict[str, Json]] = {}


@lru_cache(maxsize=16)
def action_schema(url: str, token: str = "") -> dict[str, Json]:
    """Fetch the JSON Schema of a server's actions. Blocks. Raises ConfigError if the server does not provide it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return _action(httpx.get(f"{url}/schema", timeout=10.0, headers=headers, trust_env=False).raise_for_status().json())
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as fault:
        raise ConfigError(f"env.url: OpenEnv server {url}: no action schema: {type(fault).__name__}: {fault}") from fault


def _action(answer: Mapping[str, Json]) -> dict[str, Json]:
    schema: dict[str, Json] = dict(answer["action"])
    schema["properties"] = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def _show_fields(observation: Mapping[str, Json]) -> str:
    kept = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    only = list(kept.values())
    return only[0] if len(only) == 1 and isinstance(only[0], str) else as_text("act", kept)


def _result(result: Json) -> str | list[str | Image]:
    """Return a tool result of an MCP environment: its texts and images, or the value as JSON."""
    content = result.get("content") if isinstance(result, dict) else None
    blocks = [block for block in content or () if isinstance(block, dict)]
    if not any(isinstance(block.get("text"), str) or block.get("type") == "image" for block in blocks):
        return as_text("act", result)
    parts: list[str | Image] = []
    for block in blocks:
        part: str | Image = str(block["text"]) if isinstance(block.get("text"), str) else f"[{block.get('type')}, not shown]"
        if block.get("type") == "image" and not isinstance(block.get("text"), str):
            try:
                part = Image.read(base64.b64decode(str(block.get("data")), validate=True))
            except ValueError as problem:
                part = f"[image, not shown: {problem}]"
        parts.append(part)
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _calls(name: str | None = None) -> Callable[..., Any]:
    """Make the function of the tool `act`, or of the server's tool with that name."""

    async def call(env: OpenEnv, /, **arguments: Any) -> str | list[str | Image]:
        return await env.act(arguments if name is None else {"type": "call_tool", "tool_name": name, "arguments": arguments})

    return call
