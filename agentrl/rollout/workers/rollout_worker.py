"""A rollout worker: plays the driver's jobs in the event loop of its process.

Its spans, its trajectory files, the engine in the driver that it uses, and the worker itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from agentrl.data.trajectory import Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Told
from agentrl.rollout.player import Job, Player
from agentrl.rollout.workers.channel import (
    Channel,
    Door,
    Fields,
    Handler,
    dial,
    fault_fields,
    fault_of,
    generation_frame,
    generation_of,
    job_of,
    prompt_bytes,
    prompt_of,
    sampling_of,
    trajectories_frame,
)
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import LoopWatchdog
from agentrl.utils.spans import (
    TracePlace,
    TraceSpan,
    add_listener,
    at,
    from_json,
    here,
    listens_to_all,
    machine,
    now,
    to_json,
)
from agentrl.utils.spans import (
    receive_span as told,
)
from agentrl.utils.threads import in_thread

# Spans

SpanFields = dict[str, Any]


def span_fields() -> SpanFields | None:
    """For a job: where in a trace its episode lies; None if nobody listens."""
    place = here()
    if place is None or not (place.sampled or listens_to_all()):
        return None
    return {**asdict(place), "all": listens_to_all(), "sent": now()}


class Outbox:
    """The worker's side."""

    def __init__(self) -> None:
        self._found: list[TraceSpan] = []
        self._all: bool | None = None
        self._leave: Callable[[], None] = lambda: None
        self._least: int | None = None

    def place(self, fields: SpanFields | None) -> TracePlace | None:
        """Store the result of `asked`; from now on spans are kept for the driver."""
        if fields is None:
            return None
        late = now() - fields["sent"]
        self._least = late if self._least is None else min(late, self._least)
        if fields["all"] is not self._all:
            self._leave()
            self._all = fields["all"]
            self._leave = add_listener(self._found.append, all=fields["all"])
        return TracePlace(**{key: value for key, value in fields.items() if key not in ("all", "sent")})

    def frame(self) -> SpanFields | None:
        """The spans that have ended since the last call; None without any."""
        if not self._found:
            return None
        found = [to_json(one) for one in self._found]
        self._found.clear()  # the listener appends to this very list
        return {"spans": found, "machine": machine(), "sent": now(), "least": self._least}

    def close(self) -> None:
        self._leave()


class Inbox:
    """The driver's side, one for each worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._least: int | None = None

    def notify(self, fields: SpanFields) -> None:
        """Tell the listeners, in this process's time."""
        late = now() - fields["sent"]
        self._least = late if self._least is None else min(late, self._least)
        ahead = 0 if fields["machine"] == machine() else (self._least - fields["least"]) // 2
        for one in fields["spans"]:
            told(from_json(one, self._name, ahead))


# Trajectory files

PART_BYTES = 64 << 20
"""A part file of this size is full; it is deleted once no episode that is still needed lies in it."""
COPY_BYTES = 1 << 20


class Spool:
    """The worker's side: one part file after the other. `write` may be called from several threads."""

    def __init__(self, folder: Path, name: str, most: int = PART_BYTES) -> None:
        self._folder, self._name, self._most = folder, name, most
        self._file: TextIO | None = None
        self._number = self._at = 0
        self._lock = threading.Lock()

    def write(self, record: str, trajectory: Trajectory) -> dict[str, Any]:
        """Append a row; returns where it lies: part, first byte of the row, of its ledgers, and behind it. `record`: the
        trajectory's `record_text`."""
        with self._lock:
            return self._write(record, trajectory)

    def _write(self, record: str, trajectory: Trajectory) -> dict[str, Any]:
        if self._file is None or self._at >= self._most:
            self._next()
        assert self._file is not None
        start, ledgers = self._at, 0
        for place, piece in enumerate(trajectory.json_chunks(record)):
            self._at += self._file.write(piece)  # ASCII: as many bytes as characters
            ledgers = ledgers if place else self._at
        self._file.flush()  # to the system: what the driver is told of is there, even if this process dies
        return {"part": str(self._path), "start": start, "ledgers": ledgers, "stop": self._at}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._name}.{os.getpid()}.{self._number}.jsonl"

    def _next(self) -> None:
        self.close()
        self._number, self._at = self._number + 1, 0
        self._file = self._path.open("w", encoding="ascii")


