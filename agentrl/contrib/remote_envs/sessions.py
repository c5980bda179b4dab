"""Sessions of a server, one episode each, and the server's token."""

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
"""Seconds for which the last answer of an ended episode can be requested again."""

MOST_SNAPSHOTS = 64
"""Maximum snapshots per session."""

Body = Mapping[str, Json]
KINDS = ("reset", "step", "end", "user_call", "snapshot", "restore", "fork", "teach", "act")
"""Requests in a session."""


class RefusedError(Exception):
    """A refused request. `status`: HTTP status; `kind`: short name of the reason."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits: concurrent `episodes`; seconds without a request until a session is closed (`idle`); bytes of a request
    (`body`)."""

    episodes: int = 1024
    idle: float = 3600.0
    body: int = 16 << 20


class EnvSession:
    """One episode. Requests are numbered 0, 1, 2, ...; the last answer is stored and repeated if its request is sent again."""

    def __init__(self, key: str, home: EnvSessions, env: ToolEnv | None = None) -> None:
        """`env`: of a session forked from another; otherwise the first request names it."""
        self.key, self.number, self.touched = key, -1 if env is None else 0, time.monotonic()
        self.snapshots: dict[str, Snapshot] = {}
        self._home, self._env = home, env
        self._teacher: Teacher | None = None
        self._record: Trajectory | None = None
        self._asked = b""
        self._work: asyncio.Task[bytes] | None = None
        self._client = _ClientRecord()
        if env is not None:
            self._client.changes(env, True)

    @property
    def running(self) -> bool:
        """True while a request is executed."""
        return self._work is not None and not self._work.done()

    @property
    def active(self) -> bool:
        """True if it holds an environment, and so counts as an episode."""
        return self._env is not None or self.number < 0

    async def call(self, kind: str, number: int, body: Body) -> asyncio.Task[bytes]:
        """Return the task of request `number`, new or repeated. Raises RefusedError if it is out of order."""
        self.touched = time.monotonic()
        asked = hashlib.sha256(json.dumps([kind, body], sort_keys=True).encode()).digest()
        if number == self.number and self._work is not None:
            if asked != self._asked:
                raise RefusedError(409, "conflict", f"request {number} of this session was another one")
            return self._work
        # The end may follow a request that was cancelled before it arrived.
        if number != self.number + 1 and not (kind == "end" and number > self.number):
            raise RefusedError(409, "conflict", f"request {number}: the next one of this session is {self.number + 1}")
        if self.running:
            if kind != "end":
                raise RefusedError(409, "busy", f"request {self.number} of this session is not finished")
            await self._cancel_request(body)
        self.number, self._asked = number, asked
        self._work = asyncio.create_task(self._run_request(kind, number, body))
        return self._work

    def waiting(self) -> list[dict[str, Json]]:
        """List the tool calls in progress."""
        calls = [] if self._env is None else self._env.waiting
        return [
            {"name": one.tool.name, "call_id": one.call_id, "running": one.running, "by": one.tool.options.by} for one in calls
        ]

    async def close(self) -> None:
        """Tear down the episode."""
        if self.running:
            await self._cancel_request({"stop": StopReason.CANCELLED.value})
        env, self._env = self._env, None
        if env is not None:
            await env.aclose()

    async def _cancel_request(self, body: Body) -> None:
        """Cancel the running request, whose client no longer waits."""
        assert self._work is not None
        if self._env is not None:
            self._env.cut(StopReason(body["stop"]))
        await end(self._work, f"session {self.key[:6]}, request {self.number}")

    async def _run_request(self, kind: str, number: int, body: Body) -> bytes:
        outcome: dict[str, Json] = {}
        try:
            outcome["result"] = await self._execute(kind, body)
        except asyncio.CancelledError as cut:
            outcome["fault"] = wire.fault_row(cut)
        except RefusedError as refused:
            outcome["fault"] = wire.fault_row(EnvError(str(refused)))
        except (Exception, SystemExit) as fault:  # an environment's code may raise anything
            outcome["fault"] = wire.fault_row(fault)
        try:
            # Send only changes, unless the client has missed an answer.
            whole = number == 0 or body.get("have") != number - 1
            answer = self._state(number)
            if self._env is not None and _has_begun(self._env):
                answer["record"] = self._client.changes(self._env, whole)
                answer["toolbox"] = wire.toolbox_row(self._env.toolbox, body.get("tools"))
            elif self._record is not None:
                answer["record"] = wire.record_row(self._record)
            return wire.dumps({**answer, **outcome})
        except TypeError as problem:
            unsent = wire.fault_row(EnvError(f"an answer cannot be sent: {problem}"))
            return wire.dumps({**self._state(number), "fault": outcome.get("fault", unsent)})
        finally:
            self.touched = time.monotonic()
            # Of an ended episode keep only the record, for repeated requests.
            if self._env is not None and not self._env.is_open:
                if _has_begun(self._env):
                    self._record = self._env.trajectory
                self._env = self._teacher = None

    def _state(self, number: int) -> dict[str, Json]:
        state: dict[str, Json] = {"number": number, "boot": self._home.boot}
        if self._env is None:
            return {**state, "open": False}
        return {**state, "open": self._env.is_open, "has_user": self._env.has_user, "has_finished": self._env.has_finished}

    async def _execute(self, kind: str, body: Body) -> Json:
        """Execute a request of one of KINDS and return its result."""
        env, found = self._env, None
        if kind == "end":
            if env is not None and env.is_open:  # else it ended by itself while the client gave up
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
        """Return the observation, or only its length if it is the end of the record, which is sent anyway."""
        size = len(observation)
        return size if env.trajectory.messages[-size or len(env.trajectory.messages) :] == observation else observation


