"""HTTP servers that check a request's origin, size and pace."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import threading
from collections.abc import Collection
from contextlib import nullcontext
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from agentrl.utils.network import LOOPBACK, is_loopback

HEADERS_S = 10.0
"""Seconds to receive a request's headers, from the connection or its first byte on."""
HEADER_BYTES = 1 << 16
"""Limit of a request's line and headers, in bytes."""
BODY_GRACE_S, BODY_RATE = 20.0, 16 << 10
"""Time limit of a body: BODY_GRACE_S seconds, plus its bytes divided by BODY_RATE (bytes per second)."""
CHECK_S = 1.0
"""Seconds between two checks of a connection that waits for its client."""
MAX_BODY = 16 << 20
"""Default limit of a request's body, in bytes."""


async def _measure_body(app: Any, most: int, scope: Any, receive: Any, send: Any) -> None:
    """Limit request bodies: for a body above `most` bytes, the app sees a disconnect and the client gets a 413."""
    content_lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    size, answered, refused = 0, False, False

    async def refuse() -> None:
        nonlocal refused
        refused = True
        if not answered:
            await _refuse(send, 413, "request_too_large", f"the body has more than {most} bytes")

    async def receive_some() -> Any:
        nonlocal size
        message = {"type": "http.disconnect"} if refused else await receive()
        size += len(message.get("body", b""))
        if size > most and not refused:
            await refuse()
        return {"type": "http.disconnect"} if refused else message

    async def send_once(message: Any) -> None:
        nonlocal answered
        answered = True
        if not refused:
            await send(message)

    if any(not one.isdigit() or int(one[:20]) > most for one in content_lengths):
        await refuse()
        return
    try:
        await app(scope, receive_some, send_once)
    except Exception:
        if not refused:  # otherwise it is the app's reaction to the simulated disconnect
            raise


