"""`RemoteEnv`, an environment whose episodes run on a server, and its requests."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, Self, TypeVar

import gymnasium
import httpx

from agentrl.contrib.remote_envs import wire
from agentrl.data.trajectory import (
    Json,
    Message,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    message_of,
    result_of,
    turn_of,
    user_calls_of,
)
from agentrl.env.address import PROTOCOLS, EnvAddress, EnvRequest, RemoteProtocol
from agentrl.env.authoring import Teacher
from agentrl.env.base import StepResult, ToolEnv, check_options, read_action
from agentrl.env.call_options import Options
from agentrl.env.copying import Snapshot
from agentrl.env.spaces import Action, Observation
from agentrl.env.toolbox import PendingCall, Toolbox
from agentrl.env.tools import Tool
from agentrl.env.users import GOLD, RecordedUser
from agentrl.utils.errors import ConfigError, EnvError, RemoteEnvError, UserError
from agentrl.utils.parsing import read_json
from agentrl.utils.redaction import redact
from agentrl.utils.threads import after_fork, background

T = TypeVar("T")
Watching = Callable[[list[dict[str, Json]] | str], None]
"""Called with the tool calls in progress on the server, or the reason why it does not answer."""

PATIENCE = 30.0
"""Seconds without an answer after which a server counts as lost. Requests are retried; the server executes each once."""

_RETRY_STATUSES = (502, 503, 504)
"""HTTP statuses of a proxy whose server is unreachable, and of a server with too many episodes."""
_GRACE = 10.0

POOLS = 64
"""Connection pools per server, over which requests are spread."""


def _submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` on the loop of a background thread, for callers with or without a loop."""
    return asyncio.run_coroutine_threadsafe(work, background("remote").loop)


_certificates = cache(ssl.create_default_context)
"""Loaded once: this takes longer than many requests."""


