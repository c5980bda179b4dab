"""Serve an environment of the catalog over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl import __version__
from agentrl.config.schema import Choice, RewardConfig, ToolsConfig
from agentrl.contrib.remote_envs import wire
from agentrl.contrib.remote_envs.openenv import OpenEnvFace
from agentrl.contrib.remote_envs.sessions import KINDS, EnvSessions, RefusedError, Secret, SessionLimits
from agentrl.contrib.toolkit.http_server import LocalServer, open_listener
from agentrl.data.trajectory import Json, Task
from agentrl.env import ToolEnv
from agentrl.env.address import EnvRequest
from agentrl.env.base import plain_prompt
from agentrl.env.catalog import EnvRef, find_spec, make_scorer
from agentrl.utils.errors import CatalogError, ConfigError, EnvError, UserError, fault_text, hint_text, need_package
from agentrl.utils.network import strict_json
from agentrl.utils.redaction import references

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


log = logging.getLogger(__name__)
MOST_CONTAINERS, MOST_DEPTH = 4_000_000, 512
"""Limits of a trainer's JSON request, which contains texts of the policy."""


class EnvApp:
    """An ASGI app that serves one offer. `boot` identifies this start of the server, which sessions do not survive."""

    def __init__(self, offer: EnvOffer, secret: Secret, limits: SessionLimits | None = None) -> None:
        self.offer, self.secret, self.limits = offer, secret, limits or SessionLimits()
        self.boot = wire.new_id()
        self.sessions = EnvSessions(offer.build, self.limits, self.boot)

    def asgi(self) -> Any:
        """Build the app, with OpenEnv's routes next to agentrl's."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        face = OpenEnvFace(self.offer.play, self.offer.name, self.offer.summary, self.limits, self.secret)
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/describe", self._guard(self._describe), methods=["POST"]),
                Route("/v1/ask", self._guard(self._ask), methods=["POST"]),
                Route("/v1/sessions/{key}/{kind}", self._guard(self._call), methods=["POST"]),
                *face.routes("/openenv/{player}"),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return self._answer(200, wire.dumps({"status": "healthy"}))

    def _guard(self, handle: Callable[[Request, Mapping[str, Json]], Awaitable[Response]]) -> Any:
        from starlette.requests import ClientDisconnect

        async def handler(request: Request) -> Response:
            try:
                self.secret.check(request.headers.get("authorization", ""))
                return await handle(request, await self._body(request))
            except RefusedError as refused:
                return self._answer(refused.status, wire.dumps({"refused": refused.kind, "message": str(refused)}))
            except (UserError, EnvError, NotImplementedError) as fault:
                return self._answer(422, wire.dumps({"fault": wire.fault_row(fault)}))
            except (KeyError, TypeError, ValueError) as problem:
                text = fault_text(problem)
                return self._answer(400, wire.dumps({"refused": "bad_request", "message": text}))
            except ClientDisconnect:
                raise
            except Exception as fault:  # an environment's code may raise anything
                log.exception("a request to %s failed", request.url.path)
                return self._answer(422, wire.dumps({"fault": wire.fault_row(fault)}))

        return handler

    async def _body(self, request: Request) -> Mapping[str, Json]:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > self.limits.body:
                raise RefusedError(413, "too_large", f"a request of more than {self.limits.body} bytes (--max-body)")
        read = strict_json(body, MOST_CONTAINERS, MOST_DEPTH, rfc=False) if body else {}
        if not isinstance(read, dict):
            raise RefusedError(400, "bad_request", "the body is not a JSON object")
        if (theirs := read.get("protocol", wire.PROTOCOL)) != wire.PROTOCOL:
            older = "client" if isinstance(theirs, int) and theirs < wire.PROTOCOL else "server"
            raise RefusedError(
                400,
                "protocol",
                f"the server (agentrl {__version__}) speaks protocol {wire.PROTOCOL}, the client {theirs}; upgrade the {older}'s "
                "agentrl",
            )
        return read

    def _answer(self, status: int, body: bytes) -> Response:
        from starlette.responses import Response

        return Response(body, status, {"x-agentrl-boot": self.boot}, media_type="application/json")

    async def _describe(self, request: Request, body: Mapping[str, Json]) -> Response:
        own = {"protocol": wire.PROTOCOL, "agentrl": __version__, "boot": self.boot, "limits": asdict(self.limits)}
        return self._answer(200, wire.dumps({**self.offer.card(EnvRequest.of(body["env"])), **own}))

    async def _ask(self, request: Request, body: Mapping[str, Json]) -> Response:
        """Answer a request that needs no episode."""
        env = self.offer.build(EnvRequest.of(body["env"]))
        if body["what"] == "make_task":
            if type(body["seed"]) is not int or not isinstance(body["split"], str):
                raise RefusedError(400, "bad_request", "seed: expected a whole number; split: expected text")
            result: Json = env.make_task(body["seed"], body["split"])
        elif body["what"] == "prompt":
            result = plain_prompt(env, Task(**body["task"]))
        elif body["what"] == "gold_turns":
            result = list(env.gold_turns(Task(**body["task"])))
        else:
            raise RefusedError(400, "bad_request", f"what = {body['what']!r}: expected make_task, prompt or gold_turns")
        return self._answer(200, wire.dumps({"result": result}))

    async def _call(self, request: Request, body: Mapping[str, Json]) -> Response:
        key, kind, number = request.path_params["key"], request.path_params["kind"], body["number"]
        if kind not in KINDS:
            raise RefusedError(404, "bad_request", f"there is no request {kind!r}")
        if type(number) is not int or number < 0:
            raise RefusedError(400, "bad_request", f"number: expected a whole number from 0, got {repr(number)[:80]}")
        begins = number == 0 and kind in ("reset", "restore")
        session = self.sessions.begin(key) if begins else self.sessions.find(key)
        work = await session.call(kind, number, body)
        done, _ = await asyncio.wait([work], timeout=min(float(body.get("wait", wire.WAIT_SECONDS)), wire.WAIT_SECONDS))
        if not done:
            return self._answer(202, wire.dumps({"calls": session.waiting()}))
        return self._answer(200, work.result())


KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than a client's, so that none is closed as the client uses it."""