async def _refuse(send: Any, status: int, code: str, reason: str) -> None:
    body = json.dumps({"error": {"message": reason, "type": "invalid_request_error", "code": code}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _refusal_reason(headers: Collection[tuple[bytes, bytes]], allowed: Collection[str] | None) -> str | None:
    """Return the reason to refuse a request, or None."""
    given: dict[bytes, list[str]] = {}
    for name, value in headers:
        given.setdefault(name, []).append(value.decode("latin-1"))
    hosts = given.get(b"host", [])
    named = host_name(hosts[0]) if len(hosts) == 1 else None
    if named is None:
        return "a request needs exactly one Host header"
    if allowed is not None and named not in {one.lower().strip("[]") for one in allowed}:
        return "this server answers on its own address only (Host)"
    origin = given.get(b"origin", [])
    if origin and (len(origin) > 1 or urlsplit(origin[0]).netloc.lower() != hosts[0].lower()):
        return "this server does not answer pages of other sites (Origin)"
    if given.get(b"sec-fetch-site", ["none"])[0] in ("cross-site", "same-site"):
        return "this server does not answer pages of other sites"
    return None


def host_name(host: str) -> str | None:
    """Return the name in a Host header without its port, or None if it is invalid."""
    try:
        found = urlsplit(f"//{host}")
        _ = found.port
    except ValueError:
        return None
    return found.hostname if found.username is None and not found.path else None


def uvicorn_config(app: Any, host: str, max_body: int = MAX_BODY, **options: Any) -> Any:
    """Return the uvicorn.Config of a `patient` server that checks origins and limits bodies to `max_body` bytes. It has no
    lifespan and no access log (URLs may hold secrets).

    `host`: the listening address; on a loopback address the Host header must name it, since any web page's name may resolve to
    it (DNS rebinding). Requests that a browser sends for another site are always refused."""
    import uvicorn

    allowed = {*LOOPBACK, host} if is_loopback(host) else None

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        reason = None if scope["type"] == "lifespan" else _refusal_reason(scope["headers"], allowed)
        if scope["type"] == "websocket" and reason is not None:
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        elif reason is not None:
            await _refuse(send, 403, "forbidden", reason)
        elif scope["type"] == "http":
            await _measure_body(app, max_body, scope, receive, send)
        else:
            await app(scope, receive, send)

    chosen = {"log_level": "warning", "lifespan": "off", "access_log": False, "server_header": False, **options}
    return uvicorn.Config(serve, http=patient(), **chosen)


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening socket; `port` 0: any free port. Raises OSError or OverflowError if the port is not available."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
    # Connections inherit TCP_NODELAY. asyncio sets it only on sockets that name their protocol; without it the second part of an
    # answer waits 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class LocalServer:
    """Serve an app on a listening socket, configured by `uvicorn_config`, on the caller's event loop."""

    _server: Any = None
    _task: asyncio.Task[None]

    async def serve(self, app: Any, host: str, listener: socket.socket, inside: Any = None, **options: Any) -> asyncio.Task[None]:
        """Start serving the app inside the async context `inside`; return the serving task, which Ctrl-C and signals also end."""
        import uvicorn

        server = self._server = uvicorn.Server(uvicorn_config(app, host, **options))

        async def work() -> None:
            async with inside or nullcontext():  # a task group must be entered and left by the same task
                await server.serve(sockets=[listener])

        self._task = asyncio.create_task(work(), name=f"the server of {type(self).__name__}")
        try:
            while not server.started and not self._task.done():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            await self.stop()
            raise
        return self._task

    async def stop(self) -> None:
        """Stop listening; idempotent."""
        if self._server is not None:
            self._server.should_exit, self._server = True, None
            await self._task


class ThreadServer:
    """Serve an app on a listening socket in a thread with its own event loop, from construction to `close`. Configured by
    `uvicorn_config`; it also answers while the caller's loop is busy."""

    def __init__(self, app: Any, host: str, listener: socket.socket, max_body: int = MAX_BODY) -> None:
        import uvicorn

        config = uvicorn_config(app, host, max_body=max_body, timeout_graceful_shutdown=1)
        self._server, self._listener, given = uvicorn.Server(config), listener, {"sockets": [listener]}
        self._thread = threading.Thread(target=self._server.run, kwargs=given, name="agentrl-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()


@cache
def patient() -> type[Any]:
    """Return uvicorn's HTTP protocol class with time limits for clients that stall within a request."""
    base: Any = importlib.import_module("uvicorn.protocols.http.auto").AutoHTTPProtocol

    class Patient(base):  # type: ignore[misc, unused-ignore]
        """Abort a connection whose client is too slow. Headers have HEADERS_S, unless nothing arrived since the last answer
        (then uvicorn's `timeout_keep_alive` applies); a body has the limit of BODY_GRACE_S and BODY_RATE, without the time in
        which the server itself did not read."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.waited, self.headers_bytes, self.body_bytes, self.begun = 0.0, 0, 0, True
            self.looking = asyncio.get_running_loop().call_later(CHECK_S, self.look)

        def connection_lost(self, problem: Exception | None) -> None:
            self.looking.cancel()
            super().connection_lost(problem)

        def data_received(self, data: bytes) -> None:
            was = self.phase()
            if was == "body":
                self.body_bytes += len(data)
            elif was == "headers":
                self.headers_bytes += len(data)
                self.begun = True
            super().data_received(data)
            now = self.phase()
            if now == "headers" and self.headers_bytes > HEADER_BYTES:
                self.transport.abort()
            elif now != was:
                self.waited, self.body_bytes = 0.0, len(data) if now == "body" else 0
            if now != "headers":
                self.headers_bytes = 0

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # The rest of a body that was refused before its end has the time limit of headers.
            self.waited, self.headers_bytes, self.begun = 0.0, 0, bool(self.cycle is not None and self.cycle.more_body)

        def phase(self) -> str:
            cycle = self.cycle
            if cycle is None or (cycle.response_complete and not cycle.more_body):
                return "headers"
            if cycle.response_complete:
                return "rest"
            return "body" if cycle.more_body else "answer"

        def look(self) -> None:
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return  # closed, or upgraded to a websocket
            phase = self.phase()
            if phase in ("headers", "rest"):
                self.waited += CHECK_S if self.begun else 0.0
                late = self.waited >= HEADERS_S
            elif phase == "body":
                self.waited += 0.0 if self.flow.read_paused else CHECK_S
                late = self.waited >= BODY_GRACE_S + self.body_bytes / BODY_RATE
            else:
                self.waited, late = 0.0, False
            if late:
                self.transport.abort()
            else:
                self.looking = asyncio.get_running_loop().call_later(CHECK_S, self.look)

    return Patient
