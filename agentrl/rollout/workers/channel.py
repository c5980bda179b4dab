"""Channel between the driver and a rollout worker: frames, remote calls, authentication, and serialized faults."""

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
UNTRUSTED_FRAME_BYTES = 4096
"""Longest frame accepted before authentication, in bytes."""
AUTHENTICATION_S = 20.0
"""Seconds for a new connection to authenticate."""


@dataclass(frozen=True, slots=True)
class DriverAddress:
    """Address to which workers connect, and the shared secret with which both sides authenticate."""

    host: str
    port: int
    secret: bytes


class PeerClosedError(Exception):
    """The peer ended or closed the connection during a call."""


class Channel(asyncio.Protocol):
    """One end of a connection. `on[kind]` handles the fields of each frame of that kind; `on_lost` is called once, at the end.
    `serves[kind]` answers the peer's calls, in the tasks of `serving`; `peer`: name of the peer in its errors.

    Fields are JSON until the peer has authenticated and pickled afterwards: no unauthenticated bytes are unpickled.
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
        """Whether the peer has authenticated: frames may then have any length, hold any values, and call functions."""
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def send(self, kind: str, **fields: Any) -> None:
        """Send a frame; does nothing on a lost connection, which `on_lost` has reported."""
        if self.lost.is_set():
            return
        body = pickle.dumps((kind, fields)) if self.trusted else json.dumps([kind, fields]).encode()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (_HEAD.pack(len(body)), body)

    async def call(self, kind: str, *, waits: bool = False, **fields: Any) -> Any:
        """Call a function of the peer and return its answer. Raises the peer's fault (`load_fault`), PeerClosedError if the peer
        ended during the call, or the error of `fail`. Cancellation also cancels the peer's task; with `waits` it propagates
        only after that task has ended."""
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
                answer.exception()  # mark it as retrieved, also if the caller was cancelled

    def fail(self, error: Exception) -> None:
        """Fail all pending calls with this error."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _receive(self, kind: str, fields: Fields) -> None:
        if not self.trusted or kind not in ("call", "cancel", "answer"):
            return self.on[kind](fields)
        number = fields["id"]
        if kind == "call":
            self.serving[number] = task = asyncio.create_task(self._serve(**fields), name=f"call of {fields['what']}")
            # As a callback, not at the end of `_serve`, which never runs if it is cancelled before its first step.
            return task.add_done_callback(partial(self._answer, number))
        if kind == "cancel":
            if number in self.serving:  # otherwise it has just ended, and its answer was sent
                self.serving[number].cancel()
            return
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        try:
            if "fault" in fields:
                raise load_fault(fields["fault"], self.peer)
            if "result" not in fields:  # cancelled without a request from here: the peer is shutting down
                raise PeerClosedError("the worker ended")
            answer.set_result(pickle.loads(fields["result"]))
        except Exception as problem:
            answer.set_exception(problem)

    async def _serve(self, id: int, what: str, fields: bytes) -> Fields:
        try:
            # Pickled separately from the frame, so that an error of (un)pickling is a fault of this call.
            return {"result": pickle.dumps(await self.serves[what](**pickle.loads(fields)))}
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # of any kind: without an answer the peer waits forever
            return {"fault": dump_fault(problem)}

    def _answer(self, number: int, task: asyncio.Task[Fields]) -> None:
        """Answer a call that has ended with its result or fault; with neither if it was cancelled."""
        del self.serving[number]
        self.send("answer", id=number, **({} if task.cancelled() else task.result()))

    def close(self) -> None:
        """Send all queued frames and close the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, without sending queued frames."""
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        parts, self._unsent = self._unsent, []
        if parts and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: a Ray actor runs uvloop, whose transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, problem: Exception | None) -> None:
        self.lost.set()
        for task in list(self.serving.values()):  # frees their requests at an engine
            task.cancel()
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while len(self._received) >= start + _HEAD.size:
            (length,) = _HEAD.unpack_from(self._received, start)
            if not self.trusted and length > UNTRUSTED_FRAME_BYTES:
                log.error(
                    "closed a connection: a frame of %d bytes before authentication (limit %d)", length, UNTRUSTED_FRAME_BYTES
                )
                self.abort()
                break
            begin, stop = start + _HEAD.size, start + _HEAD.size + length
            if len(self._received) < stop:
                break
            body, start = bytes(self._received[begin:stop]), stop
            try:
                self._receive(*(pickle if self.trusted else json).loads(body))
            except Exception:  # one bad frame must not end the connection for all other episodes
                log.exception("a frame on a rollout worker's channel could not be handled")
        del self._received[:start]


