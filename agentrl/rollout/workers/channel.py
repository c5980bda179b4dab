"""The channel between the driver and a rollout worker: frames, and what they carry as JSON and columns."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import secrets
import struct
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from agentrl.data import token_ledger as columns
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Trajectory
from agentrl.rollout.engine import Generation, Sampling, Usage
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Job
from agentrl.utils import errors
from agentrl.utils.errors import AgentrlError, WorkerDiedError, WorkerError

# Frames

log = logging.getLogger(__name__)

Fields = dict[str, Any]
Handler = Callable[[Fields, memoryview], None]

_HEAD = struct.Struct("<II")
STRANGER_BYTES = 4096
"""The longest frame from a process that has not proven that it knows the secret."""
GREETING_S = 20.0
"""Seconds in which one who connects must have proven it."""


@dataclass(frozen=True, slots=True)
class Door:
    """Address to which workers connect, and the secret with which they prove that they were asked to."""

    host: str
    port: int
    secret: bytes


class Channel(asyncio.Protocol):
    """One end of a connection. `on[kind]` is called with each frame of that kind; `on_lost` once, when it is over."""

    def __init__(self) -> None:
        self.on: dict[str, Handler] = {}
        self.on_lost: Callable[[], None] = lambda: None
        self.lost = asyncio.Event()
        self.most = STRANGER_BYTES
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._unsent: list[bytes] = []

    def trust(self) -> None:
        """The other side has proven who it is: frames may be of any length."""
        self.most = 1 << 32

    def send(self, kind: str, blob: bytes = b"", **fields: Any) -> None:
        """Send a frame; one to a lost connection goes nowhere, since `on_lost` has been called."""
        if self.lost.is_set():
            return
        head = json.dumps({"kind": kind, **fields}).encode()
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (_HEAD.pack(len(head), len(blob)), head, blob)

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
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = 0
        while (found := self._frame(start)) is not None:
            head, blob, start = found
            fields = json.loads(head)
            handler = self.on.get(fields["kind"])
            if handler is None:
                log.error("a frame of the unknown kind %r", fields["kind"])
                continue
            try:
                handler(fields, memoryview(blob))
            except Exception:  # one bad frame must not end the connection of all other episodes
                log.exception("a frame of the kind %r", fields["kind"])
        del self._received[:start]

    def _frame(self, start: int) -> tuple[bytes, bytes, int] | None:
        """The whole frame that begins there, and where the next one begins; None if it has not arrived."""
        if len(self._received) < start + _HEAD.size:
            return None
        head, blob = _HEAD.unpack_from(self._received, start)
        begin = start + _HEAD.size
        if head + blob > self.most:
            log.error("a frame of %d bytes, where %d are allowed; the connection is closed", head + blob, self.most)
            self.abort()
            return None
        stop = begin + head + blob
        if len(self._received) < stop:
            return None
        return bytes(self._received[begin : begin + head]), bytes(self._received[begin + head : stop]), stop


class Hub:
    """The driver's side of the door: who connects under a name that is expected, and knows the secret, gets a channel."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._expected: dict[str, Callable[[Channel], None]] = {}
        self._server: asyncio.Server | None = None
        self.door: Door | None = None

    async def open(self, host: str) -> Door:
        """Listen at a free port. `host`: this process's address as the workers' processes reach it."""
        # On that address alone: no other network of this machine need reach it.
        self._server = await asyncio.get_running_loop().create_server(self._visitor, host, 0)
        self.door = Door(host, self._server.sockets[0].getsockname()[1], self._secret)
        return self.door

    def expect(self, name: str, arrived: Callable[[Channel], None]) -> None:
        """Call `arrived` with the channel of the first process that proves to be `name`."""
        self._expected[name] = arrived

    def forget(self, name: str) -> None:
        """Nobody of that name is expected any more."""
        self._expected.pop(name, None)

    def close(self) -> None:
        """Stop listening; channels go on."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _visitor(self) -> Channel:
        channel, nonce = Channel(), secrets.token_hex(16)
        late = asyncio.get_running_loop().call_later(GREETING_S, channel.abort)

        def greeted(fields: Fields, _: memoryview) -> None:
            late.cancel()
            name = str(fields.get("name"))
            arrived = self._expected.get(name)
            if arrived is None or not hmac.compare_digest(str(fields.get("proof")), proof(self._secret, nonce, name)):
                log.warning("a process that is no worker of this run tried to connect as %r", name)
                channel.abort()
                return
            del self._expected[name]
            channel.on.clear()
            channel.trust()
            channel.send("welcome")
            arrived(channel)

        channel.on["name"] = greeted
        asyncio.get_running_loop().call_soon(lambda: channel.send("nonce", nonce=nonce))
        return channel


def proof(secret: bytes, nonce: str, name: str) -> str:
    """Proof that `name` knows the secret, without revealing it."""
    return hmac.new(secret, f"{nonce}/{name}".encode(), hashlib.sha256).hexdigest()


async def dial(door: Door, name: str, on: dict[str, Handler]) -> Channel:
    """The worker's end of a new connection, whose frames are given to `on`. Raises WorkerDiedError if nobody listens, or the
    driver does not let this process in."""
    channel, let_in = Channel(), asyncio.Event()
    channel.trust()
    channel.on = on

    def answer(fields: Fields, _: memoryview) -> None:
        channel.send("name", name=name, proof=proof(door.secret, fields["nonce"], name))

    channel.on["nonce"] = answer
    channel.on["welcome"] = lambda fields, _: let_in.set()
    channel.on_lost = let_in.set
    try:
        await asyncio.get_running_loop().create_connection(lambda: channel, door.host, door.port)
    except OSError as problem:
        raise WorkerDiedError(f"rollout {name}: the driver does not listen at {door.host}:{door.port}: {problem}") from None
    await let_in.wait()
    if channel.lost.is_set():
        raise WorkerDiedError(f"rollout {name}: the driver at {door.host}:{door.port} did not let it in")
    return channel


# Jobs, trajectories, turns and faults

# -- jobs --------------------------------------------------------------------------------------------


def job_fields(job: Job) -> Fields:
    """A job as JSON. Raises TypeError for parameters that JSON has no form for."""
    return {
        "env": job.env,
        "spec": asdict(job.spec),
        "params": dict(job.params),
        "temperature": job.temperature,
        "trained": job.trained,
        **({"branches": [[asdict(spec) for spec in attempts] for attempts in job.branches]} if job.branches else {}),
    }


def job_of(fields: Mapping[str, Any]) -> Job:
    """Inverse of `job_fields`."""
    branches = tuple(tuple(EpisodeSpec(**spec) for spec in attempts) for attempts in fields.get("branches", ()))
    return Job(**{**fields, "spec": EpisodeSpec(**fields["spec"]), "branches": branches})


# -- trajectories ------------------------------------------------------------------------------------


def trajectory_frame(trajectory: Trajectory, record: str) -> tuple[Fields, bytes]:
    """A trajectory: its ledgers' columns end to end, then its record (`Trajectory.record_text`), which is JSON already."""
    ledgers: list[Fields] = []
    parts: list[npt.NDArray[Any]] = []
    for ledger in trajectory.ledgers:
        state = ledger.__getstate__()
        experts = state.get("experts")
        ledgers.append({"tokens": len(ledger)} | ({} if experts is None else {"experts": _shape(experts)}))
        parts += [state[name] for name in columns.KINDS]
        parts += [] if experts is None else [experts]
    return {"ledgers": ledgers}, _join_frames(parts) + record.encode()