@contextlib.asynccontextmanager
async def http_server(app: EnvApp, host: str, port: int) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Serve an app in the running event loop; yields its URL, and the task that ends by Ctrl-C or a signal (uvicorn handles
    both).

    `port`: 0 picks a free one. Raises DependencyError without the extra 'server', ConfigError if the port is taken."""
    need_package("websockets", "agentrl env serve --http needs websockets: pip install 'agentrl[server]'")
    listener, name, server = open_socket(host, port), f"[{host}]" if ":" in host else host, LocalServer()
    serving = await server.serve(
        app.asgi(),
        host,
        listener,
        max_body=sys.maxsize,  # each route enforces the limit, with its own error
        timeout_keep_alive=KEEP_ALIVE,
        ws_max_size=app.limits.body,
        backlog=4096,
        timeout_graceful_shutdown=5,
    )
    sweeping = asyncio.create_task(app.sessions.keep_swept())
    try:
        yield f"http://{name}:{listener.getsockname()[1]}", serving
    finally:
        sweeping.cancel()
        with contextlib.suppress(Exception):  # `serving` has the error
            await server.stop()
        await app.sessions.close_all()


def serve_http(app: EnvApp, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; calls `say` with the URL. Raises ConfigError if the port is taken."""

    async def serve() -> None:
        async with http_server(app, host, port) as (url, serving):
            say(url)
            await asyncio.wait([serving])

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())


_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA)
"""Error numbers of an address without an interface, and of an unknown host name."""


def open_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Open a listener. Raises ConfigError if the port is unavailable; `option`: the command's option for it."""
    try:
        return open_listener(host, port)
    except (OSError, OverflowError) as problem:
        if isinstance(problem, OSError) and problem.errno in _NO_SUCH_ADDRESS:
            raise ConfigError(f"--host {host}: no address of this machine: {problem}") from problem
        raise ConfigError(f"{option} {port}: cannot listen on {host}:{port}: {problem}; try another port") from problem


