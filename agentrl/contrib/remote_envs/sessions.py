"""A server's sessions, one episode each, and the server's secret token."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.contrib.remote_envs import wire
from agentrl.data.trajectory import Json, Message, StopReason, Task, ToolCall, ToolResult, Trajectory, UserCall, as_row
from agentrl.env.address import EnvRequest, token_in
from agentrl.env.authoring import Teacher
from agentrl.env.base import ToolEnv
from agentrl.env.copying import Snapshot
from agentrl.env.users import GOLD
from agentrl.utils.errors import ConfigError, EnvError
from agentrl.utils.event_loop import GRACE, end

log = logging.getLogger(__name__)

LINGER = 120.0
"""Seconds for which the answer that ended an episode can be asked for again."""

MOST_SNAPSHOTS = 64
"""Snapshots of one session."""

Body = Mapping[str, Json]
KINDS = ("reset", "step", "end", "user_call", "snapshot", "restore", "fork", "teach", "act")
"""Requests of a session."""


class RefusedError(Exception):
    """A request that is not done; `status`: of the answer over HTTP, `kind`: a short name of the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """`episodes` at once; seconds without a request (`idle`) after which one is closed; `body`: bytes of a request."""

    episodes: int = 1024
    idle: float = 3600.0
    body: int = 16 << 20