class Link:
    """Connections to one server, with its token."""

    def __init__(self, url: str, token: str) -> None:
        self.url, self._token = url, token
        self._begin()
        after_fork(self, Link._begin)

    def _begin(self) -> None:
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._busy = [0] * POOLS  # requests in progress per pool

    def _client(self, pool: int) -> httpx.AsyncClient:
        """Return the client of a pool, created on first use, as most runs need few."""
        if pool not in self._clients:
            token = {"authorization": f"Bearer {self._token}"} if self._token else {}
            self._clients[pool] = httpx.AsyncClient(
                base_url=self.url,
                headers={"content-type": "application/json", **token},
                # Unlimited: with a limit, slow tools would delay quick ones.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0),
                timeout=httpx.Timeout(_GRACE, read=wire.WAIT_SECONDS + _GRACE),
                verify=_certificates() if self.url.startswith("https") else False,
                trust_env=False,
            )
        return self._clients[pool]

    async def ask(self, route: str, body: Mapping[str, Json], watch: Watching) -> Json:
        """Send a request and return the answer. Raises RemoteEnvError if the server is lost or does not know the session, and
        errors of `fault_of`. Cancelling stops waiting; the server may still execute it."""
        return await asyncio.wrap_future(_submit(self._ask(route, body, watch, PATIENCE)))

    def ask_now(self, route: str, body: Mapping[str, Json], patience: float = PATIENCE) -> Json:
        """Send a request and block for the answer, as `ask`."""
        return _submit(self._ask(route, body, lambda seen: None, patience)).result()

    async def _send(self, route: str, content: bytes) -> httpx.Response:
        # Use the least busy pool. httpx searches all connections of a pool per request; with a thousand this takes longer than
        # the episodes.
        pool = min(range(POOLS), key=self._busy.__getitem__)
        self._busy[pool] += 1
        try:
            # A deadline for the whole exchange; those of httpx are per read.
            async with asyncio.timeout(wire.WAIT_SECONDS + 2 * _GRACE):
                return await self._client(pool).post(route, content=content)
        finally:
            self._busy[pool] -= 1

    async def _ask(self, route: str, body: Mapping[str, Json], watch: Watching, patience: float) -> Json:
        content, heard, tries = wire.dumps({**body, "protocol": wire.PROTOCOL}), time.monotonic(), 0
        while True:
            try:
                answer = await self._send(route, content)
            except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as problem:
                raise RemoteEnvError(f"{self.url}: {problem}") from problem
            except (httpx.TransportError, httpx.DecodingError, TimeoutError) as problem:
                failed = f"{type(problem).__name__}: {problem}".rstrip(": ")
            else:
                if answer.status_code == httpx.codes.OK:
                    return self._json(answer, *(("number", "boot", "open") if route.startswith("/v1/sessions/") else ()))
                if answer.status_code == httpx.codes.ACCEPTED:
                    heard, tries = time.monotonic(), 0
                    watch(self._json(answer, "calls")["calls"])
                    continue
                if answer.status_code not in _RETRY_STATUSES:
                    raise self._refusal(answer)
                failed = f"{answer.status_code} {_message(answer)}"
            watch(failed)
            if time.monotonic() - heard >= patience:
                raise RemoteEnvError(f"{self.url}: no answer for {patience:g} s: {failed}")
            await asyncio.sleep(min(0.05 * 2**tries, 2.0))
            tries += 1

    def _json(self, answer: httpx.Response, *keys: str) -> dict[str, Json]:
        found: Json = None
        with suppress(ValueError, RecursionError):
            found = read_json(redact(answer.content.decode()))  # also what tools there answer
        if not isinstance(found, dict) or not found.keys() >= {*keys}:
            wanted = " with ".join(["an object", *([", ".join(keys)] if keys else [])])
            raise RemoteEnvError(f"{self.url}: it answers {answer.text[:80]!r}, not {wanted}: is this a server of agentrl?")
        return found

    def _refusal(self, answer: httpx.Response) -> Exception:
        body: dict[str, Json] = {}
        with suppress(RemoteEnvError):
            body = self._json(answer)
        if "fault" in body:
            return wire.fault_of(body["fault"])
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return ConfigError(f"{self.url}: {_message(answer)}; name the variable that has it in env.token_env")
        if body.get("refused") == "protocol":
            return RemoteEnvError(f"{self.url}: {_message(answer)}")
        return LostError(f"{self.url}: {_message(answer)}", answer.headers.get("x-agentrl-boot"))


class LostError(RemoteEnvError):
    """The server refuses a request of a session. `boot`: the start of the server that answered."""

    def __init__(self, message: str, boot: str | None) -> None:
        super().__init__(message)
        self.boot = boot


link_to = lru_cache(maxsize=64)(Link)
"""Return this process's link to a server, by URL and token."""


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}: is this a server of agentrl?"


log = logging.getLogger(__name__)

CHECK_PATIENCE = 5.0
"""Seconds without an answer after which a server counts as lost while no episode runs."""

_cards: dict[tuple[str, str], dict[str, Json]] = {}
_tables: dict[str, Mapping[str, Tool]] = {}
_MOST_TABLES = 256


def card_of(link: Link, asked: EnvRequest, fresh: bool = False) -> dict[str, Json]:
    """Return the server's description of an environment, cached per process unless `fresh`. Blocks.

    Raises RemoteEnvError if the server does not answer, UserError if it refuses parameters, wrappers or tool sets.
    """
    key = _key(link, asked)
    if fresh or key not in _cards:
        card = link.ask_now("/v1/describe", {"env": asked.row()}, CHECK_PATIENCE)
        if "protocol" not in card:
            raise RemoteEnvError(f"{link.url}: it describes no environment: is this a server of agentrl?")
        _cards[key] = card
    return _cards[key]


def _key(link: Link, asked: EnvRequest) -> tuple[str, str]:
    return link.url, json.dumps(asked.row(), sort_keys=True, default=repr)


