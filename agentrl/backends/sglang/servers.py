"""The servers of an engine: which one a request goes to, and which of them have died."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.backends.sglang.facts import MODEL, SERVER, Facts, check
from agentrl.backends.sglang.http import Http, Json, ServerDeadError
from agentrl.config.schema import SglangConfig
from agentrl.errors import EngineError

log = logging.getLogger(__name__)
_KEYS_REMEMBERED = 65536


@dataclass(eq=False, slots=True)
class Server:
    """One server. `cause`: why it is dead, None while it takes requests."""

    http: Http
    facts: Facts | None = None
    in_flight: int = 0
    cause: str | None = None

    @property
    def address(self) -> str:
        return self.http.address


class Servers:
    """All servers of the config, from `start` to `close`."""

    def __init__(self, cfg: SglangConfig, key: str | None) -> None:
        self._cfg = cfg
        self.all = [Server(Http(address, cfg.timeout, key)) for address in addresses(cfg.servers)]
        self._home: OrderedDict[str, Server] = OrderedDict()

    def alive(self) -> list[Server]:
        return [server for server in self.all if server.cause is None]

    async def look(self, server: Server, model_type: str | None) -> None:
        """Ask a server what it is. Raises EngineError if it cannot be used."""
        facts = Facts.of(server.address, await server.http.get(MODEL), await server.http.get(SERVER))
        check(facts, self._cfg, model_type)
        server.facts = facts

    def route(self, key: str) -> Server:
        """The server that has the episode's cache; for a new episode, or if that one died, the one with the fewest requests.
        Raises EngineError if all are dead."""
        server = self._home.pop(key, None)
        if server is None or server.cause is not None:
            able = self.alive()
            if not able:
                raise EngineError(f"no SGLang server is alive: {self.deaths()}")
            server = min(able, key=lambda one: one.in_flight)
        self._home[key] = server
        if len(self._home) > _KEYS_REMEMBERED:
            self._home.popitem(last=False)
        return server

    def homes(self) -> dict[str, str]:
        """The server's address for each remembered episode."""
        return {key: server.address for key, server in self._home.items()}

    async def lost(self, server: Server, cause: ServerDeadError) -> None:
        """A request's connection broke: the server is dead, unless it answers another one."""
        try:
            if server.cause is None:
                await server.http.get(MODEL)
                log.warning("%s; the server answers, and the turn is sampled again", cause)
        except EngineError:
            self.died(server, cause)

    def died(self, server: Server, cause: ServerDeadError) -> None:
        """Record a death once, however many requests report it."""
        if server.cause is None:
            server.cause = str(cause)
            log.warning(
                "SGLang server %s; its %d requests move on, and it is asked again at the next publish", cause, server.in_flight
            )

    def deaths(self) -> str:
        return "; ".join(server.cause for server in self.all if server.cause is not None) or "the engine is closed"

    async def post(
        self, servers: Sequence[Server], route: str, body: Mapping[str, Any], seconds: float | None = None
    ) -> list[Json]:
        """Call each of them. One that turns out to be dead is left out. Raises EngineError if one refuses, or if none is left."""
        calls = [server.http.post(route, body, seconds) for server in servers]
        # All answers before any error: raising at the first would leave the others' calls under way.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, ServerDeadError):
                self.died(server, answer)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ServerDeadError):
                raise answer
        if not self.alive():
            raise EngineError(f"no SGLang server is alive: {self.deaths()}")
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def close(self) -> None:
        for server in self.all:
            await server.http.close()
        self._home.clear()


def addresses(given: Sequence[str]) -> list[str]:
    """Addresses without a slash at their end."""
    return [address.rstrip("/") for address in given]
