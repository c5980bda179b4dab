"""A rollout worker: plays the driver's jobs in the event loop of its process.

Its spans, the worker itself, and the engine in the driver that it uses."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling, Told
from agentrl.rollout.player import Job, Player
from agentrl.rollout.workers.channel import Channel, Door, Fields, Handler, dial, fault_fields, fault_of
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import LoopWatchdog
from agentrl.utils.spans import TracePlace, TraceSpan, add_listener, at, from_json, here, listens_to_all, machine, now, to_json
from agentrl.utils.spans import receive_span as told
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

    `build(channel)` makes the parts in this process, in a thread. `slow_loop`: as in the rollout section; the driver gets the
    finds of a watchdog.
    """

    def __init__(self, name: str, build: Callable[[Channel], Awaitable[Parts]], slow_loop: float = 0.0) -> None:
        self.name, self._build = name, build
        self._channel, self._outbox = Channel(), Outbox()
        self._parts: Parts | None = None
        self._watchdog = LoopWatchdog(
            slow_loop, lambda line: self._channel.send("slow", line=line), f"the event loop of rollout {name}"
        )
        self._over = asyncio.Event()
        self.dismissed = False
        """Whether the driver said that it is enough."""
        self._playing: dict[int, asyncio.Task[Fields]] = {}
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
        self._outbox.close()
        self._channel.close()

    def abandon(self) -> None:
        """Nothing that plays here can go on: the driver sees the end of the connection, and plays all of it elsewhere."""
        self._channel.abort()

    def _end(self, fields: Fields) -> None:
        self.dismissed = True
        self._over.set()

    # -- episodes ----------------------------------------------------------------------------------

    def _play(self, fields: Fields) -> None:
        number, watched = fields["id"], fields["watch"]
        try:
            job: Job = pickle.loads(fields["job"])
        except Exception as problem:  # of any kind: a driver that is not told waits forever
            self._channel.send("ended", id=number, fault=fault_fields(problem))
            return
        if watched not in self._watches:
            self._watches[watched], self._reported[watched] = Watch(fields["look"]), 0
        self._watching[watched] += 1
        work = self._job(job, watched, self._outbox.place(fields.get("trace")))
        self._playing[number] = task = asyncio.create_task(work, name=f"episode {job.spec.key}")
        # Not at the end of the work, which never begins if it is cancelled in the moment in which it is asked for.
        task.add_done_callback(partial(self._answer, number, watched))

    def _cancel(self, fields: Fields) -> None:
        task = self._playing.get(fields["id"])
        if task is not None:  # else it has just ended, and the answer is under way
            task.cancel()

    async def _job(self, job: Job, watched: int, place: TracePlace | None) -> Fields:
        assert self._parts is not None
        try:
            player, watch = self._parts.player, self._watches[watched]
            with at(place):
                found = await player.play_all(job, watch)
            return {"episodes": pickle.dumps(found)}
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # of any kind: a driver that is not told waits forever
            return {"fault": fault_fields(problem)}

    def _answer(self, number: int, watched: int, task: asyncio.Task[Fields]) -> None:
        """An episode has ended: with its trajectories, by a fault, or cancelled, which is answered by neither."""
        self._send_spans()
        self._channel.send("ended", id=number, **({} if task.cancelled() else task.result()))
        del self._playing[number]
        self._watching[watched] -= 1

    def _send_spans(self) -> None:
        if (found := self._outbox.frame()) is not None:
            self._channel.send("spans", **found)

    # -- reports -----------------------------------------------------------------------------------

    def _heard(self, fields: Fields) -> None:
        """Something moved elsewhere: for who waits here, the rollout is not stuck."""
        number, moves = fields["watch"], fields["moves"]
        if number in self._watches:
            self._watches[number].moves += moves
            self._reported[number] += moves

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

        async def refusals() -> dict[str, str]:
            # In a thread: an engine that knows the text of its tokens reads a tokenizer at the first question.
            asked = {name: Sampling(1, **more) for name, more in ASKED.items()}
            return {name: await in_thread("load", engine.refusal, one) for name, one in asked.items()}

        channel.on |= {
            "engine.ask": self._ask,
            "engine.drop": self._drop,
            "engine.abort": lambda fields: self._serve(fields["id"], lambda: engine.abort(self._key(fields["key"]))),
            "engine.stats": lambda fields: self._serve(fields["id"], engine.stats),
            "engine.can": lambda fields: self._serve(fields["id"], refusals),
            "engine.look": self._look,
        }

    def close(self) -> None:
        """Cancel what the worker asked for, which frees it at the engine."""
        for task in list(self._tasks.values()):
            task.cancel()

    def _key(self, key: str) -> str:
        return f"{key}@{self._owner}"

    def _ask(self, fields: Fields) -> None:
        number, key = fields["id"], self._key(fields["key"])

        def tell(ids: Sequence[int], logprobs: Sequence[float]) -> None:
            self._channel.send("engine.part", id=number, ids=list(ids), logprobs=list(logprobs))

        def turn() -> Awaitable[Generation]:
            if fields["streams"]:
                return self._engine.stream(fields["token_ids"], fields["sampling"], key, tell)
            return self._engine.generate(fields["token_ids"], fields["sampling"], key)

        self._keys[number] = fields["key"]
        self._serve(number, turn)

    def _serve(self, number: int, work: Callable[[], Awaitable[Any]]) -> None:
        async def serve() -> None:
            try:
                self._channel.send("engine.answer", id=number, result=await work())
            except Exception as problem:  # of any kind: a worker that is not told waits forever
                self._channel.send("engine.fault", id=number, fault=fault_fields(problem))
            finally:
                self._tasks.pop(number, None)
                self._keys.pop(number, None)

        self._tasks[number] = asyncio.create_task(serve(), name="a worker's call of the engine")

    def _drop(self, fields: Fields) -> None:
        task = self._tasks.get(fields["id"])
        if task is not None:
            task.cancel()

    def _look(self, fields: Fields) -> None:
        told = {key: self._engine.progress(self._key(key)) for key in set(self._keys.values())}
        self._channel.send("engine.progress", known={key: tokens for key, tokens in told.items() if tokens is not None})


