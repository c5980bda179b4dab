"""The HTTP face of a server of an environment: routes, the secret token, limits of requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from agentrl import __version__
from agentrl.env.base import ToolEnv, plain_prompt
from agentrl.env.remote import wire
from agentrl.env.remote.openenv import OpenEnvFace
from agentrl.env.remote.secret import Secret
from agentrl.env.remote.sessions import KINDS, EnvSessions, RefusedError, SessionLimits
from agentrl.env.remote.wire import Asked
from agentrl.errors import EnvError, UserError
from agentrl.serving import strict_json
from agentrl.trajectory import Json, Task

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


log = logging.getLogger(__name__)
MOST_CONTAINERS, MOST_DEPTH = 4_000_000, 512
"""Of a trainer's request: what a policy wrote is in it, as Python writes JSON."""


class EnvProvider(Protocol):
    """What is served."""

    @property
    def name(self) -> str:
        """The environment's id."""
        ...

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        ...

    def play(self) -> ToolEnv:
        """A new environment as it is, which scores its own episodes."""
        ...

    def build(self, asked: Asked) -> ToolEnv:
        """A new environment, as a client asks for it. Raises UserError if it cannot be had here."""
        ...

    def card(self, asked: Asked) -> dict[str, Json]:
        """What a client must know of such an environment before an episode, as JSON."""
        ...


class EnvApp:
    """An ASGI app over one offer. `boot` names this start of the server: sessions do not outlive it."""

    def __init__(self, offer: EnvProvider, secret: Secret, limits: SessionLimits | None = None) -> None:
        self.offer, self.secret, self.limits = offer, secret, limits or SessionLimits()
        self.boot = wire.new_id()
        self.sessions = EnvSessions(offer.build, self.limits, self.boot)

    def asgi(self) -> Any:
        """The app, with OpenEnv's routes beside agentrl's."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        face = OpenEnvFace(self.offer.play, self.offer.name, self.offer.summary, self.limits, self.secret)
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/describe", self._guarded(self._describe), methods=["POST"]),
                Route("/v1/ask", self._guarded(self._ask), methods=["POST"]),
                Route("/v1/sessions/{key}", self._guarded(self._whole), methods=["GET"]),
                Route("/v1/sessions/{key}/{kind}", self._guarded(self._call), methods=["POST"]),
                *face.routes("/openenv/{player}"),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return self._answer(200, wire.dumps({"status": "healthy"}))

    def _guarded(self, handle: Callable[[Request, Mapping[str, Json]], Awaitable[Response]]) -> Any:
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
                text = f"{type(problem).__name__}: {problem}"
                return self._answer(400, wire.dumps({"refused": "bad_request", "message": text}))
            except ClientDisconnect:
                raise
            except Exception as fault:  # an author's code may raise anything
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
            raise RefusedError(400, "bad_request", "the body is no JSON object")
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
        limits = {"episodes": self.limits.episodes, "idle": self.limits.idle, "body": self.limits.body}
        card = self.offer.card(Asked.of(body["env"]))
        return self._answer(
            200, wire.dumps({**card, "protocol": wire.PROTOCOL, "agentrl": __version__, "boot": self.boot, "limits": limits})
        )

    async def _ask(self, request: Request, body: Mapping[str, Json]) -> Response:
        """What needs no episode."""
        env = self.offer.build(Asked.of(body["env"]))
        if body["what"] == "make_task":
            if type(body["seed"]) is not int or not isinstance(body["split"], str):
                raise RefusedError(400, "bad_request", "seed: expected a whole number; split: expected text")
            result: Json = env.make_task(body["seed"], body["split"])
            wire.check_plain(result)
        elif body["what"] == "prompt":
            result = plain_prompt(env, Task(**body["task"]))
        elif body["what"] == "gold_turns":
            result = list(env.gold_turns(Task(**body["task"])))
        else:
            raise RefusedError(400, "bad_request", f"what = {body['what']!r}: expected make_task, prompt or gold_turns")
        return self._answer(200, wire.dumps({"result": result}))

    async def _whole(self, request: Request, body: Mapping[str, Json]) -> Response:
        return self._answer(200, await self.sessions.find(request.path_params["key"]).whole())

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