# A server's offer


class EnvOffer:
    """One environment on this machine's shelves. A client may override `ref.params`, and name wrappers and tool sets of this
    machine's shelves."""

    def __init__(self, ref: EnvRef, digest: Callable[[EnvRef], str | None] = lambda ref: None) -> None:
        """`digest`: hashes the environment's files, so that a client notices changed code."""
        self.ref, self._digest = ref, digest
        self.name, self.summary = ref.entry.id, ref.entry.summary
        self._refs: dict[bytes, EnvRef] = {}

    def build(self, asked: EnvRequest) -> ToolEnv:
        """Build the environment. Raises CatalogError for another id, invalid parameters or unknown tool sets, ConfigError for
        invalid wrappers."""
        return self._ref(asked).build()

    def play(self) -> ToolEnv:
        return self.ref.build(**({} if self._scorer is None else {"scorer": self._scorer}))

    @cached_property
    def _scorer(self) -> object | None:
        if self.ref.default_reward() is None:
            return None
        return make_scorer(find_spec(self.ref, None), RewardConfig(), self.ref)

    def _ref(self, asked: EnvRequest) -> EnvRef:
        entry = self.ref.entry
        if asked.id not in (names := (entry.id, entry.name)):
            hint = hint_text(asked.id, names)
            raise CatalogError(f"env.id: this server has {entry.id} ({entry.name}), not {asked.id!r}{hint}")
        # Cached, so that an episode does not look up its class again.
        key = wire.dumps(asked.row())
        if key not in self._refs:
            if len(self._refs) > 1000:
                self._refs.clear()
            for name in asked.sets:
                if Path(name).name != name or name.startswith("~") or name.endswith(".py"):
                    raise CatalogError(f"tools.sets: {name!r} is a path; a client names tool sets on the shelves of the server")
            for name in sorted(asked.params.keys() & getattr(entry.load(), "host_params", ())):
                if asked.params[name] != self.ref.params.get(name):
                    raise CatalogError(
                        f"params.{name} names a thing on the server's machine, and is the server's to set: agentrl env serve "
                        f"{entry.name} {name}=..."
                    )
            for place, text in references({"params": asked.params, "wrappers": asked.wrappers}):
                raise CatalogError(f"{place} = {text!r}: a client has no variables of the server's machine")
            wrappers = tuple(Choice(**row) for row in asked.wrappers)
            tools = ToolsConfig(sets=[*self.ref.tools.sets, *asked.sets], args=self.ref.tools.args)
            params = {**self.ref.params, **asked.params}
            asked_for = replace(self.ref, params=params, tools=tools, wrappers=(*self.ref.wrappers, *wrappers))
            self._refs[key] = replace(asked_for, max_output=asked.max_output or self.ref.max_output)
        return self._refs[key]

    def card(self, asked: EnvRequest) -> dict[str, Json]:
        ref = self._ref(asked)
        with contextlib.closing(ref.build()) as env:
            inner = env.unwrapped
            task = env.make_task(0, env.splits[0])  # refuses a class that makes no task now, before a client asks
            try:
                env.gold_turns(task)
                gold = True
            except NotImplementedError:
                gold = False
            return {
                "env": {"id": env.id, "name": ref.entry.name, "summary": self.summary},
                "splits": list(env.splits),
                "order_free": env.order_free,
                "idle_share": env.idle_share,
                "scripted": env.user_repeats,
                "task_count": {split: env.task_count(split) for split in env.splits},
                "toolbox": wire.toolbox_row(env.toolbox),
                "reward": None if ref.default_reward() is None else find_spec(ref, None),
                "gold": gold,
                "teacher": gold or (isinstance(inner, ToolEnv) and type(inner).teacher is not ToolEnv.teacher),
                "files": self._digest(ref),
            }