def _of_card(key: str, read: Callable[[Any], Any]) -> Any:
    return property(lambda self: read(self.card[key]))


class RemoteEnv(ToolEnv):
    """An environment on a server: each turn is one request, and the record is copied from the server.

    The server applies wrappers and tool sets. It sends gold answers with the record, because the reward spec needs them, so
    anyone with the server's token can read them. If the server is gone or has lost the episode, a step raises RemoteEnvError: the
    episode is unscored.

    `snapshot`, `restore`, `fork`, `make_task`, `prompt`, `gold_turns` and a teacher's `act` block for one request each.
    """

    is_remote = True
    shared = frozenset({"_link", "_asked", "_session", "_number", "_have", "_ready", "_remote_calls", "id"})
    _ready = False

    def __init__(self, link: Link, asked: EnvRequest, **base: Any) -> None:
        """Sends no request yet."""
        self._link, self._asked = link, asked
        super().__init__(**base)
        self.id = asked.id  # type: ignore[misc]
        self._session = ""
        self._number = self._have = -1
        self._boot, self._digest = "", ""
        self._synced = 0  # messages of the record from the server; later ones belong to a turn that it never received
        self._released = True
        self._has_user = False
        self._remote_calls: dict[str, PendingCall] = {}
        self._offered: Mapping[str, Tool] = {}
        self._ready = True
        known = _cards.get(_key(link, asked))
        if known is not None:
            self.id = known["env"]["id"]  # type: ignore[misc]
            self._take_tools(known["toolbox"])

    # -- the server's description -----------------------------------------------------------------------

    @property
    def card(self) -> dict[str, Json]:
        """The server's description of this environment. Blocks on first use in a process."""
        return card_of(self._link, self._asked)

    splits = _of_card("splits", tuple)
    order_free = _of_card("order_free", bool)
    idle_share = _of_card("idle_share", float)
    user_repeats = _of_card("scripted", bool)

    @property
    def toolbox(self) -> Toolbox:  # type: ignore[override]
        """The tools offered to the policy; they run on the server."""
        if self._ready and not self._digest:
            self._take_tools(self.card["toolbox"])
        return self._box

    @toolbox.setter
    def toolbox(self, box: Toolbox) -> None:
        self._box = box

    def make_task(self, rng_seed: int, split: str) -> Task:
        return Task(**self._ask_now("make_task", {"seed": rng_seed, "split": split}))

    def task_count(self, split: str) -> int | None:
        count: int | None = self.card["task_count"].get(split)
        return count

    def prompt(self, task: Task) -> list[Message]:
        return wire.messages_of(self._ask_now("prompt", {"task": task}))

    def gold_turns(self, task: Task) -> list[Message]:
        return wire.messages_of(self._ask_now("gold_turns", {"task": task}))

    def _ask_now(self, what: str, body: Mapping[str, Json]) -> Json:
        return self._link.ask_now("/v1/ask", {"what": what, "env": self._asked.row(), **body}, CHECK_PATIENCE)["result"]

    def teacher(self, task: Task, rng: Any, **params: Any) -> Teacher:
        """Return the server's teacher for the running episode; the server gets the state of `rng`, a random.Random."""
        if not isinstance(rng, random.Random):
            raise TypeError(f"{self.id}: over a server, a teacher's rng is a random.Random")
        if not self._env_open or task != self.task:
            raise EnvError(f"{self.id}: over a server, a teacher plays the task of the running episode")
        self._call_now("teach", {"params": params, "rng": rng.getstate()}, TypeError, ValueError, NotImplementedError)
        return RemoteTeacher(self)

    def add_source(self, source: Any) -> None:
        raise EnvError(f"{self.id}: its tools run on the server {self._link.url}, so it takes none from here")

    add_set = add_source  # type: ignore[assignment]  # another name of its argument

    def state(self) -> Json:
        return None if self._env_record is None else self._env_record.state

    @property
    def has_user(self) -> bool:
        """The server's latest answer; False before an episode."""
        return self._has_user

    # -- episodes ----------------------------------------------------------------------------------------

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        options = dict(options or {})
        check_options(options)
        if "user" in options and options["user"] != GOLD:
            if not isinstance(options["user"], RecordedUser):
                raise EnvError(f"{self.id}: its user is on the server; of another one it takes only a record's (RecordedUser)")
            options["user"] = wire.user_row(options["user"])
        await self.aclose()
        if seed is None and self._np_random is None:
            seed = self.initial_seed
        if seed is not None:
            gymnasium.Env.reset(self, seed=seed)
        chosen = seed if seed is not None else int(self.np_random.integers(2**62))
        self._session, self._number, self._have, self._boot = wire.new_id(), -1, -1, ""
        self._env_record, self._released, self._cut_for = None, False, None
        asked = {"seed": chosen, "options": {"split": self.split, **options}, "env": self._asked.row()}
        answer = await self._play("reset", asked)
        return self._observe(answer), dict(answer["result"]["info"])

    async def astep(self, action: Action) -> StepResult:
        record = self._running("step")
        # Recorded before it is answered, so that a turn that is cut keeps its tokens.
        message, _ = read_action(action, 0)  # the server numbers the calls
        record.messages.append(message)
        record.turns.append(Turn(len(record.turns), message))
        self._synced += 1
        answer = await self._play("step", {"action": action})
        result, reward = answer["result"], 0.0
        if not self._env_open:
            reward = await super().aend(record.stop, record.error)
        return self._observe(answer), reward, result["terminated"], result["truncated"], dict(result["info"])

    async def aend(self, stop: StopReason, error: str | None = None) -> float:
        if self._env_open and not stop.infrastructure:
            # Send it while the episode is open: a spec scores the final state.
            await self._play("end", {"stop": stop.value, "error": error})
        return await super().aend(stop, error)

    async def auser_call(self, call: ToolCall) -> ToolResult:
        self._running("a call")
        return result_of((await self._play("user_call", {"call": call}))["result"])

    async def teardown(self) -> None:
        if self._released or self._env_record is None:
            return
        self._released = True
        try:
            await self._call("end", {"stop": self._env_record.stop.value, "error": self._env_record.error})
        except Exception as fault:  # the server closes idle sessions by itself
            log.warning("%s: session %s could not be ended: %s", self._link.url, self._session[:6], fault)

    async def _play(self, kind: str, body: Mapping[str, Json]) -> Mapping[str, Json]:
        """Send a request and apply its answer. A fault ends the episode here, and on the server if it may still run there."""
        try:
            return self._apply_answer(await self._call(kind, body))
        except BaseException as fault:
            if isinstance(fault, RemoteEnvError) and not self._released:
                # The server may hold the episode all the same, as behind a proxy that failed: ask once, and wait for nothing.
                asked = self._next_request("end", {"stop": StopReason.ENV_ERROR.value, "error": str(fault)})
                _submit(self._link._ask(*asked, lambda seen: None, 0.0)).add_done_callback(Future.exception)
            self._released = self._released or isinstance(fault, RemoteEnvError | UserError)
            if self._env_record is not None:
                await self._fail(fault)
            elif not self._released:  # an unanswered reset: the server may have an episode although there is none here
                self._env_record = Trajectory(self.id, Task("", 0))
                self._env_open = True
                await self._fail(fault)
                self._env_record = None
            raise

    def _observe(self, answer: Mapping[str, Json]) -> Observation:
        seen = answer["result"]["observation"]
        assert self._env_record is not None
        messages = self._env_record.messages
        self._env_last = messages[len(messages) - seen :] if isinstance(seen, int) else wire.messages_of(seen)
        return list(self._env_last)

    # -- requests ----------------------------------------------------------------------------------------

    def _next_request(self, kind: str, body: Mapping[str, Json]) -> tuple[str, dict[str, Json]]:
        self._number += 1
        asked = {"number": self._number, "have": self._have, "tools": self._digest, **body}
        return f"/v1/sessions/{self._session}/{kind}", asked

    async def _call(self, kind: str, body: Mapping[str, Json]) -> Mapping[str, Json]:
        try:
            return await self._link.ask(*self._next_request(kind, body), self._watch)  # type: ignore[no-any-return]
        except LostError as lost:
            raise self._lost_error(lost) from None
        finally:
            self._remote_calls = {}
            self._box.waiting = []

    def _call_now(self, kind: str, body: Mapping[str, Json], *faults: type[Exception]) -> Json:
        """Send a request and block for its result. Raises the answer's fault, as one of `faults` if it matches."""
        try:
            answer: Mapping[str, Json] = self._link.ask_now(*self._next_request(kind, body))
        except LostError as lost:
            raise self._lost_error(lost) from None
        self._have = answer["number"]
        if "fault" in answer:
            raise wire.fault_of(answer["fault"], *faults)
        return answer["result"]

    def _lost_error(self, lost: LostError) -> RemoteEnvError:
        if self._boot and lost.boot not in (None, self._boot):
            return RemoteEnvError(
                f"{self._link.url}: the server was restarted after this episode began, and episodes do not outlive it"
            )
        return RemoteEnvError(str(lost))

    def _watch(self, seen: list[dict[str, Json]] | str) -> None:
        """Show the server's calls in progress as if they were local, for stall reports and for attributing time."""
        if isinstance(seen, str):
            calls = {"": self._remote_calls.get("") or PendingCall(_LINK, f"{self._link.url}: {seen}", running=True)}
        else:
            calls = {}
            for call in seen:
                if call.get("by") == "user":
                    calls[call["call_id"]] = PendingCall(_USER, f"{call['name']}, {call['call_id']}", running=call["running"])
                elif call["name"] in self._box:
                    place = f"{call['name']} {call['call_id']}"
                    calls[place] = self._remote_calls.get(place) or PendingCall(self._box[call["name"]], call["call_id"])
                    calls[place].running = call["running"]
        self._remote_calls = calls
        self._box.waiting = list(calls.values())

    # -- answers -----------------------------------------------------------------------------------------

    def _apply_answer(self, answer: Mapping[str, Json]) -> Mapping[str, Json]:
        """Update the record from an answer and return the answer. Raises its fault."""
        self._have, self._boot = answer["number"], answer["boot"]
        if "has_user" in answer:  # absent after the server has released its environment
            self._has_user, self._env_ended = answer["has_user"], answer["has_finished"]
        if "record" in answer:
            row = answer["record"]
            if self._env_record is None:
                self._env_record, self._synced = Trajectory("", Task(**row["task"])), 0
            record = self._env_record
            keep, messages = row["messages"]
            record.messages[keep : self._synced] = wire.messages_of(messages)
            self._synced = keep + len(messages)
            keep, calls = row.get("user_calls", (0, ()))
            record.user_calls[keep:] = user_calls_of(calls)
            record.parting, record.horizon = row.get("parting", ""), row.get("horizon")
            keep, turns = row["turns"]
            for place, turn in enumerate(turns, start=keep):
                made = turn_of(turn)
                if place < len(record.turns):  # keep the object: the positions of its tokens are stored on it here
                    record.turns[place].message, record.turns[place].results = made.message, made.results
                else:
                    record.turns.append(made)
            for name in ("state", "tools"):
                if name in row:
                    setattr(record, name, row[name])
            outcome = row["outcome"]
            record.env_id, record.seed, record.error = outcome["env_id"], outcome["seed"], outcome["error"]
            record.stop = StopReason(outcome["stop"])
            record.terminated, record.truncated = outcome["terminated"], outcome["truncated"]
            self.id = record.env_id  # type: ignore[misc]
            self._env_open = answer["open"]
        if "toolbox" in answer:
            self._take_tools(answer["toolbox"])
        if not answer["open"]:
            self._env_open, self._released = False, True
            self._box.table = self._tools_before
        if "fault" in answer:
            raise wire.fault_of(answer["fault"])
        return answer

    def _take_tools(self, row: Mapping[str, Json]) -> None:
        first, digest = not self._digest, row["digest"]
        if digest != self._digest:
            while len(_tables) >= _MOST_TABLES and digest not in _tables:
                del _tables[next(iter(_tables))]
            if digest not in _tables:
                try:
                    _tables[digest] = wire.tools_of(row["rows"], self._link.url)
                except TypeError as problem:
                    raise RemoteEnvError(f"{self._link.url}: it offers a tool that cannot be used: {problem}") from problem
            self._digest, self._offered = digest, _tables[digest]
        self._box.table = self._offered
        if first:
            self._tools_before = self._offered

    # -- snapshots ---------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        name = wire.new_id()
        self._call_now("snapshot", {"snapshot": name}, TypeError, ValueError)
        made = super().snapshot()
        return Snapshot(made.owner, {**made.parts, _SERVER_SNAPSHOT: (self._session, name)})

    def restore(self, snapshot: Snapshot) -> None:
        if snapshot.owner != type(self).__name__:
            raise ValueError(f"a snapshot of {snapshot.owner} does not fit {type(self).__name__}")
        session, name = snapshot.parts[_SERVER_SNAPSHOT]
        if self._released:  # the episode is over on the server; continue in another session
            self._session, self._number, self._have = wire.new_id(), -1, -1
        asked = {"session": session, "snapshot": name, "env": self._asked.row()}
        self._call_now("restore", asked, TypeError, ValueError)
        parts = {key: value for key, value in snapshot.parts.items() if key != _SERVER_SNAPSHOT}
        super().restore(Snapshot(snapshot.owner, parts))

    def fork(self) -> Self:
        session = wire.new_id()
        self._call_now("fork", {"session": session}, TypeError, ValueError)
        forked = super().fork()
        forked._session, forked._number, forked._have = session, 0, 0
        return forked


