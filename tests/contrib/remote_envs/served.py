"""A server of an environment in a thread of the test's process, over real sockets."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

import pytest

from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.server import EnvApp, EnvOffer, http_server
from agentrl.contrib.remote_envs.sessions import Secret, SessionLimits
from agentrl.env import ToolEnv
from agentrl.env.address import EnvAddress, EnvRequest
from agentrl.env.catalog import EnvRef
from agentrl.run.digests import env_digest

TOKEN = "a-token-of-the-tests-only"
VARIABLE = "AGENTRL_TEST_ENV_TOKEN"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)


class Offer:
    """Offers an environment that no shelf has; `made` are those that were built."""

    summary = "a toy"

    def __init__(self, name: str, make: Callable[..., ToolEnv]) -> None:
        self.name, self.play, self.made = name, make, list[Any]()

    def build(self, asked: EnvRequest) -> ToolEnv:
        self.made.append(self.play(**asked.params))
        return self.made[-1]

    def card(self, asked: EnvRequest) -> dict[str, Any]:
        env = self.play(**asked.params)
        return {
            "env": {"id": env.id}, "splits": ["train"], "order_free": False, "idle_share": 0.0, "scripted": env.user_repeats,
            "task_count": {}, "toolbox": wire.toolbox_row(env.toolbox),
        }  # fmt: skip


class Running:
    """A server that runs; `port` 0: a free one."""

    def __init__(self, offer: object, limits: SessionLimits, port: int = 0) -> None:
        self.app = EnvApp(offer, Secret(TOKEN), limits)
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(port),), daemon=True)
        self._thread.start()
        assert self._started.wait(20)

    async def _run(self, port: int) -> None:
        self._stop = asyncio.Event()
        async with http_server(self.app, "127.0.0.1", port) as (self.url, _):
            self.port = int(self.url.rpartition(":")[2])
            self._started.set()
            await self._stop.wait()

    def address(self) -> EnvAddress:
        return EnvAddress(self.url, "agentrl", VARIABLE)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


def served(env_id: str, limits: SessionLimits | None = None, port: int = 0, **params: object) -> Running:
    """`agentrl env serve ENV --http`."""
    return Running(EnvOffer(EnvRef(env_id, params), env_digest), limits or SessionLimits(), port)