class _ClientRecord:
    """The record as a session's client has it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._turns: list[tuple[Message, list[ToolResult]]] = []
        self._user_calls: list[UserCall] = []
        self._state = self._tools = b""

    def changes(self, env: ToolEnv, whole: bool) -> dict[str, Json]:
        """Return the changes of the record since the last call; all of it if `whole`."""
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
    """Return True if the environment has a record, that is a task."""
    inner = env.unwrapped
    assert isinstance(inner, ToolEnv)
    return inner._env_record is not None


def _common(before: list[Any], now: list[Any]) -> int:
    """Return the length of the common prefix."""
    return next(
        (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a is not b and a != b), min(len(before), len(now))
    )


class EnvSessions:
    """All sessions of a server, on one event loop."""

    def __init__(self, build: Callable[[EnvRequest], ToolEnv], limits: SessionLimits, boot: str) -> None:
        """`build` makes the environment that a client requests, or raises UserError. `boot` identifies this start of the
        server."""
        self.build, self.limits, self.boot = build, limits, boot
        self._open: dict[str, EnvSession] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()

    @property
    def episodes(self) -> int:
        """Number of running episodes."""
        return sum(session.active for session in self._open.values())

    def find(self, key: str) -> EnvSession:
        """Return an open session. Raises RefusedError, with the reason for its end, if there is no such session."""
        if key in self._open:
            return self._open[key]
        if key in self._closed:
            raise RefusedError(410, "closed", self._closed[key])
        raise RefusedError(404, "unknown_session", "the server knows no such session")

    def begin(self, key: str) -> EnvSession:
        """Return the session, created if unknown. Raises RefusedError if there are too many."""
        if key in self._open or key in self._closed:
            return self.find(key)
        return self.adopt(key, None)

    def adopt(self, key: str, env: ToolEnv | None) -> EnvSession:
        """Create a session for a forked environment, or (None) one to be built. Raises RefusedError if there are too many."""
        if len(key) < wire.SECRET:
            raise RefusedError(400, "bad_id", f"a session's id has at least {wire.SECRET} characters, random ones")
        if key in self._open:
            raise RefusedError(409, "conflict", "there is a session with that id")
        if self.episodes >= self.limits.episodes:
            raise RefusedError(503, "full", f"{self.episodes} episodes run here, and no more may (--max-episodes)")
        self._open[key] = EnvSession(key, self, env)
        return self._open[key]

    async def close(self, key: str, why: str) -> None:
        """Close a session; `why` is the answer to a client that returns."""
        session = self._open.pop(key, None)
        if session is None:
            return
        self._closed[key] = why
        while len(self._closed) > 16 * 1024:
            self._closed.popitem(last=False)
        try:
            await session.close()
        except Exception:  # raised by the environment's teardown
            log.exception("the teardown of session %s failed", key[:6])

    async def sweep(self) -> None:
        """Close sessions that were idle too long."""
        now = time.monotonic()
        for key, session in list(self._open.items()):
            limit = self.limits.idle if session.active or session.snapshots else min(LINGER, self.limits.idle)
            if not session.running and now - session.touched > limit:
                why = f"no request came for {self.limits.idle:g} s, so the session was closed (--idle-timeout)"
                await self.close(key, why if session.active else "the episode is over, and its session closed")

    async def keep_swept(self) -> None:
        """Run `sweep` periodically, forever."""
        while True:
            await asyncio.sleep(min(self.limits.idle, LINGER) / 4)
            await self.sweep()

    async def close_all(self) -> None:
        """Close all sessions; abandon those whose teardown hangs."""
        closing = [asyncio.create_task(self.close(key, "the server ends")) for key in list(self._open)]
        if closing and (await asyncio.wait(closing, timeout=3 * GRACE))[1]:
            log.error("the teardown of some sessions did not end within %g s, and is abandoned", 3 * GRACE)


SHORTEST = 16


class Secret:
    """The trainers' token, and a token derived from it for agents, which permits playing but not reading gold answers."""

    def __init__(self, token: str) -> None:
        """Raises ConfigError for a token that is too short."""
        if len(token) < SHORTEST:
            raise ConfigError(f"the server's token has {len(token)} characters; expected at least {SHORTEST}, random ones")
        self.token = token
        self.player = hmac.new(token.encode(), b"openenv", hashlib.sha256).hexdigest()[:32]

    @classmethod
    def of(cls, variable: str | None) -> Secret:
        """Read the token from an environment variable, or generate one. Raises ConfigError for an unset variable."""
        if variable is None:
            return cls(secrets.token_urlsafe(24))
        return cls(token_in(variable, "--token-env"))

    def check(self, authorization: str) -> None:
        """Raise RefusedError unless the header has the token; compares in constant time."""
        if not hmac.compare_digest(authorization.encode(), f"Bearer {self.token}".encode()):
            how = "wants another token than this one" if authorization else "wants its token"
            raise RefusedError(401, "token", f"the server {how}, as `Authorization: Bearer TOKEN`")
