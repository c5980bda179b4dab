"""Requests to servers of environments: one thread of a process for all of them, however many episodes wait."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import cache, lru_cache
from typing import Any, TypeVar

import httpx

from agentrl.env.remote import wire
from agentrl.errors import ConfigError, RemoteEnvError
from agentrl.executors import after_fork
from agentrl.plain_data import read_json
from agentrl.trajectory import Json

T = TypeVar("T")
Watching = Callable[[list[dict[str, Json]] | str], None]
"""Told which tool calls are in progress on the server, or why it does not answer."""

PATIENCE = 30.0
"""Seconds without any answer after which a server is given up. A request may be sent again: none is ever done twice."""

_AGAIN = (502, 503, 504)
"""Statuses of a proxy that does not reach its server, and of a server with too many episodes."""
_GRACE = 10.0

POOLS = 64
"""Pools of connections to a server, between which requests are spread."""


class _Loop:
    """An event loop in a thread of its own, for the callers of any loop and of none."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self, _Loop._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The work's result, of the loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name="agentrl-remote").start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)


_LOOP = _Loop()


class _Pool:
    """Connections to one server; `busy`: requests on them."""

    def __init__(self, url: str, token: str) -> None:
        self._made: httpx.AsyncClient | None = None
        self._url, self._token, self.busy = url, token, 0

    @property
    def client(self) -> httpx.AsyncClient:
        """Made at its first use: most runs need few pools."""
        if self._made is None:
            self._made = httpx.AsyncClient(
                base_url=self._url,
                headers={
                    "content-type": "application/json",
                    **({"authorization": f"Bearer {self._token}"} if self._token else {}),
                },
                # As many connections as requests that wait: a limit would let slow tools hold up quick ones.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0),
                timeout=httpx.Timeout(_GRACE, read=wire.WAIT_SECONDS + _GRACE),
                verify=_certificates() if self._url.startswith("https") else False,
                trust_env=False,
            )
        return self._made


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than many requests."""
    return ssl.create_default_context()


class Link:
    """One server, and the token with which it is asked."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._begin()
        after_fork(self, Link._begin)

    def _begin(self) -> None:
        self._pools = [_Pool(self.url, self._token) for _ in range(POOLS)]

    async def ask(self, route: str, body: Mapping[str, Json], watch: Watching, method: str = "POST") -> Json:
        """The answer. Raises RemoteEnvError if the server is not there or does not know the session, and what it refuses as
        `fault_of` says. Cancelling gives the request up; the server may still do it."""
        return await asyncio.wrap_future(_LOOP.submit(self._ask(route, body, watch, method, PATIENCE)))

    def ask_now(self, route: str, body: Mapping[str, Json], patience: float = PATIENCE) -> Json:
        """The same, blocking."""
        return _LOOP.submit(self._ask(route, body, lambda seen: None, "POST", patience)).result()

    async def _send(self, method: str, route: str, content: bytes) -> httpx.Response:
        # The least busy one. httpx looks through all connections of a pool at each request, so one with a thousand would take
        # longer than the episodes do.
        pool = min(self._pools, key=lambda one: one.busy)
        pool.busy += 1
        try:
            # A deadline of the whole exchange beside httpx's, which are of each read.
            async with asyncio.timeout(wire.WAIT_SECONDS + 2 * _GRACE):
                return await pool.client.request(method, route, content=content)
        finally:
            pool.busy -= 1

    async def _ask(self, route: str, body: Mapping[str, Json], watch: Watching, method: str, patience: float) -> Json:
        content, heard, tries = wire.dumps({**body, "protocol": wire.PROTOCOL}), time.monotonic(), 0
        while True:
            try:
                answer = await self._send(method, route, content)
            except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as problem:
                raise RemoteEnvError(f"{self.url}: {problem}") from problem
            except (httpx.TransportError, TimeoutError) as problem:
                failed = f"{type(problem).__name__}: {problem}".rstrip(": ")
            else:
                if answer.status_code == httpx.codes.OK:
                    return read_json(answer.content)
                if answer.status_code == httpx.codes.ACCEPTED:
                    heard, tries = time.monotonic(), 0
                    watch(read_json(answer.content)["calls"])
                    continue
                if answer.status_code not in _AGAIN:
                    raise self._refusal(answer)
                failed = f"{answer.status_code} {_message(answer)}"
            watch(failed)
            if time.monotonic() - heard >= patience:
                raise RemoteEnvError(f"{self.url}: no answer for {patience:g} s: {failed}")
            await asyncio.sleep(min(0.05 * 2**tries, 2.0))
            tries += 1

    def _refusal(self, answer: httpx.Response) -> Exception:
        try:
            body = answer.json()
        except ValueError:
            body = {}
        if "fault" in body:
            return wire.fault_of(body["fault"])
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return ConfigError(f"{self.url}: {_message(answer)}; name the variable that has it in env.token_env")
        if body.get("refused") == "protocol":
            # Servers of protocols before 3 do not say who has to be upgraded: they.
            advice = "" if "upgrade" in _message(answer) else "; upgrade the server's agentrl"
            return RemoteEnvError(f"{self.url}: {_message(answer)}{advice}")
        return LostError(f"{self.url}: {_message(answer)}", answer.headers.get("x-agentrl-boot"))


class LostError(RemoteEnvError):
    """The server refuses a request of a session. `boot`: which start of the server said so."""

    def __init__(self, message: str, boot: str | None) -> None:
        super().__init__(message)
        self.boot = boot


@lru_cache(maxsize=64)
def link_to(url: str, token: str) -> Link:
    """The link of this process to a server."""
    return Link(url, token)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}: is this a server of agentrl?"
