"""Rollout worker: plays the driver's jobs in the event loop of its process.

Transfer of its spans, the worker itself, and its access to the driver's engine."""

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
from agentrl.rollout.engine import Engine, EngineStats, Generation, OnTokens, Sampling, StreamingEngine
from agentrl.rollout.player import Job, Player
from agentrl.rollout.workers.channel import Channel, DriverAddress, Fields, connect_to_driver, dump_fault
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import LoopWatchdog
from agentrl.utils.spans import TracePlace, TraceSpan, add_listener, at, here, listens_to_all, machine, now, receive_span
from agentrl.utils.threads import in_thread

# Spans

SpanFields = dict[str, Any]


def span_fields() -> SpanFields | None:
    """Return the trace context to send with a job; None if no listener records spans."""
    place = here()
    if place is None or not (place.sampled or listens_to_all()):
        return None
    return {"place": place, "all": listens_to_all(), "sent": now()}


class SpanSender:
    """Collects a worker's spans to be sent to the driver."""

    def __init__(self) -> None:
        self._found: list[TraceSpan] = []
        self._all: bool | None = None
        self.remove_listener: Callable[[], None] = lambda: None
        self._least_delay: int | None = None

    def place(self, fields: SpanFields | None) -> TracePlace | None:
        """Return the trace position of a job's `span_fields`, and start to collect spans for the driver."""
        if fields is None:
            return None
        delay = now() - fields["sent"]
        self._least_delay = delay if self._least_delay is None else min(delay, self._least_delay)
        if fields["all"] is not self._all:
            self.remove_listener()
            self._all = fields["all"]
            self.remove_listener = add_listener(self._found.append, all=fields["all"])
        place: TracePlace = fields["place"]
        return place

    def frame(self) -> SpanFields | None:
        """Return a frame of the spans that ended since the last call; None without any."""
        if not self._found:
            return None
        found = list(self._found)
        self._found.clear()  # the listener appends to this very list
        return {"spans": found, "machine": machine(), "sent": now(), "least": self._least_delay}


class SpanReceiver:
    """Receives the spans of one worker in the driver."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._least_delay: int | None = None

    def notify(self, fields: SpanFields) -> None:
        """Pass the spans to this process's listeners, converted to its clock."""
        delay = now() - fields["sent"]
        self._least_delay = delay if self._least_delay is None else min(delay, self._least_delay)
        ahead = 0 if fields["machine"] == machine() else (self._least_delay - fields["least"]) // 2
        for one in fields["spans"]:
            receive_span(replace(one, place=self._name, begin=one.begin + ahead, end=one.end + ahead))


# The worker

log = logging.getLogger(__name__)

REPORT_S = 0.5
"""Seconds between two reports of a worker."""
MOST_WAITS = 8
"""Number of the longest waits in a report: as many as a message of the driver shows."""
CLOSE_S = 30.0
"""Seconds for the teardown of cancelled episodes when a worker ends."""


@dataclass(slots=True)
class _Watched:
    """Local counterpart of one of the driver's watches, and the number of jobs played for it."""

    watch: Watch
    playing: int = 0


class WorkerCore:
    """Main object of a worker process; its host only calls `run`.

    `build(channel)` makes the worker's parts in this process, in a thread: a player with everything to start and close
    (`run.assembly.Assembly`). `slow_loop`: limit of the `LoopWatchdog`, in seconds; its warnings go to the driver.
    """

    def __init__(self, name: str, build: Callable[[Channel], Awaitable[Any]], slow_loop: float = 0.0) -> None:
        self.name, self._build = name, build
        self._channel, self._spans = Channel(), SpanSender()
        self._parts: Any = None
        self._watchdog = LoopWatchdog(
            slow_loop, lambda line: self._channel.send("slow", line=line), f"the event loop of rollout {name}"
        )
        self._over = asyncio.Event()
        self.dismissed = False
        """Whether the driver asked this worker to end."""
        self._watched: dict[int, _Watched] = {}

    async def run(self, endpoint: DriverAddress) -> None:
        """Connect, play the requested episodes, and return once the driver asks for it or disconnects. An error of `build` is
        sent to the driver, which raises it."""
        self._channel = channel = await connect_to_driver(endpoint, self.name, {"end": self._end})
        channel.serves["play"] = self._play
        # If the driver dies, this process must end too.
        channel.on_lost = self._over.set
        if channel.lost.is_set():
            return
        over = asyncio.create_task(self._over.wait(), name="end of the worker")
        building = asyncio.create_task(self._begin(channel), name=f"start of {self.name}")
        await asyncio.wait({building, over}, return_when=asyncio.FIRST_COMPLETED)
        problem = building.exception() if building.done() else None
        if problem is not None:
            log.error("rollout %s cannot be built", self.name, exc_info=problem)
            channel.send("unfit", **dump_fault(problem))
        elif building.done():
            channel.send("ready", pid=os.getpid())
            with self._watchdog:
                beats = asyncio.create_task(self._beats(), name="beats")
                await over
            beats.cancel()
        building.cancel()  # a part may wait for an answer of a driver that is gone
        over.cancel()
        playing = list(channel.serving.values())
        for task in playing:
            task.cancel()
        if playing:
            await asyncio.wait(playing, timeout=CLOSE_S)
        if self._parts is not None:
            await self._parts.close()
        self._spans.remove_listener()
        channel.close()

    async def _begin(self, channel: Channel) -> None:
        self._parts = await self._build(channel)
        await self._parts.start()

    def abandon(self) -> None:
        """Disconnect because no episode can continue here; the driver then replays them on other workers."""
        self._channel.abort()

    def _end(self, fields: Fields) -> None:
        self.dismissed = True
        self._over.set()

    async def _play(self, job: Job, watch: int, poll_s: float, trace: SpanFields | None) -> list[Trajectory]:
        watched = self._watched.setdefault(watch, _Watched(Watch(poll_s)))
        watched.playing += 1
        try:
            with at(self._spans.place(trace)):
                player: Player = self._parts.player
                return await player.play(job, watched.watch)
        finally:
            watched.playing -= 1
            self._send_spans()

    def _send_spans(self) -> None:
        if (found := self._spans.frame()) is not None:
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
                if not watched.playing:  # each evaluation has its own watch, which is now finished
                    del self._watched[number]
            self._channel.send("beat", lag=lag, blocked=blocked, watches=found)
            due = time.monotonic() + REPORT_S
            await asyncio.sleep(REPORT_S)


