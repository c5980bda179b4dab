"""A rollout worker: plays the driver's jobs in the event loop of its process.

Its spans, the worker itself, and the engine in the driver that it uses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.data.trajectory import Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, StreamingEngine, Told
from agentrl.rollout.player import Job, Player
from agentrl.rollout.workers.channel import Channel, Door, Fields, dial, fault_fields
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import LoopWatchdog
from agentrl.utils.spans import TracePlace, TraceSpan, add_listener, at, here, listens_to_all, machine, now
from agentrl.utils.spans import receive_span as told
from agentrl.utils.threads import in_thread

# Spans

SpanFields = dict[str, Any]


def span_fields() -> SpanFields | None:
    """For a job: where in a trace its episode lies; None if nobody listens."""
    place = here()
    if place is None or not (place.sampled or listens_to_all()):
        return None
    return {"place": place, "all": listens_to_all(), "sent": now()}


class Outbox:
    """The worker's side."""

    def __init__(self) -> None:
        self._found: list[TraceSpan] = []
        self._all: bool | None = None
        self.leave: Callable[[], None] = lambda: None
        self._least: int | None = None

    def place(self, fields: SpanFields | None) -> TracePlace | None:
        """Store the result of `span_fields`; from now on spans are kept for the driver."""
        if fields is None:
            return None
        late = now() - fields["sent"]
        self._least = late if self._least is None else min(late, self._least)
        if fields["all"] is not self._all:
            self.leave()
            self._all = fields["all"]
            self.leave = add_listener(self._found.append, all=fields["all"])
        place: TracePlace = fields["place"]
        return place

    def frame(self) -> SpanFields | None:
        """The spans that have ended since the last call; None without any."""
        if not self._found:
            return None
        found = list(self._found)
        self._found.clear()  # the listener appends to this very list
        return {"spans": found, "machine": machine(), "sent": now(), "least": self._least}


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
            told(replace(one, place=self._name, begin=one.begin + ahead, end=one.end + ahead))


# The worker

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two reports of a worker."""
MOST_WAITS = 8
"""The waits that a report names, the longest: as many as a message of the driver's shows."""
CLOSE_S = 30.0
"""Seconds that cancelled episodes have for their teardown when a worker ends."""


@dataclass(slots=True)
class _Watched:
    """A watch of the driver's here, and the jobs that are played for it."""

    watch: Watch
    playing: int = 0


class WorkerCore:
    """Made in the process that hosts it; `run` is all that it is asked.

    `build(channel)` makes the parts in this process, in a thread: a player with all that it needs to be started and closed
    (`run.assembly.Assembly`). `slow_loop`: as in the rollout section; the driver gets the finds of a watchdog.
    """

    def __init__(self, name: str, build: Callable[[Channel], Awaitable[Any]], slow_loop: float = 0.0) -> None:
        self.name, self._build = name, build
        self._channel, self._outbox = Channel(), Outbox()
        self._parts: Any = None
        self._watchdog = LoopWatchdog(
            slow_loop, lambda line: self._channel.send("slow", line=line), f"the event loop of rollout {name}"
        )
        self._over = asyncio.Event()
        self.dismissed = False
        """Whether the driver said that it is enough."""
        self._watched: dict[int, _Watched] = {}

    async def run(self, door: Door) -> None:
        """Connect, play requested episodes, and return once the driver says so or is gone. An error of construction goes to the
        driver, which raises it."""
        self._channel = channel = await dial(door, self.name, {"end": self._end})
        channel.serves["play"] = self._play
        # The driver's death must not leave a process behind that plays for nobody.
        channel.on_lost = self._over.set
        if channel.lost.is_set():
            return
        over = asyncio.create_task(self._over.wait(), name="end of the worker")
        building = asyncio.create_task(self._begin(channel), name=f"start of {self.name}")
        await asyncio.wait({building, over}, return_when=asyncio.FIRST_COMPLETED)
        problem = building.exception() if building.done() else None
        if problem is not None:
            log.error("rollout %s cannot be built", self.name, exc_info=problem)
            channel.send("unfit", **fault_fields(problem))
        elif building.done():
            channel.send("ready", pid=os.getpid())
            with self._watchdog:
                beats = asyncio.create_task(self._beats(), name="beats")
                await over
            beats.cancel()
        building.cancel()  # a started part may wait for an answer of the driver, which is gone
        over.cancel()
        playing = list(channel.serving.values())
        for task in playing:
            task.cancel()
        if playing:
            await asyncio.wait(playing, timeout=CLOSE_S)
        if self._parts is not None:
            await self._parts.close()
        self._outbox.leave()
        channel.close()

    async def _begin(self, channel: Channel) -> None:
        self._parts = await self._build(channel)
        await self._parts.start()

    def abandon(self) -> None:
        """Nothing that plays here can go on: the driver sees the end of the connection, and plays all of it elsewhere."""
        self._channel.abort()

    def _end(self, fields: Fields) -> None:
        self.dismissed = True
        self._over.set()

    async def _play(self, job: Job, watch: int, look: float, trace: SpanFields | None) -> list[Trajectory]:
        watched = self._watched.setdefault(watch, _Watched(Watch(look)))
        watched.playing += 1
        try:
            with at(self._outbox.place(trace)):
                player: Player = self._parts.player
                return await player.play(job, watched.watch)
        finally:
            watched.playing -= 1
            self._send_spans()

    def _send_spans(self) -> None:
        if (found := self._outbox.frame()) is not None:
            self._channel.send("spans", **found)

    # -- reports -----------------------------------------------------------------------------------

    async def _beats(self) -> None:
        due = time.monotonic()
        while True:
            lag = max(time.monotonic() - due, 0.0)
            blocked = self._watchdog.read()["loop/blocked_s"]
            self._send_spans()
            found = []
            for number, watched in list(self._watched.items()):
                watch = watched.watch
                waits, more = watch.oldest(MOST_WAITS)
                found.append({"watch": number, "moves": watch.moves, "waits": waits, "more": more, "cut": watch.cut})
                watch.moves = watch.cut = 0
                if not watched.playing:  # evaluations have a watch of their own each
                    del self._watched[number]
            self._channel.send("beat", lag=lag, blocked=blocked, watches=found)
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)