class RemoteTeacher:
    """A teacher on the server for the environment's running episode."""

    def __init__(self, env: RemoteEnv) -> None:
        self._env = env

    def act(self, observation: Sequence[Message]) -> Message | None:
        """Return the next assistant turn, or None. Blocks for one request."""
        made = self._env._call_now("act", {"observation": list(observation)})
        return None if made is None else message_of(made)


_SERVER_SNAPSHOT = "the snapshot on the server"
_USER = Tool.from_schema("of the environment's user", "", {"type": "object"}, lambda: None, Options(by="user"))
_LINK = Tool.from_schema("of the environment's server", "", {"type": "object"}, lambda: None, Options())


# Protocols (env.protocol)


@PROTOCOLS.register("agentrl")
class AgentrlProtocol(RemoteProtocol):
    """The protocol of `agentrl env serve --http`."""

    @staticmethod
    def build(address: EnvAddress, wanted: EnvRequest, extra: Mapping[str, Any]) -> ToolEnv:
        return RemoteEnv(link_to(address.url, address.token()), wanted, **extra)

    @staticmethod
    def card(address: EnvAddress, wanted: EnvRequest, fresh: bool) -> dict[str, Json]:
        return card_of(link_to(address.url, address.token()), wanted, fresh)


@PROTOCOLS.register("openenv")
class OpenEnvProtocol(RemoteProtocol):
    """The protocol of OpenEnv."""

    @staticmethod
    def env_class() -> Callable[..., ToolEnv]:
        from agentrl.contrib.remote_envs.openenv import OpenEnv

        return OpenEnv

    @staticmethod
    def describe(address: EnvAddress) -> str:
        from agentrl.contrib.remote_envs.openenv import action_schema

        fields = ", ".join(action_schema(address.url, address.token()).get("properties", {})) or "none"
        return f"environment: {address.url} (OpenEnv); fields of an action: {fields}"