# The driver's engine

PROGRESS_S = 0.5
"""Seconds between two updates of the request progress that a worker knows."""

FEATURES: dict[str, dict[str, Any]] = {"stop": {"stop": ("a",)}, "grammar": {"grammar": 'start: "a"'}}
"""Optional features of an engine -> sampling parameters that request the feature."""


def serve_engine(channel: Channel, engine: Engine, owner: str) -> None:
    """Serve the driver's engine to one worker. Requests end with the channel.

    `owner` is appended to request keys, so that the engine distinguishes an episode from its replay after a worker's death.
    """

    async def ask(key: str, token_ids: Sequence[int], sampling: Sampling, stream: int | None) -> Generation:
        if stream is None:
            return await engine.generate(token_ids, sampling, f"{key}@{owner}")

        def tell(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            channel.send("engine.part", stream=stream, ids=list(ids), logprobs=list(logprobs))

        return await engine.stream(token_ids, sampling, f"{key}@{owner}", tell)

    async def refusals() -> dict[str, str]:
        # In a thread: an engine that knows the text of its tokens loads a tokenizer on the first check.
        asked = {name: Sampling(1, **more) for name, more in FEATURES.items()}
        return {name: await in_thread("load", engine.refusal, one) for name, one in asked.items()}

    async def progress(keys: Sequence[str]) -> dict[str, int | None]:
        return {key: engine.progress(f"{key}@{owner}") for key in keys}

    channel.serves |= {
        "engine.ask": ask,
        "engine.abort": lambda key: engine.abort(f"{key}@{owner}"),
        "engine.stats": engine.stats,
        "engine.refusals": refusals,
        "engine.progress": progress,
    }


class DriverEngine(StreamingEngine):
    """Proxy in a worker for the driver's engine; it only sees this worker's requests."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._under_way: dict[str, int] = {}
        self._streams: dict[int, OnTokens] = {}
        self._known: dict[str, int | None] = {}
        self._polling: asyncio.Task[None] | None = None
        self._refused: dict[str, str] = {}
        channel.peer = "the engine, in the driver"
        channel.on["engine.part"] = self._part

    async def start(self) -> None:
        self._refused = await self._channel.call("engine.refusals")

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, emit: OnTokens | None) -> Generation:
        number = self._under_way[request_key] = next(self._numbers)
        if emit is not None:
            self._streams[number] = emit
        asked: Fields = {"key": request_key, "token_ids": token_ids, "sampling": sampling}
        try:
            found: Generation = await self._channel.call("engine.ask", **asked, stream=None if emit is None else number)
            return found
        finally:
            self._streams.pop(number, None)
            if self._under_way.get(request_key) == number:
                del self._under_way[request_key]
                self._known.pop(request_key, None)

    def refusal(self, sampling: Sampling) -> str:
        """Return why the driver's engine lacks a requested feature, or "". An invalid grammar fails only when sampling starts."""
        return next((self._refused[name] for name in FEATURES if getattr(sampling, name)), "")

    def progress(self, request_key: str) -> int | None:
        if request_key not in self._under_way:
            return None
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll(), name="progress of turns")
        return self._known.get(request_key)

    async def abort(self, request_key: str) -> None:
        await self._channel.call("engine.abort", key=request_key)

    async def stats(self) -> EngineStats:
        """Return the statistics of the whole engine, not of this worker's requests."""
        found: EngineStats = await self._channel.call("engine.stats")
        return found

    async def close(self) -> None:
        """Fail this worker's requests; the driver's engine keeps running."""
        if self._polling is not None:
            self._polling.cancel()
        self._channel.fail(EngineError("the engine was closed"))

    def _part(self, fields: Fields) -> None:
        if (emit := self._streams.get(fields["stream"])) is not None:
            emit(fields["ids"], fields["logprobs"])

    async def _poll(self) -> None:
        # Ends with the last request, so that an idle engine is not polled; `progress` starts it again.
        while self._under_way:
            known = await self._channel.call("engine.progress", keys=list(self._under_way))
            self._known = {key: tokens for key, tokens in known.items() if key in self._under_way}
            await asyncio.sleep(PROGRESS_S)
