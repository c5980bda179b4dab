"""OpenEnv, both ways: serve an environment to its clients, or play one that is behind a server of theirs.

The protocol is spoken directly, by the source of openenv-core 0.3.0, so that neither side needs that package.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import httpx

from agentrl.env.base import ToolEnv
from agentrl.env.own_reward import ScorerLike
from agentrl.env.remote.openenv import OpenEnvFace
from agentrl.env.remote.sessions import SessionLimits
from agentrl.env.seeds import SPLITS
from agentrl.errors import ConfigError, DependencyError, EnvError, RemoteEnvError, TaskDataError, ToolError
from agentrl.plain_data import read_json
from agentrl.tool import Tool
from agentrl.tool.forms import declarations
from agentrl.tool.output import as_text
from agentrl.trajectory import Json, Message, Task

LARGEST = 100 << 20
"""Bytes of a message, as of OpenEnv's own client."""


def openenv_app(build: Callable[..., ToolEnv], scorer: ScorerLike | None = None, sessions: int = 64) -> Any:
    """An ASGI app that serves an environment to OpenEnv's clients, with a separate instance for each connection.

    `build` makes an environment (`EnvRef.build`). Actions are `{"text": ...}`, or with `tool_calls`.
    `agentrl env serve ID --http` has the same, behind a token.
    """
    from starlette.applications import Starlette

    one = build()
    one.close()

    def make() -> ToolEnv:
        return build(scorer=scorer) if scorer is not None else build()

    return Starlette(routes=OpenEnvFace(make, one.id, one.summary, SessionLimits(episodes=sessions), None).routes(""))