def trajectory_of(fields: Mapping[str, Any], blob: memoryview) -> Trajectory:
    """Inverse of `trajectory_frame`."""
    reader, ledgers = _Reader(blob), []
    for row in fields["ledgers"]:
        state = {name: reader.take(kind, (row["tokens"],)) for name, kind in columns.KINDS.items()}
        if "experts" in row:
            state["experts"] = reader.reshape(row["experts"])
        ledger = TokenLedger.__new__(TokenLedger)
        ledger.__setstate__(state)
        ledgers.append(ledger)
    trajectory = Trajectory.from_json({**json.loads(reader.rest()), "ledgers": []})
    trajectory.ledgers = ledgers
    return trajectory


def trajectories_frame(trajectories: Sequence[Trajectory], records: Sequence[str]) -> tuple[Fields, bytes]:
    """Several trajectories, one frame after the other."""
    frames = [trajectory_frame(*pair) for pair in zip(trajectories, records, strict=True)]
    return {"episodes": [{**head, "bytes": len(blob)} for head, blob in frames]}, b"".join(blob for _, blob in frames)


def trajectories_of(fields: Mapping[str, Any], blob: memoryview) -> list[Trajectory]:
    """Inverse of `trajectories_frame`."""
    found, at = [], 0
    for head in fields["episodes"]:
        found.append(trajectory_of(head, blob[at : at + head["bytes"]]))
        at += head["bytes"]
    return found


