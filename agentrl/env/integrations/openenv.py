"""OpenEnv (package openenv-core), both ways: serve an environment as an OpenEnv server, or play one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.util import find_spec
from typing import Any
from urllib.request import urlopen

from agentrl.env.base import ScorerLike, ToolEnv
from agentrl.env.seeds import SPLITS
from agentrl.errors import DependencyError, EnvError, TaskDataError, ToolError
from agentrl.executors import in_thread
from agentrl.tool import Tool
from agentrl.trajectory import Json, Message, Task


def _require() -> None:
    if find_spec("openenv") is None:
        raise DependencyError("OpenEnv needs its package: pip install 'agentrl[openenv]'")


# -- ours, served ----------------------------------------------------------------------------------


@cache
def _served_types() -> tuple[type, type, type]:
    """(action, observation, environment): defined late, because their base classes come from the optional package."""
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class TurnAction(Action):  # type: ignore[misc]
        """One assistant turn, as text; tool calls in the Hermes form."""

        text: str

    class TurnObservation(Observation):  # type: ignore[misc]
        """The new messages, and the tools that can be called."""

        messages: list[dict[str, Any]] = []  # noqa: RUF012 - pydantic copies defaults
        tools: list[dict[str, Any]] = []  # noqa: RUF012

    class ServedEnvironment(Environment):  # type: ignore[misc]
        """One ToolEnv behind OpenEnv's interface."""

        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self, build: Callable[[], ToolEnv]) -> None:
            super().__init__()
            self.env = build()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
            observation, info = self.env.reset(seed=seed, options=options or None)
            return self._observed(observation, 0.0, False, info)

        def step(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
            observation, reward, terminated, truncated, info = self.env.step(action.text)
            return self._observed(observation, reward, terminated or truncated, info)

        def _observed(self, messages: list[Message], reward: float, done: bool, info: Mapping[str, Any]) -> Any:
            shown = [asdict(message) for message in messages]
            tools = self.env.toolbox.schemas()
            return TurnObservation(messages=shown, tools=tools, reward=reward, done=done, metadata=dict(info))

        @property
        def state(self) -> Any:
            record = self.env.trajectory
            return State(step_count=len(record.turns), env_id=record.env_id, env_state=record.state)

        def close(self) -> None:
            self.env.close()

    return TurnAction, TurnObservation, ServedEnvironment


def openenv_app(build: Callable[..., ToolEnv], scorer: ScorerLike | None = None, sessions: int = 64) -> Any:
    """A FastAPI app that serves an environment to OpenEnv clients, with a separate instance for each session.

    `build` makes an environment (`EnvRef.build`). Actions are `{"text": ...}`. Raises DependencyError
    without openenv-core.
    """
    _require()
    from openenv.core.env_server.http_server import create_fastapi_app

    action, observation, environment = _served_types()

    def make() -> Any:
        return environment(lambda: build(scorer=scorer) if scorer is not None else build())

    return create_fastapi_app(make, action, observation, max_concurrent_envs=sessions)


# -- theirs, played --------------------------------------------------------------------------------


class OpenEnv(ToolEnv):
    """An environment behind an OpenEnv server, played through one tool, `act`.

    The tool's parameters are the fields of the server's action type. Rewards are summed in the state.
    """

    id = "openenv/Client-v0"

    def __init__(self, *, url: str, rules: str = "", timeout: float = 60.0, **base: Any) -> None:
        """`url`: of the server. `rules`: the system message. `timeout`: seconds for every answer.
        Raises DependencyError without openenv-core."""
        _require()
        super().__init__(**base)
        self.url, self.rules, self.timeout = url.rstrip("/"), rules, timeout
        self.client: Any = None
        self.total, self.steps, self.over, self.first = 0.0, 0, False, ""

    def make_task(self, rng_seed: int, split: str) -> Task:
        """Even seeds of the server are for training, odd ones are held out."""
        if split not in SPLITS:
            raise TaskDataError(f"{self.url}: no split {split!r}; expected one of {', '.join(SPLITS)}")
        seed = rng_seed * 2 % 2**31 + SPLITS.index(split)
        return Task(f"openenv/{split}/{rng_seed}", rng_seed, split, {"seed": seed})

    async def setup(self, task: Task) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self.total, self.steps, self.over = 0.0, 0, False
        parameters = await in_thread("load", self._action_schema)
        made = Tool.from_schema("act", "take one action", parameters, _act)
        self.toolbox.add(replace(made, method=True).with_options(parallel=False, timeout=self.timeout))
        self.client = GenericEnvClient(self.url, message_timeout_s=self.timeout)
        try:
            await self.client.connect()
            result = await self.client.reset(seed=task.data["seed"])
        except (OSError, RuntimeError, TimeoutError) as fault:
            raise EnvError(f"OpenEnv server {self.url}: {fault}") from fault
        self.first = _shown(result.observation)

    async def teardown(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.close()

    def prompt(self, task: Task) -> list[Message]:
        rules = [Message("system", self.rules)] if self.rules else []
        return [*rules, Message("user", self.first)]

    def state(self) -> Json:
        return {"reward": self.total, "steps": self.steps, "done": self.over}

    async def act(self, action: Mapping[str, Json]) -> str:
        """One step on the server. Raises ToolError if the server's episode is over."""
        if self.over:
            raise ToolError("the episode is over")
        result = await self.client.step(dict(action))
        self.steps += 1
        self.total += float(result.reward or 0.0)
        if result.done:
            self.over = True
            self.finish()
        return _shown(result.observation)

    def _action_schema(self) -> dict[str, Json]:
        try:
            with urlopen(f"{self.url}/schema", timeout=self.timeout) as answer:
                schema: dict[str, Json] = json.load(answer)["action"]
        except (OSError, ValueError, KeyError) as fault:
            raise EnvError(f"OpenEnv server {self.url}: no action schema: {fault}") from fault
        schema.get("properties", {}).pop("metadata", None)
        return {key: value for key, value in schema.items() if key not in ("title", "description")}


def _shown(observation: Mapping[str, Json]) -> str:
    kept = {key: value for key, value in observation.items() if key not in ("done", "reward", "metadata")}
    only = list(kept.values())
    return only[0] if len(only) == 1 and isinstance(only[0], str) else json.dumps(kept, ensure_ascii=False)


async def _act(env: OpenEnv, **action: Any) -> str:
    return await env.act(action)
