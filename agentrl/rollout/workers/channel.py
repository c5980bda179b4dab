"""The channel between the driver and a rollout worker: frames, calls, the handshake, and faults as text."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import pickle
import secrets
import struct
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from agentrl.utils import errors
from agentrl.utils.errors import AgentrlError, WorkerDiedError, WorkerError

# Frames

log = logging.getLogger(__name__)

Fields = dict[str, Any]
Handler = Callable[[Fields], None]

_HEAD = struct.Struct("<I")
STRANGER_BYTES = 4096
"""The longest frame from a process that has not proven that it knows the secret."""
GREETING_S = 20.0
"""Seconds in which one who connects must have proven it."""


@dataclass(frozen=True, slots=True)
class Door:
    """Address to which workers connect, and the secret with which both sides prove who they are."""

    host: str
    port: int
    secret: bytes


class GoneError(Exception):
    """The other side is gone, and what it had of a call."""


class Channel(asyncio.Protocol):
    """One end of a connection. `on[kind]` is called with the fields of each frame of that kind; `on_lost` once, when it is over.
    `serves[kind]` answers the other side's calls, in `serving` tasks; `peer`: where faults of its answers happened.

    Fields are JSON until the other side has proven who it is, and pickled from then on: nothing of a stranger's is unpickled.
    """

    def __init__(self) -> None:
        self.on: dict[str, Handler] = {}
        self.serves: dict[str, Callable[..., Awaitable[Any]]] = {}
        self.serving: dict[int, asyncio.Task[Fields]] = {}
        self.peer = ""
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = asyncio.Event()
        self.trusted = False
        """The other side has proven who it is: frames may be of any length and hold any values, and ask for work."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def send(self, kind: str, **fields: Any) -> None:
        """Send a frame; one to a lost connection goes nowhere, since `on_lost` has been called."""
        if self.lost.is_set():
            return
        body = pickle.dumps((kind, fields)) if self.trusted else json.dumps([kind, fields]).encode()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (_HEAD.pack(len(body)), body)

    async def call(self, kind: str, *, waits: bool = False, **fields: Any) -> Any:
        """The other side's answer to a call. Raises its fault (`fault_of`), GoneError if it ended the call, and what `fail` says.
        Cancellation ends the call there; with `waits` it propagates once that is done."""
        number, sent = next(self._numbers), pickle.dumps(fields)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send("call", id=number, what=kind, fields=sent)
        try:
            await asyncio.wait([answer])
            return answer.result()
        except asyncio.CancelledError:
            self.send("cancel", id=number)
            if waits:
                await asyncio.wait([answer])
            raise
        finally:
            del self._answers[number]
            if answer.done():
                answer.exception()  # it has been seen, also by who was cancelled

    def fail(self, error: Exception) -> None:
        """End the calls that wait for an answer with this error."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _receive(self, kind: str, fields: Fields) -> None:
        """A frame of the other side."""
        if not self.trusted or kind not in ("call", "cancel", "answer"):
            return self.on[kind](fields)
        number = fields["id"]
        if kind == "call":
            self.serving[number] = task = asyncio.create_task(self._serve(**fields), name=f"call of {fields['what']}")
            # Not at the end of the work, which never begins if it is cancelled in the moment in which it is asked for.
            return task.add_done_callback(partial(self._answer, number))
        if kind == "cancel":
            if number in self.serving:  # else it has just ended, and the answer is under way
                self.serving[number].cancel()
            return
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        try:
            if "fault" in fields:
                raise fault_of(fields["fault"], self.peer)
            if "result" not in fields:  # it was not asked to be cancelled: the other side ends
                raise GoneError("the worker ended")
            answer.set_result(pickle.loads(fields["result"]))
        except Exception as problem:
            answer.set_exception(problem)

    async def _serve(self, id: int, what: str, fields: bytes) -> Fields:
        try:
            # Pickled by themselves: what cannot be (un)pickled is a fault of the call.
            return {"result": pickle.dumps(await self.serves[what](**pickle.loads(fields)))}
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # of any kind: a side that is not told waits forever
            return {"fault": fault_fields(problem)}

    def _answer(self, number: int, task: asyncio.Task[Fields]) -> None:
        """A call has ended: with its result, by a fault, or cancelled, which is answered by neither."""
        del self.serving[number]
        self.send("answer", id=number, **({} if task.cancelled() else task.result()))

    def close(self) -> None:
        """Send all waiting messages, and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        parts, self._unsent = self._unsent, []
        if parts and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: the loop of a Ray actor is uvloop's, whose transports are of no class of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, problem: Exception | None) -> None:
        self.lost.set()
        for task in list(self.serving.values()):  # which frees what they hold at an engine
            task.cancel()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= start + _HEAD.size:
            (length,) = _HEAD.unpack_from(self._received, start)
            if not self.trusted and length > STRANGER_BYTES:
                log.error("a frame of %d bytes, where %d are allowed; the connection is closed", length, STRANGER_BYTES)
                self.abort()
                break
            begin, stop = start + _HEAD.size, start + _HEAD.size + length
            if len(self._received) < stop:
                break
            body, start = bytes(self._received[begin:stop]), stop
            try:
                self._receive(*(pickle if self.trusted else json).loads(body))
            except Exception:  # one bad frame must not end the connection of all other episodes
                log.exception("a frame of a rollout worker's channel")
        del self._received[:start]