class DriverEngine(Engine):
    """The worker's side: the driver's engine, with requests of this worker alone."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
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
        self._refused = await self._call_driver(next(self._numbers), "engine.can")

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        return await self.stream(token_ids, sampling, request_key, None)

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, told: Told | None) -> Generation:
        number = self._under_way[request_key] = next(self._numbers)
        if told is not None:
            self._told_of[number] = told
        asked: Fields = {"key": request_key, "token_ids": token_ids, "sampling": sampling, "streams": told is not None}
        try:
            found: Generation = await self._call_driver(number, "engine.ask", **asked)
            return found
        except asyncio.CancelledError:
            self._channel.send("engine.drop", id=number)
            raise
        finally:
            self._told_of.pop(number, None)
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
        await self._call_driver(next(self._numbers), "engine.abort", key=request_key)

    async def stats(self) -> EngineStats:
        """Of the whole engine, not of this worker's requests."""
        found: EngineStats = await self._call_driver(next(self._numbers), "engine.stats")
        return found

    async def close(self) -> None:
        """The driver's engine goes on."""
        if self._looking is not None:
            self._looking.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(EngineError("the engine was closed"))

    async def _call_driver(self, number: int, kind: str, **fields: Any) -> Any:
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(kind, id=number, **fields)
            return await answer
        finally:
            del self._waiting[number]

    def _take_answer(self, fields: Fields) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_result(fields["result"])

    def _take_failure(self, fields: Fields) -> None:
        answer = self._waiting.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_exception(fault_of(fields["fault"], "the engine, in the driver"))

    def _part(self, fields: Fields) -> None:
        told = self._told_of.get(fields["id"])
        if told is not None:
            told(fields["ids"], fields["logprobs"])

    def _progress(self, fields: Fields) -> None:
        self._known = {key: tokens for key, tokens in fields["known"].items() if key in self._under_way}

    async def _look(self) -> None:
        # Ends with the last request, so that an idle engine is not asked; `progress` begins again.
        while self._under_way:
            self._channel.send("engine.look")
            await asyncio.sleep(LOOK_S)