class PartFile:
    """A part file, as the driver sees it: deleted with the last row that lies in it, once the worker writes another."""

    def __init__(self, path: str) -> None:
        self.path = path
        weakref.finalize(self, _remove, path)


_LEFT: set[Path] = set()
"""Folders that no worker writes to any more."""


def leave(folder: Path) -> None:
    """No worker writes there any more: the folder goes with the last part file in it, and the one that it is in likewise."""
    _LEFT.add(folder)
    _tidy(folder)


def _remove(path: str) -> None:
    part = Path(path)
    part.unlink(missing_ok=True)
    if part.parent in _LEFT:
        _tidy(part.parent)


def _tidy(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty yet
        folder.rmdir()
        _LEFT.discard(folder)
        folder.parent.rmdir()


@dataclass(slots=True)
class StoredRow:
    """Location of an episode's row: bytes [start, stop) of a part file, its ledgers from `ledgers` on."""

    part: PartFile
    start: int
    ledgers: int
    stop: int
    whole: bool = True

    def chunks(self, record: str | None) -> Iterator[str]:
        """The row's text; with `record`, that takes the place of the record in the file. Raises OSError if it is gone."""
        begin = self.start
        if record is not None:
            yield record
            begin = self.ledgers
        with Path(self.part.path).open("rb") as file:
            file.seek(begin)
            left = self.stop - begin
            while left:
                piece = file.read(min(left, COPY_BYTES))
                if not piece:
                    raise OSError(f"{self.part.path}: ends {left} bytes before the end of a row")
                left -= len(piece)
                yield piece.decode("ascii")


class Rows:
    """The driver's side, one for each worker: `row` for its spool's figures."""

    def __init__(self) -> None:
        self._part: PartFile | None = None

    def row(self, told: dict[str, Any]) -> StoredRow:
        if self._part is None or self._part.path != told["part"]:
            self._part = PartFile(told["part"])
        return StoredRow(self._part, told["start"], told["ledgers"], told["stop"])


# The worker

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two reports of a worker."""
MOST_WAITS = 8
"""The waits that a report names, the longest: as many as a message of the driver's shows."""
CLOSE_S = 30.0
"""Seconds that cancelled episodes have for their teardown when a worker ends."""


class Parts(Protocol):
    """Player with everything that it needs started and closed; `run.assembly.Assembly` is one."""

    @property
    def player(self) -> Player: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class WorkerCore:
    """Made in the process that hosts it; `run` is all that it is asked.

    `build(channel)` makes the parts in this process, in a thread. `spool`: the folder for rows of trajectory files that the
    driver asks to keep. `slow_loop`: as in the rollout section; the driver gets the finds of a watchdog.
    """

    def __init__(
        self, name: str, build: Callable[[Channel], Awaitable[Parts]], spool: Path | None = None, slow_loop: float = 0.0
    ) -> None:
        self.name, self._build = name, build
        self._spool = None if spool is None else Spool(spool, name)
        self._channel, self._outbox = Channel(), Outbox()
        self._parts: Parts | None = None
        self._watchdog = LoopWatchdog(slow_loop, self._slow, f"the event loop of rollout {name}")
        self._over = asyncio.Event()
        self.dismissed = False
        """Whether the driver said that it is enough."""
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._watches: dict[int, Watch] = {}
        self._reported: dict[int, int] = {}
        self._watching: Counter[int] = Counter()

    async def run(self, door: Door) -> None:
        """Connect, play requested episodes, and return once the driver says so or is gone. An error of construction goes to the
        driver, which raises it."""
        on: dict[str, Handler] = {"play": self._play, "cancel": self._cancel, "heard": self._heard, "end": self._end}
        self._channel = channel = await dial(door, self.name, on)
        # The driver's death must not leave a process behind that plays for nobody.
        channel.on_lost = self._over.set
        if channel.lost.is_set():
            return
        over = asyncio.create_task(self._over.wait(), name="end of the worker")
        if not await self._built(channel, over):
            over.cancel()
            await self._close()
            return
        channel.send("ready", pid=os.getpid())
        self._watchdog.start()
        beats = asyncio.create_task(self._beats(), name="beats")
        await over
        self._watchdog.stop()
        beats.cancel()
        await self._close()

    async def _built(self, channel: Channel, over: asyncio.Task[Any]) -> bool:
        """Make and start the parts. False if they cannot be, or nobody needs them any more: a started part may wait for an
        answer of the driver, which is gone then."""
        building = asyncio.create_task(self._begin(channel), name=f"start of {self.name}")
        await asyncio.wait({building, over}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            building.cancel()
            return False
        problem = building.exception()
        if problem is not None:
            log.error("rollout %s cannot be built", self.name, exc_info=problem)
            channel.send("unfit", **fault_fields(problem))
        return problem is None

    async def _begin(self, channel: Channel) -> None:
        self._parts = await self._build(channel)
        await self._parts.start()

    async def _close(self) -> None:
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        if playing:
            await asyncio.wait(playing, timeout=CLOSE_S)
        if self._parts is not None:
            await self._parts.close()
        if self._spool is not None:
            self._spool.close()
        self._outbox.close()
        self._channel.close()

    def abandon(self) -> None:
        """Nothing that plays here can go on: the driver sees the end of the connection, and plays all of it elsewhere."""
        self._channel.abort()

    def _end(self, fields: Fields, _: memoryview) -> None:
        self.dismissed = True
        self._over.set()

    # -- episodes ----------------------------------------------------------------------------------

    def _play(self, fields: Fields, _: memoryview) -> None:
        number, watched = fields["id"], fields["watch"]
        try:
            job = job_of(fields["job"])
        except (TypeError, KeyError) as problem:  # a driver that is not told waits forever
            self._channel.send("failed", id=number, **fault_fields(problem))
            return
        if watched not in self._watches:
            self._watches[watched], self._reported[watched] = Watch(fields["look"]), 0
        self._watching[watched] += 1
        work = self._job(number, job, watched, fields["keep"], self._outbox.place(fields.get("trace")))
        self._playing[number] = asyncio.create_task(work, name=f"episode {job.spec.key}")

    def _cancel(self, fields: Fields, _: memoryview) -> None:
        task = self._playing.get(fields["id"])
        if task is not None:  # else it has just ended, and the answer is under way
            task.cancel()

    async def _job(self, number: int, job: Job, watched: int, keep: bool, place: TracePlace | None) -> None:
        assert self._parts is not None
        try:
            player, watch = self._parts.player, self._watches[watched]
            with at(place):
                found = await player.play_tree(job, watch) if job.branches else [await player.play(job, watch)]
            records = [trajectory.record_text() for trajectory in found]
            head, blob = trajectories_frame(found, records)
            if keep and self._spool is not None:
                for each, record, trajectory in zip(head["episodes"], records, found, strict=True):
                    each["row"] = await in_thread("files", self._spool.write, record, trajectory)
            self._send_spans()
            self._channel.send("done", blob, id=number, **head)
        except asyncio.CancelledError:
            self._channel.send("cancelled", id=number)
        except BaseException as problem:  # of any kind: a driver that is not told waits forever
            self._channel.send("failed", id=number, **fault_fields(problem))
        finally:
            del self._playing[number]
            self._watching[watched] -= 1

    def _send_spans(self) -> None:
        if (found := self._outbox.frame()) is not None:
            self._channel.send("spans", **found)

    # -- reports -----------------------------------------------------------------------------------

    def _heard(self, fields: Fields, _: memoryview) -> None:
        """Something moved elsewhere: for who waits here, the rollout is not stuck."""
        number, moves = fields["watch"], fields["moves"]
        if number in self._watches:
            self._watches[number].moves += moves
            self._reported[number] += moves

    def _slow(self, line: str) -> None:
        self._channel.send("slow", line=line)

    async def _beats(self) -> None:
        due = time.monotonic()
        while True:
            lag = max(time.monotonic() - due, 0.0)
            blocked = self._watchdog.read()["loop/blocked_s"]
            self._send_spans()
            self._channel.send("beat", lag=lag, blocked=blocked, watches=self._report())
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)

    def _report(self) -> list[dict[str, Any]]:
        found = []
        for number, watch in list(self._watches.items()):
            fresh, self._reported[number] = watch.moves - self._reported[number], watch.moves
            waits, more = watch.oldest(MOST_WAITS)
            cut, watch.cut = watch.cut, 0
            found.append({"watch": number, "moves": fresh, "waits": waits, "more": more, "cut": cut})
            if not self._watching[number]:  # evaluations have a watch of their own each
                del self._watches[number], self._reported[number], self._watching[number]
        return found


# The driver's engine

LOOK_S = 0.5
"""How old the progress of a request that a worker knows may be."""


ASKED: dict[str, dict[str, Any]] = {"stop": {"stop": ("a",)}, "grammar": {"grammar": 'start: "a"'}}
"""What an engine may refuse, and a sampling that asks for it."""


class EngineService:
    """The driver's side, one for each worker. Requests end with the channel.

    `owner` is added to request keys: an episode that is played again, after its worker died, is another one to the engine.
    """

    def __init__(self, channel: Channel, engine: Engine, owner: str) -> None:
        self._channel, self._engine, self._owner = channel, engine, owner
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._keys: dict[int, str] = {}
        self._calls: set[asyncio.Task[None]] = set()

        async def stats() -> Fields:
            return {"stats": asdict(await engine.stats())}

        async def refusals() -> Fields:
            # In a thread: an engine that knows the text of its tokens reads a tokenizer at the first question.
            asked = {name: Sampling(1, **more) for name, more in ASKED.items()}
            return {"refused": {name: await in_thread("load", engine.refusal, one) for name, one in asked.items()}}

        channel.on |= {
            "engine.ask": self._ask,
            "engine.drop": self._drop,
            "engine.abort": lambda fields, _: self._call(fields["id"], engine.abort(self._key(fields["key"]))),
            "engine.stats": lambda fields, _: self._call(fields["id"], stats()),
            "engine.can": lambda fields, _: self._call(fields["id"], refusals()),
            "engine.look": self._look,
        }

    def close(self) -> None:
        """Cancel what the worker asked for, which frees it at the engine."""
        for task in [*self._tasks.values(), *self._calls]:
            task.cancel()

    def _key(self, key: str) -> str:
        return f"{key}@{self._owner}"

    def _ask(self, fields: Fields, blob: memoryview) -> None:
        number, key = fields["id"], fields["key"]
        work = self._answer(number, prompt_of(blob), fields["sampling"], self._key(key), fields["streams"])
        self._tasks[number], self._keys[number] = asyncio.create_task(work, name=f"turn of {key}"), key

    async def _answer(self, number: int, token_ids: list[int], asked: Fields, key: str, streams: bool) -> None:
        def tell(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self._channel.send("engine.part", id=number, ids=list(ids), logprobs=list(logprobs))

        try:
            sampling = sampling_of(asked)
            if streams:
                generation = await self._engine.stream(token_ids, sampling, key, tell)
            else:
                generation = await self._engine.generate(token_ids, sampling, key)
            head, blob = generation_frame(generation)
            self._channel.send("engine.answer", blob, id=number, **head)
        except Exception as problem:  # of any kind: a worker that is not told waits forever
            self._channel.send("engine.fault", id=number, **fault_fields(problem))
        finally:
            self._tasks.pop(number, None)
            self._keys.pop(number, None)

    def _drop(self, fields: Fields, _: memoryview) -> None:
        task = self._tasks.get(fields["id"])
        if task is not None:
            task.cancel()

    def _call(self, number: int, work: Coroutine[object, object, Fields | None]) -> None:
        async def call() -> None:
            try:
                self._channel.send("engine.answer", id=number, **(await work or {}))
            except Exception as problem:  # of any kind: a worker that is not told waits forever
                self._channel.send("engine.fault", id=number, **fault_fields(problem))

        task = asyncio.create_task(call(), name="a worker's call of the engine")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _look(self, fields: Fields, _: memoryview) -> None:
        told = {key: self._engine.progress(self._key(key)) for key in set(self._keys.values())}
        self._channel.send("engine.progress", known={key: tokens for key, tokens in told.items() if tokens is not None})


class DriverEngine(Engine):
    """The worker's side: the driver's engine, with requests of this worker alone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Generation | Fields]] = {}
        self._under_way: dict[str, int] = {}
        self._told_of: dict[int, Told] = {}
        self._known: dict[str, int] = {}
        self._looking: asyncio.Task[None] | None = None
        self._refused: dict[str, str] = {}
        channel.on |= {
            "engine.answer": self._take_answer,
            "engine.fault": self._take_failure,
            "engine.part": self._part,
            "engine.progress": self._progress,
        }

    async def start(self) -> None:
        """The driver has started it; here it is asked what it cannot do."""
        self._refused = (await self._call_driver("engine.can"))["refused"]

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self._turn(token_ids, sampling, request_key, None)

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told) -> Generation:
        return await self._turn(token_ids, sampling, request_key, told)

    async def _turn(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        try:
            prompt = prompt_bytes(token_ids)
        except ValueError as problem:
            raise EngineError(f"the prompt: {problem}") from None
        number, answer = self._expect()
        self._under_way[request_key] = number
        if told is not None:
            self._told_of[number] = told
        streams = told is not None
        self._channel.send("engine.ask", prompt, id=number, key=request_key, sampling=asdict(sampling), streams=streams)
        try:
            found = await answer
        except asyncio.CancelledError:
            self._channel.send("engine.drop", id=number)
            raise
        finally:
            del self._waiting[number]
            self._told_of.pop(number, None)
            if self._under_way.get(request_key) == number:
                del self._under_way[request_key]
                self._known.pop(request_key, None)
        assert isinstance(found, Generation)
        return found

    def refusal(self, sampling: Sampling) -> str:
        """Reason why a sampling is impossible on the driver's engine; a grammar that is wrong shows when it is sampled with."""
        return next((self._refused[name] for name in ASKED if getattr(sampling, name)), "")

    def progress(self, request_key: str) -> int | None:
        """As old as LOOK_S. None until the driver has sent it, and always if its engine never reports it."""
        if request_key not in self._under_way:
            return None
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="progress of turns")
        return self._known.get(request_key)

    async def abort(self, request_key: str) -> None:
        await self._call_driver("engine.abort", request_key)

    async def stats(self) -> EngineStats:
        """Of the whole engine, not of this worker's requests."""
        return EngineStats(**(await self._call_driver("engine.stats"))["stats"])

    async def close(self) -> None:
        """The driver's engine goes on."""
        if self._looking is not None:
            self._looking.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineError("the engine was closed"))

    async def _call_driver(self, kind: str, key: str = "") -> Fields:
        number, answer = self._expect()
        self._channel.send(kind, id=number, key=key)
        try:
            found = await answer
        finally:
            del self._waiting[number]
        assert isinstance(found, dict)
        return found

    def _expect(self) -> tuple[int, asyncio.Future[Generation | Fields]]:
        number = next(self._numbers)
        answer: asyncio.Future[Generation | Fields] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        return number, answer

    def _take_answer(self, fields: Fields, blob: memoryview) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_result(generation_of(fields, blob) if "finish" in fields else fields)

    def _take_failure(self, fields: Fields, _: memoryview) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_exception(fault_of(fields, "the engine, in the driver"))

    def _part(self, fields: Fields, _: memoryview) -> None:
        told = self._told_of.get(fields["id"])
        if told is not None:
            told(fields["ids"], fields["logprobs"])

    def _progress(self, fields: Fields, _: memoryview) -> None:
        self._known = {key: tokens for key, tokens in fields["known"].items() if key in self._under_way}

    async def _look(self) -> None:
        # Ends with the last request, so that an idle engine is not asked; `progress` begins again.
        while self._under_way:
            self._channel.send("engine.look")
            await asyncio.sleep(LOOK_S)
