"""Runs the server of `agentrl env serve ID --http` until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Self

from agentrl.env.remote.app import EnvApp
from agentrl.errors import ConfigError, DependencyError
from agentrl.serving import uvicorn_config

KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open: longer than a client keeps one, so that none is closed as it is used."""


class HttpServer:
    """An app on a socket, in the running event loop. Used as a context."""

    def __init__(self, app: EnvApp, host: str, port: int) -> None:
        """`port` 0 picks a free one. Raises DependencyError without the extra 'server', ConfigError if the port is taken."""
        if find_spec("websockets") is None:
            raise DependencyError("agentrl env serve --http needs websockets: pip install 'agentrl[server]'")
        import uvicorn

        self.app, self._listener = app, _listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._listener.getsockname()[1]}"
        config = uvicorn_config(
            app.asgi(),
            host,
            max_body=sys.maxsize,  # each route has the limit itself, and words for it
            timeout_keep_alive=KEEP_ALIVE,
            ws_max_size=app.limits.body,
            backlog=4096,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._server.serve(sockets=[self._listener])),
            asyncio.create_task(self.app.sessions.keep_swept()),
        ]
        while not self._server.started and not self._tasks[0].done():
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        await self.app.sessions.close_all()

    async def wait(self) -> None:
        """Until it ends: by Ctrl-C or a signal, which uvicorn takes."""
        await asyncio.wait([self._tasks[0]])


def serve_http(app: EnvApp, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `say` is told how to reach it. Raises ConfigError if the port is taken."""

    async def serve() -> None:
        async with HttpServer(app, host, port) as server:
            say(server.url)
            await server.wait()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


_NOT_HERE = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA)
"""Error numbers of an address of no interface, and of a name that is not found."""


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=4096)
    except (OSError, OverflowError) as problem:
        if isinstance(problem, OSError) and problem.errno in _NOT_HERE:
            raise ConfigError(f"--host {host}: no address of this machine: {problem}") from problem
        raise ConfigError(f"--port {port}: cannot listen on {host}:{port}: {problem}; try another port") from problem
    # Connections inherit it. asyncio sets it only on sockets that name their protocol; without it an answer, which is written in
    # two parts, waits 40 ms for the client's acknowledgement of the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