# -- turns -------------------------------------------------------------------------------------------


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """Inverse of `dataclasses.asdict`."""
    return Sampling(**{**fields, **{name: tuple(fields[name]) for name in ("stop_token_ids", "stop")}})


def prompt_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as int32. Raises ValueError if one does not fit."""
    return columns.numbers(token_ids, np.int32).tobytes()


def prompt_of(blob: memoryview) -> list[int]:
    """Inverse of `prompt_bytes`."""
    ids: list[int] = np.frombuffer(blob, np.int32).tolist()
    return ids


def generation_frame(generation: Generation) -> tuple[Fields, bytes]:
    """Frame of a sampled turn; log probabilities as float64, so that what enters a ledger is rounded once, as in the driver."""
    parts: list[npt.NDArray[Any]] = [
        np.asarray(generation.token_ids, np.int32),
        np.asarray(generation.logprobs, np.float64),
        np.asarray(generation.versions, np.int32),
    ]
    fields: Fields = {
        "tokens": len(generation.token_ids),
        "finish": generation.finish,
        "usage": None if generation.usage is None else asdict(generation.usage),
    }
    if generation.experts is not None:
        fields["experts"] = _shape(generation.experts)
        parts.append(generation.experts)
    return fields, _join_frames(parts)


def generation_of(fields: Mapping[str, Any], blob: memoryview) -> Generation:
    """Inverse of `generation_frame`."""
    reader, shape = _Reader(blob), (fields["tokens"],)
    ids, logprobs, versions = (reader.take(kind, shape).tolist() for kind in (np.int32, np.float64, np.int32))
    usage, experts = fields["usage"], fields.get("experts")
    return Generation(
        ids,
        logprobs,
        versions,
        fields["finish"],
        None if usage is None else Usage(**usage),
        None if experts is None else reader.reshape(experts),
    )


# -- faults ------------------------------------------------------------------------------------------


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


# -- columns -----------------------------------------------------------------------------------------


def _shape(array: npt.NDArray[Any]) -> Fields:
    return {"shape": list(array.shape), "type": array.dtype.str}


def _join_frames(parts: Sequence[npt.NDArray[Any]]) -> bytes:
    return b"".join(np.ascontiguousarray(part).data.cast("B") for part in parts if part.size)


class _Reader:
    """Columns one after the other, each copied: the frame that they came in is freed."""

    def __init__(self, blob: memoryview) -> None:
        self._blob, self._at = blob, 0

    def take(self, kind: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        count = math.prod(shape)
        found = np.frombuffer(self._blob, kind, count, self._at) if count else np.empty(0, kind)
        self._at += found.nbytes
        return found.reshape(shape).copy()

    def rest(self) -> bytes:
        """All that follows the columns."""
        return bytes(self._blob[self._at :])

    def reshape(self, fields: Mapping[str, Any]) -> npt.NDArray[Any]:
        return self.take(np.dtype(fields["type"]), fields["shape"])