class Hub:
    """The driver's side of the door: `expected[name]` is called with the channel of the first process that connects under this
    name and knows the secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self.expected: dict[str, Callable[[Channel], None]] = {}
        self._server: asyncio.Server | None = None
        self.door: Door | None = None

    async def open(self, host: str) -> Door:
        """Listen at a free port. `host`: this process's address as the workers' processes reach it."""
        # On that address alone: no other network of this machine need reach it.
        self._server = await asyncio.get_running_loop().create_server(self._visitor, host, 0)
        self.door = Door(host, self._server.sockets[0].getsockname()[1], self._secret)
        return self.door

    def close(self) -> None:
        """Stop listening; channels go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _visitor(self) -> Channel:
        channel, nonce = Channel(), secrets.token_hex(16)
        late = asyncio.get_running_loop().call_later(GREETING_S, channel.abort)

        def greet(fields: Fields) -> None:
            late.cancel()
            name = str(fields.get("name"))
            arrived = self.expected.get(name)
            if arrived is None or not hmac.compare_digest(str(fields.get("proof")), proof(self._secret, nonce, name)):
                log.warning("a process that is no worker of this run tried to connect as %r", name)
                channel.abort()
                return
            del self.expected[name]
            channel.on.clear()
            channel.send("welcome", proof=proof(self._secret, str(fields.get("nonce")), "driver"))
            channel.trusted = True
            arrived(channel)

        channel.on["name"] = greet
        asyncio.get_running_loop().call_soon(lambda: channel.send("nonce", nonce=nonce))
        return channel


def proof(secret: bytes, nonce: str, name: str) -> str:
    """Proof that `name` knows the secret, without revealing it."""
    return hmac.new(secret, f"{nonce}/{name}".encode(), hashlib.sha256).hexdigest()


async def dial(door: Door, name: str, on: dict[str, Handler]) -> Channel:
    """The worker's end of a new connection, whose frames are given to `on`. Raises WorkerDiedError if nobody listens, or the
    driver does not let this process in."""
    channel, let_in, nonce = Channel(), asyncio.Event(), secrets.token_hex(16)
    channel.on = on

    def answer(fields: Fields) -> None:
        channel.send("name", name=name, proof=proof(door.secret, fields["nonce"], name), nonce=nonce)

    def welcome(fields: Fields) -> None:
        if not hmac.compare_digest(str(fields.get("proof")), proof(door.secret, nonce, "driver")):
            return channel.abort()
        channel.trusted = True
        let_in.set()

    channel.on |= {"nonce": answer, "welcome": welcome}
    channel.on_lost = let_in.set
    try:
        await asyncio.get_running_loop().create_connection(lambda: channel, door.host, door.port)
    except OSError as problem:
        raise WorkerDiedError(f"rollout {name}: the driver does not listen at {door.host}:{door.port}: {problem}") from None
    try:
        await asyncio.wait_for(let_in.wait(), 3 * GREETING_S)  # the driver may be busy
    except TimeoutError:
        channel.abort()
        silent = f"rollout {name}: the program that listens at {door.host}:{door.port} does not answer as the driver of a run"
        raise WorkerDiedError(f"{silent}. It may be another one; start the run again") from None
    if channel.lost.is_set():
        raise WorkerDiedError(f"rollout {name}: the driver at {door.host}:{door.port} did not let it in")
    return channel


# Faults


def fault_fields(error: BaseException) -> Fields:
    """An exception as text: its class may not exist on the other side, and a traceback cannot be sent."""
    return {
        "error": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def fault_of(fields: Mapping[str, Any], who: str) -> AgentrlError | OSError:
    """The error of agentrl's own class; an OSError if a disk is full; of any other, a WorkerError with the remote traceback.
    `who`: where it happened."""
    kind = getattr(errors, fields["error"], None)
    if isinstance(kind, type) and issubclass(kind, AgentrlError):
        # As it was: what is recorded of an episode must not depend on where it was played.
        return kind(fields["message"])
    if fields["errno"] in errors.FULL:
        return OSError(fields["errno"], f"{who}: {fields['message']}")
    message = f"{who}: {fields['error']}: {fields['message']}"
    return WorkerError(f"{message}\n--- remote traceback ---\n{fields['trace'].rstrip()}")