class ChannelServer:
    """Driver's listening socket for workers: `expected[name]` is called with the channel of the first process that connects
    under this name and knows the secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self.expected: dict[str, Callable[[Channel], None]] = {}
        self._server: asyncio.Server | None = None
        self.endpoint: DriverAddress | None = None

    async def open(self, host: str) -> DriverAddress:
        """Listen on a free port. `host`: the driver's address as seen by the worker processes."""
        # Bound to that address only, so that other networks of this machine cannot reach it.
        self._server = await asyncio.get_running_loop().create_server(self._accept, host, 0)
        self.endpoint = DriverAddress(host, self._server.sockets[0].getsockname()[1], self._secret)
        return self.endpoint

    def close(self) -> None:
        """Stop listening; open channels stay connected."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self) -> Channel:
        channel, nonce = Channel(), secrets.token_hex(16)
        timer = asyncio.get_running_loop().call_later(AUTHENTICATION_S, channel.abort)

        def greet(fields: Fields) -> None:
            timer.cancel()
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
    """Compute the HMAC that proves that `name` knows the secret."""
    return hmac.new(secret, f"{nonce}/{name}".encode(), hashlib.sha256).hexdigest()


async def connect_to_driver(endpoint: DriverAddress, name: str, on: dict[str, Handler]) -> Channel:
    """Connect to the driver and return the worker's end of the channel, with the handlers `on`. Raises WorkerDiedError if
    nothing listens at the address, or the driver rejects this process."""
    channel, admitted, nonce = Channel(), asyncio.Event(), secrets.token_hex(16)
    channel.on, address = on, f"{endpoint.host}:{endpoint.port}"

    admit = partial(channel.send, "name", name=name, nonce=nonce)

    def welcome(fields: Fields) -> None:
        if not hmac.compare_digest(str(fields.get("proof")), proof(endpoint.secret, nonce, "driver")):
            return channel.abort()
        channel.trusted = True
        admitted.set()

    channel.on |= {"nonce": lambda fields: admit(proof=proof(endpoint.secret, fields["nonce"], name)), "welcome": welcome}
    channel.on_lost = admitted.set
    try:
        await asyncio.get_running_loop().create_connection(lambda: channel, endpoint.host, endpoint.port)
    except OSError as problem:
        raise WorkerDiedError(f"rollout {name}: the driver does not listen at {address}: {problem}") from None
    try:
        await asyncio.wait_for(admitted.wait(), 3 * AUTHENTICATION_S)  # the driver may be busy
    except TimeoutError:
        channel.abort()
        silent = f"rollout {name}: the program that listens at {address} does not answer as the driver of this run"
        raise WorkerDiedError(f"{silent}. It may be another program; start the run again") from None
    if channel.lost.is_set():
        raise WorkerDiedError(f"rollout {name}: the driver at {address} rejected its connection")
    return channel


# Faults


def dump_fault(error: BaseException) -> Fields:
    """Serialize an exception as text: its class may not exist in the peer, and a traceback cannot be pickled."""
    return {
        "error": type(error).__name__,
        "message": str(error),
        "trace": "".join(traceback.format_exception(error)),
        "errno": error.errno if isinstance(error, OSError) else None,
    }


def load_fault(fields: Mapping[str, Any], who: str) -> AgentrlError | OSError:
    """Rebuild an exception from `dump_fault`: an agentrl error in its class, a full disk as OSError, any other as WorkerError
    with the remote traceback. `who`: the process in which it was raised."""
    kind = getattr(errors, fields["error"], None)
    if isinstance(kind, type) and issubclass(kind, AgentrlError):
        # Message unchanged: the record of an episode must not depend on the process that played it.
        return kind(fields["message"])
    if fields["errno"] in errors.FULL:
        return OSError(fields["errno"], f"{who}: {fields['message']}")
    message = f"{who}: {fields['error']}: {fields['message']}"
    return WorkerError(f"{message}\n--- remote traceback ---\n{fields['trace'].rstrip()}")