class EnvSession:
    """One episode. Requests have numbers 0, 1, 2, ...; the answer to the last is kept, and given again if it is asked again."""

    def __init__(self, key: str, home: EnvSessions, env: ToolEnv | None = None) -> None:
        """`env`: of a session that is a fork of another; else the first request says which."""
        self.key, self.number, self.touched = key, -1 if env is None else 0, time.monotonic()
        self.snapshots: dict[str, Snapshot] = {}
        self._home, self._env = home, env
        self._teacher: Teacher | None = None
        self._record: Trajectory | None = None
        self._asked = b""
        self._work: asyncio.Task[bytes] | None = None
        self._sent = _Sent()
        if env is not None:
            self._sent.changes(env, True)

    @property
    def running(self) -> bool:
        """True if a request is being worked on."""
        return self._work is not None and not self._work.done()

    @property
    def active(self) -> bool:
        """True if it holds an environment, and so counts as an episode."""
        return self._env is not None or self.number < 0

    async def call(self, kind: str, number: int, body: Body) -> asyncio.Task[bytes]:
        """The work on request `number`: begun, or the same as before. Raises RefusedError if it is not the next one."""
        self.touched = time.monotonic()
        asked = hashlib.sha256(json.dumps([kind, body], sort_keys=True).encode()).digest()
        if number == self.number and self._work is not None:
            if asked != self._asked:
                raise RefusedError(409, "conflict", f"request {number} of this session was another one")
            return self._work
        # The end may follow a request that was given up before it arrived.
        if number != self.number + 1 and not (kind == "end" and number > self.number):
            raise RefusedError(409, "conflict", f"request {number}: the next one of this session is {self.number + 1}")
        if self.running:
            if kind != "end":
                raise RefusedError(409, "busy", f"request {self.number} of this session is not finished")
            await self._cut(body)
        self.number, self._asked = number, asked
        self._work = asyncio.create_task(self._do(kind, number, body))
        return self._work

    def waiting(self) -> list[dict[str, Json]]:
        """The tool calls in progress."""
        calls = [] if self._env is None else self._env.waiting
        return [
            {"name": one.tool.name, "call_id": one.call_id, "running": one.running, "by": one.tool.options.by} for one in calls
        ]

    async def close(self) -> None:
        """Tear the episode down."""
        if self.running:
            await self._cut({"stop": StopReason.CANCELLED.value})
        env, self._env = self._env, None
        if env is not None:
            await env.aclose()

    async def _cut(self, body: Body) -> None:
        """End the request in progress, whose client does not wait for it any more."""
        assert self._work is not None
        if self._env is not None:
            self._env.cut(StopReason(body["stop"]))
        await end(self._work, f"session {self.key[:6]}, request {self.number}")

    async def _do(self, kind: str, number: int, body: Body) -> bytes:
        told: dict[str, Json] = {}
        try:
            told["result"] = await self._perform(kind, body)
        except asyncio.CancelledError as cut:
            told["fault"] = wire.fault_row(cut)
        except RefusedError as refused:
            told["fault"] = wire.fault_row(EnvError(str(refused)))
        except (Exception, SystemExit) as fault:  # an author's code may raise anything
            told["fault"] = wire.fault_row(fault)
        try:
            # Only what is new, unless an answer did not reach the client.
            whole = number == 0 or body.get("have") != number - 1
            answer = self._state(number)
            if self._env is not None and _has_begun(self._env):
                answer["record"] = self._sent.changes(self._env, whole)
                answer["toolbox"] = wire.toolbox_row(self._env.toolbox, body.get("tools"))
            elif self._record is not None:
                answer["record"] = wire.record_row(self._record)
            return wire.dumps({**answer, **told})
        except TypeError as problem:
            unsent = wire.fault_row(EnvError(f"an answer cannot be sent: {problem}"))
            return wire.dumps({**self._state(number), "fault": told.get("fault", unsent)})
        finally:
            self.touched = time.monotonic()
            # Of an episode that is over only the record stays, for as long as a client may ask again.
            if self._env is not None and not self._env.is_open:
                if _has_begun(self._env):
                    self._record = self._env.trajectory
                self._env = self._teacher = None

    def _state(self, number: int) -> dict[str, Json]:
        state: dict[str, Json] = {"number": number, "boot": self._home.boot}
        if self._env is None:
            return {**state, "open": False}
        return {**state, "open": self._env.is_open, "has_user": self._env.has_user, "has_finished": self._env.has_finished}

    async def _perform(self, kind: str, body: Body) -> Json:
        """The result of a request of one of KINDS."""
        env, found = self._env, None
        if kind == "end":
            if env is not None and env.is_open:  # else it ended by itself, while its client gave up
                await env.aend(StopReason(body["stop"]), body["error"])
            return None
        if kind == "restore":
            found = self._home.find(body["session"]).snapshots.get(body["snapshot"])
            if found is None:
                raise EnvError("there is no such snapshot (any more)")
        if kind == "reset" or (kind == "restore" and env is None):
            if self.number:
                raise RefusedError(409, "conflict", "a session has one episode; begin another session for the next one")
            env = self._env = self._home.build(EnvRequest.of(body["env"]))
        if env is None:
            raise EnvError("the episode is over")
        match kind:
            case "reset":
                options = dict(body["options"])
                if "task" in options:
                    options["task"] = Task(**options["task"])
                if options.get("user", GOLD) != GOLD:
                    options["user"] = wire.user_of(options["user"])
                observation, info = await env.areset(seed=body["seed"], options=options)
                return {"observation": self._row_of(env, observation), "info": info}
            case "step":
                observation, _, terminated, truncated, info = await env.astep(wire.action_of(body["action"]))
                ended = {"terminated": terminated, "truncated": truncated, "info": info}
                return {"observation": self._row_of(env, observation), **ended}
            case "user_call":
                return as_row(await env.auser_call(ToolCall(**body["call"])))
            case "snapshot":
                if len(self.snapshots) >= MOST_SNAPSHOTS:
                    raise EnvError(f"a session may have {MOST_SNAPSHOTS} snapshots")
                self.snapshots[body["snapshot"]] = env.snapshot()
            case "restore":
                assert found is not None
                env.restore(found)
            case "fork":
                self._home.adopt(body["session"], env.fork())
            case "teach":
                rng = random.Random()
                version, inner, spare = body["rng"]
                rng.setstate((version, tuple(inner), spare))
                self._teacher = env.teacher(env.task, rng, **body["params"])
            case "act":
                if self._teacher is None:
                    raise EnvError("this session has no teacher")
                return self._teacher.act(wire.messages_of(body["observation"]))
        return None

    def _row_of(self, env: ToolEnv, observation: list[Message]) -> Json:
        """The observation; if it is the end of the record, which is sent anyway, only its length."""
        size = len(observation)
        return size if env.trajectory.messages[-size or len(env.trajectory.messages) :] == observation else observation