# The driver's engine

LOOK_S = 0.5
"""How old the progress of a request that a worker knows may be."""


ASKED: dict[str, dict[str, Any]] = {"stop": {"stop": ("a",)}, "grammar": {"grammar": 'start: "a"'}}
"""What an engine may refuse, and a sampling that asks for it."""


def serve_engine(channel: Channel, engine: Engine, owner: str) -> None:
    """Serve the driver's engine to one worker. Requests end with the channel.

    `owner` is added to request keys: an episode that is played again, after its worker died, is another one to the engine.
    """

    async def ask(key: str, token_ids: Sequence[int], sampling: Sampling, stream: int | None) -> Generation:
        if stream is None:
            return await engine.generate(token_ids, sampling, f"{key}@{owner}")

        def tell(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            channel.send("engine.part", stream=stream, ids=list(ids), logprobs=list(logprobs))

        return await engine.stream(token_ids, sampling, f"{key}@{owner}", tell)

    async def abort(key: str) -> None:
        await engine.abort(f"{key}@{owner}")

    async def refusals() -> dict[str, str]:
        # In a thread: an engine that knows the text of its tokens reads a tokenizer at the first question.
        asked = {name: Sampling(1, **more) for name, more in ASKED.items()}
        return {name: await in_thread("load", engine.refusal, one) for name, one in asked.items()}

    async def progress(keys: Sequence[str]) -> dict[str, int | None]:
        return {key: engine.progress(f"{key}@{owner}") for key in keys}

    channel.serves |= {
        "engine.ask": ask,
        "engine.abort": abort,
        "engine.stats": engine.stats,
        "engine.refusals": refusals,
        "engine.progress": progress,
    }


class DriverEngine(StreamingEngine):
    """The worker's side: the driver's engine, with requests of this worker alone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._under_way: dict[str, int] = {}
        self._streams: dict[int, Told] = {}
        self._known: dict[str, int | None] = {}
        self._looking: asyncio.Task[None] | None = None
        self._refused: dict[str, str] = {}
        channel.peer = "the engine, in the driver"
        channel.on["engine.part"] = self._part

    async def start(self) -> None:
        """The driver has started it; here it is asked what it cannot do."""
        self._refused = await self._channel.call("engine.refusals")

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        number = self._under_way[request_key] = next(self._numbers)
        if told is not None:
            self._streams[number] = told
        asked: Fields = {"key": request_key, "token_ids": token_ids, "sampling": sampling}
        try:
            found: Generation = await self._channel.call("engine.ask", **asked, stream=None if told is None else number)
            return found
        finally:
            self._streams.pop(number, None)
            if self._under_way.get(request_key) == number:
                del self._under_way[request_key]
                self._known.pop(request_key, None)

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
        await self._channel.call("engine.abort", key=request_key)

    async def stats(self) -> EngineStats:
        """Of the whole engine, not of this worker's requests."""
        found: EngineStats = await self._channel.call("engine.stats")
        return found

    async def close(self) -> None:
        """The driver's engine goes on."""
        if self._looking is not None:
            self._looking.cancel()
        self._channel.fail(EngineError("the engine was closed"))

    def _part(self, fields: Fields) -> None:
        if (told := self._streams.get(fields["stream"])) is not None:
            told(fields["ids"], fields["logprobs"])

    async def _look(self) -> None:
        # Ends with the last request, so that an idle engine is not asked; `progress` begins again.
        while self._under_way:
            known = await self._channel.call("engine.progress", keys=list(self._under_way))
            self._known = {key: tokens for key, tokens in known.items() if key in self._under_way}
            await asyncio.sleep(LOOK_S)