class OpenEnv(ToolEnv):
    """An environment behind an OpenEnv server, played through one tool, `act`; or, if the server's actions are calls of tools
    (its MCP environments), through those tools.

    The parameters of `act` are the fields of the server's action type. Rewards are summed in the state.
    """

    id = "openenv/Client-v0"
    reward = "openenv"
    shared = frozenset({"url", "headers"})

    def __init__(self, *, url: str, rules: str = "", timeout: float = 60.0, name: str = "", token: str = "", **base: Any) -> None:
        """`url`: of the server. `rules`: the system message. `timeout`: seconds for every answer. `name`: what the environment
        is called in records. `token`: sent as `Authorization: Bearer TOKEN`. Raises DependencyError without websockets."""
        if find_spec("websockets") is None:
            raise DependencyError("OpenEnv needs websockets: pip install 'agentrl[openenv]'")
        super().__init__(**base)
        self.id = name or self.id  # type: ignore[misc]
        self.url, self.rules, self.timeout = url.rstrip("/"), rules, timeout
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.socket: Any = None
        self.total, self.steps, self.over, self.first = 0.0, 0, False, ""

    def make_task(self, rng_seed: int, split: str) -> Task:
        """Even seeds of the server are for training, odd ones are held out."""
        if split not in SPLITS:
            raise TaskDataError(f"{self.url}: no split {split!r}; expected one of {', '.join(SPLITS)}")
        seed = rng_seed * 2 % 2**31 + SPLITS.index(split)
        return Task(f"openenv/{split}/{rng_seed}", rng_seed, split, {"seed": seed})

    async def setup(self, task: Task) -> None:
        from websockets.asyncio.client import connect

        self.total, self.steps, self.over = 0.0, 0, False
        address = self.url.replace("http", "ws", 1) + "/ws"
        try:
            self.socket = await connect(
                address, open_timeout=self.timeout, max_size=LARGEST, additional_headers=self.headers, proxy=None
            )
        except Exception as fault:  # websockets has a class of its own for each stage
            raise RemoteEnvError(f"OpenEnv server {self.url}: {type(fault).__name__}: {fault}") from fault
        schema = await self._schema()
        result = await self._ask("reset", {"seed": task.data["seed"]})
        for made in await self._made_tools(schema):
            self.toolbox.add(made)
        self.first = _shown(result.get("observation", {})) or "Begin."

    async def teardown(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            await socket.close()

    def prompt(self, task: Task) -> list[Message]:
        rules = [Message("system", self.rules)] if self.rules else []
        return [*rules, Message("user", self.first)]

    def state(self) -> Json:
        return {"reward": self.total, "steps": self.steps, "done": self.over}

    async def act(self, action: Mapping[str, Json]) -> str:
        """One step on the server. Raises ToolError if the server's episode is over, or if it refuses the action."""
        if self.over:
            raise ToolError("the episode is over")
        result = await self._ask("step", dict(action))
        self.steps += 1
        self.total += float(result.get("reward") or 0.0)
        if result.get("done"):
            self.over = True
            self.finish()
        observation = result.get("observation", {})
        if isinstance(observation.get("error"), dict) and "error_type" in observation["error"]:
            raise ToolError(str(observation["error"].get("message", observation["error"])))
        return _shown(observation) if "tool_name" not in observation else _result(observation.get("result"))

    async def _ask(self, kind: str, data: Json) -> dict[str, Json]:
        """The data of the answer. Raises RemoteEnvError if the server is gone, ToolError if it says that the action is invalid,
        EnvError if it failed."""
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
        body: dict[str, Json] = answer.get("data", {})
        if answer.get("type") != "error":
            return body
        message = f"{body.get('message')} ({body.get('code')}{_first(body.get('errors'))})"
        if kind == "step" and body.get("code") == "VALIDATION_ERROR":
            raise ToolError(message)
        raise EnvError(f"OpenEnv server {self.url}: {message}")

    async def _schema(self) -> dict[str, Json]:
        known = _schemas.get(self.url)
        if known is None:
            try:
                async with httpx.AsyncClient(trust_env=False, timeout=self.timeout, headers=self.headers) as client:
                    known = _schemas[self.url] = _action((await client.get(f"{self.url}/schema")).raise_for_status().json())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as fault:
                raise EnvError(f"OpenEnv server {self.url}: no action schema: {type(fault).__name__}: {fault}") from fault
        return known

    async def _made_tools(self, schema: Mapping[str, Json]) -> list[Tool]:
        options = {
            "parallel": False,
            "timeout": self.timeout + 5.0,
        }  # later than the answer's own deadline, which names the server
        if not {"tool_name", "arguments"} <= schema["properties"].keys():
            made = Tool.from_schema("act", "take one action", schema, _act)
            return [replace(made, method=True).with_options(**options)]
        listed = await self._ask("step", {"type": "list_tools"})
        tools = declarations(listed["observation"]["tools"])
        return [
            replace(Tool.declared(one, _calls(one["function"]["name"])), method=True).with_options(**options) for one in tools
        ]


_schemas: dict[str, dict[str, Json]] = {}


@lru_cache(maxsize=16)
def action_schema(url: str, token: str = "") -> dict[str, Json]:
    """The JSON Schema of a server's actions. Blocks. Raises ConfigError if the server does not give it."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return _action(httpx.get(f"{url}/schema", timeout=10.0, headers=headers, trust_env=False).raise_for_status().json())
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as fault:
        raise ConfigError(f"env.url: OpenEnv server {url}: no action schema: {type(fault).__name__}: {fault}") from fault


def _action(answer: Mapping[str, Json]) -> dict[str, Json]:
    schema: dict[str, Json] = dict(answer["action"])
    schema["properties"] = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
    return {key: value for key, value in schema.items() if key not in ("title", "description")}


def _first(errors: Json) -> str:
    """What is wrong with the first field of an action that the server found invalid."""
    if not isinstance(errors, list) or not errors or not isinstance(errors[0], dict):
        return ""
    return f": {'.'.join(map(str, errors[0].get('loc', ())))}: {errors[0].get('msg', '')}"


def _shown(observation: Mapping[str, Json]) -> str:
    kept = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    only = list(kept.values())
    return only[0] if len(only) == 1 and isinstance(only[0], str) else as_text("act", kept)


def _result(result: Json) -> str:
    """What a tool of an MCP environment answered: the texts of its content, or the value as JSON."""
    blocks = result.get("content") if isinstance(result, dict) else None
    texts = [block["text"] for block in blocks or () if isinstance(block, dict) and isinstance(block.get("text"), str)]
    if texts:
        return "\n".join(texts)
    return as_text("act", result)


async def _act(env: OpenEnv, **action: Any) -> str:
    return await env.act(action)


def _calls(name: str) -> Callable[..., Any]:
    async def call(env: OpenEnv, **arguments: Any) -> str:
        return await env.act({"type": "call_tool", "tool_name": name, "arguments": arguments})

    return call
