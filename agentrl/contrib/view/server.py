"""The viewer's server: the page's files and its JSON, on loopback, for the browser of the user who started it.

Texts of a policy or tool are untrusted, and so is any other page in the same browser: requests must name a loopback host (against
DNS rebinding), there is no CORS, nothing is ever written, files come from a fixed list, and the page may connect only to this
server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from agentrl.contrib.toolkit.http_server import host_name, open_listener, patient
from agentrl.contrib.view.api import Api
from agentrl.contrib.view.library import Library
from agentrl.contrib.view.queries import NotFoundError
from agentrl.utils.errors import AgentrlError, ConfigError, UserError
from agentrl.utils.network import LOOPBACK
from agentrl.utils.parsing import json_text

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


log = logging.getLogger(__name__)
HOST = "127.0.0.1"
CROSS_SITE = {(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-site", b"same-site")}
"""Headers that mark a browser's cross-site request, which could not read the answer but could make environments run."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def make_app(library: Library, envs: bool = True) -> Starlette:
    """Build the app for a library; the caller starts the library's thread. `envs`: as in Api."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    api = Api(library, envs)
    run = "/api/runs/{run}"
    routes: dict[str, Callable[..., Any]] = {"/api/runs": api.runs, run: api.run, "/api/compare": api.compare}
    routes |= {f"{run}/episodes/{{episode}}": api.episode, f"{run}/episodes/{{episode}}/tokens": api.tokens}
    of_run = (api.metrics, api.episodes, api.facets, api.groups, api.failures, api.suspects)
    routes |= {f"{run}/{ask.__name__}": ask for ask in of_run}
    found = [Route(path, _json_handler(ask), methods=["GET"]) for path, ask in routes.items()]
    return Starlette(routes=[*found, Route("/api/{rest:path}", _missing), Route("/{path:path}", _asset, methods=["GET"])])


def guard_app(app: Any) -> Any:
    """Wrap the app in checks of the Host header and method, and add headers to every answer."""
    # Plain ASGI outside of all routes, so that a framework's own answers (404, 405) have the headers too.
    static = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def served(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *static]}
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or host_name(hosts[0]) not in LOOPBACK:
            await _json(403, {"error": f"the viewer answers on {HOST} and localhost only"})(scope, receive, sent)
        elif scope["path"].startswith("/api") and CROSS_SITE & {*scope["headers"]}:
            await _json(403, {"error": "the viewer's data is for its own page only"})(scope, receive, sent)
        elif scope["method"] not in ("GET", "HEAD"):
            await _json(405, {"error": "the viewer only reads: GET"})(scope, receive, sent)
        else:
            await app(scope, receive, sent)

    return served


def _json_handler(ask: Callable[..., Any]) -> Any:
    """Build a handler for a question. `ask` gets the path parameters in order, and the query parameters."""

    # A plain function runs in a thread, so that a slow query does not block other answers.
    def answer(request: Request) -> Response:
        try:
            return _json(200, ask(*request.path_params.values(), request.query_params))
        except NotFoundError as problem:
            return _json(404, {"error": str(problem)})
        except UserError as problem:
            return _json(400, {"error": str(problem)})
        except Exception as problem:  # the page shows it; the server continues
            log.exception("%s failed", request.url.path)
            said = str(problem) if isinstance(problem, AgentrlError) else f"{type(problem).__name__}: {problem}"
            return _json(500, {"error": said})

    return answer


def _json(status: int, body: Any) -> Response:
    from starlette.responses import Response

    # Escaped to ASCII, so that a lone surrogate of a tool's answer cannot break it; NaN is null.
    return Response(json_text(body, separators=(",", ":")), status, media_type="application/json")


def _missing(request: Request) -> Response:
    return _json(404, {"error": f"there is no {request.url.path}"})


def _asset(request: Request) -> Response:
    """Serve a file of the page. A path without an extension gets the page itself, which interprets it."""
    from starlette.responses import Response

    path = PurePosixPath(request.path_params["path"] or "index.html")
    name = str(path) if path.suffix else "index.html"
    body = assets().get(name)
    if body is None:
        return _missing(request)
    return Response(body, media_type=KINDS[PurePosixPath(name).suffix])


def assets() -> dict[str, bytes]:
    """Map names to the page's files. Only these are ever served, so no path leads outside."""
    root = Path(__file__).with_name("assets")
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.suffix in KINDS}


def serve(library: Library, port: int, say: Callable[[str], None], envs: bool = True) -> None:
    """Serve until Ctrl-C; calls `say` with the address. `port` 0 picks a free one. Raises ConfigError if the port is taken."""
    import uvicorn

    try:
        listener = open_listener(HOST, port)
    except (OSError, OverflowError) as problem:
        raise ConfigError(f"--port {port}: cannot listen on {HOST}: {problem}; try another, or 0 for a free one") from None
    options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "access_log": False, "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(guard_app(make_app(library, envs)), http=patient(), **options))
    library.start()
    try:
        say(f"http://{HOST}:{listener.getsockname()[1]}")
        with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
            asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
        library.close()