class _Sent:
    """State of the record at a session's client."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turns: list[tuple[Message, list[ToolResult]]] = []
        self._user_calls: list[UserCall] = []
        self._state = self._tools = b""

    def changes(self, env: ToolEnv, whole: bool) -> dict[str, Json]:
        """Difference of the record from that; all of it if `whole`."""
        record = env.trajectory
        if whole:
            self.__init__()  # type: ignore[misc]
        turns = [(turn.message, list(turn.results)) for turn in record.turns]
        calls = _common(self._user_calls, record.user_calls)
        row = wire.record_row(record, _common(self._messages, record.messages), _common(self._turns, turns), calls)
        self._messages, self._turns, self._user_calls = list(record.messages), turns, list(record.user_calls)
        state, tools = wire.dumps(record.state), wire.dumps(record.tools)
        if not whole:
            del row["task"]
        if state == self._state:
            del row["state"]
        if tools == self._tools:
            del row["tools"]
        self._state, self._tools = state, tools
        return row


def _has_begun(env: ToolEnv) -> bool:
    """Return True if there is a record: its task was made."""
    inner = env.unwrapped
    assert isinstance(inner, ToolEnv)
    return inner._record is not None


def _common(before: list[Any], now: list[Any]) -> int:
    """The number of first items that are equal."""
    return next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a is not b and a != b), min(len(before), len(now))
    )


class EnvSessions:
    """All sessions of a server, for one event loop."""

    def __init__(self, build: Callable[[EnvRequest], ToolEnv], limits: SessionLimits, boot: str) -> None:
        """`build` makes an environment as a client asks for it; raises UserError if it cannot. `boot` names this start of the
        server."""
        self.build, self.limits, self.boot = build, limits, boot
        self._open: dict[str, EnvSession] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    @property
    def episodes(self) -> int:
        """The number of episodes that run."""
        return sum(session.active for session in self._open.values())

    def find(self, key: str) -> EnvSession:
        """Raises RefusedError without one with that id; its text names the session's end."""
        if key in self._open:
            return self._open[key]
        if key in self._closed:
            raise RefusedError(410, "closed", self._closed[key])
        raise RefusedError(404, "unknown_session", "the server knows no such session")

    def begin(self, key: str) -> EnvSession:
        """The session of that id: a new one if it is unknown. Raises RefusedError if there are too many."""
        if key in self._open or key in self._closed:
            return self.find(key)
        return self.adopt(key, None)

    def adopt(self, key: str, env: ToolEnv | None) -> EnvSession:
        """A new session, of an environment that was forked or of one to come. Raises RefusedError if there are too many."""
        if len(key) < wire.SECRET:
            raise RefusedError(400, "bad_id", f"a session's id has at least {wire.SECRET} characters, random ones")
        if key in self._open:
            raise RefusedError(409, "conflict", "there is a session with that id")
        if self.episodes >= self.limits.episodes:
            raise RefusedError(503, "full", f"{self.episodes} episodes run here, and no more may (--max-episodes)")
        self._open[key] = EnvSession(key, self, env)
        return self._open[key]

    async def close(self, key: str, why: str) -> None:
        """End a session, with the answer to a client that comes back."""
        session = self._open.pop(key, None)
        if session is None:
            return
        self._closed[key] = why
        while len(self._closed) > 16 * 1024:
            self._closed.popitem(last=False)
        try:
            await session.close()
        except Exception:  # an author's teardown
            log.exception("the teardown of session %s failed", key[:6])

    async def sweep(self) -> None:
        """Close what nobody has asked for a while."""
        now = time.monotonic()
        for key, session in list(self._open.items()):
            limit = self.limits.idle if session.active or session.snapshots else min(LINGER, self.limits.idle)
            if not session.running and now - session.touched > limit:
                why = f"no request came for {self.limits.idle:g} s, so the session was closed (--idle-timeout)"
                await self.close(key, why if session.active else "the episode is over, and its session closed")

    async def keep_swept(self) -> None:
        """`sweep`, for ever."""
        while True:
            await asyncio.sleep(min(self.limits.idle, LINGER) / 4)
            await self.sweep()

    async def close_all(self) -> None:
        """End every session; those whose teardown hangs are abandoned."""
        closing = [asyncio.create_task(self.close(key, "the server ends")) for key in list(self._open)]
        if closing and (await asyncio.wait(closing, timeout=3 * GRACE))[1]:
            log.error("the teardown of some sessions did not end within %g s, and is abandoned", 3 * GRACE)


SHORTEST = 16


class Secret:
    """The token of trainers, and one made of it for agents: who has only the second can play, and read no gold answer."""

    def __init__(self, token: str) -> None:
        """Raises ConfigError for a token that could be guessed."""
        if len(token) < SHORTEST:
            raise ConfigError(f"the server's token has {len(token)} characters; expected at least {SHORTEST}, random ones")
        self.token = token
        self.player = hmac.new(token.encode(), b"openenv", hashlib.sha256).hexdigest()[:32]

    @classmethod
    def of(cls, variable: str | None) -> Secret:
        """The token in an environment variable, or a new one. Raises ConfigError if the variable is not set."""
        if variable is None:
            return cls(secrets.token_urlsafe(24))
        return cls(token_in(variable, "--token-env"))

    def check(self, authorization: str) -> None:
        """Raises RefusedError unless the header has the token. Compared in constant time: how long it takes tells nothing."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            how = "wants another token than this one" if authorization else "wants its token"
            raise RefusedError(401, "token", f"the server {how}, as `Authorization: Bearer TOKEN`")
