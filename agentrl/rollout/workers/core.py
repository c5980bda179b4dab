"""A worker: plays the driver's jobs in the event loop of the process that hosts it (an actor of its own, an engine's replica).

driver -> worker   play, cancel, heard (moves of the others), end
worker -> driver   ready or unfit, done or failed or cancelled for each job, beat, slow (a call that held up its loop)
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from agentrl.executors import in_thread
from agentrl.rollout.clock import Watch
from agentrl.rollout.player import Job, Player
from agentrl.rollout.workers.channel import Channel, Door, Fields, Handler, dial
from agentrl.rollout.workers.spool import Spool
from agentrl.rollout.workers.traces import Outbox
from agentrl.rollout.workers.wire import fault_fields, job_of, trajectories_frame
from agentrl.spans import TracePlace, at
from agentrl.watchdog import LoopWatchdog

log = logging.getLogger(__name__)

BEAT_S = 0.5
"""Seconds between two reports of a worker."""
MOST_WAITS = 8
"""The waits that a report names, the longest: as many as a message of the driver's shows."""
CLOSE_S = 30.0
"""Seconds that cancelled episodes have for their teardown when a worker ends."""


class Parts(Protocol):
    """What plays, with what it needs started and closed; `run.assembly.Assembly` is one."""

    @property
    def player(self) -> Player: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class WorkerCore:
    """Made in the process that hosts it; `run` is all that it is asked.

    `build(channel)` makes the parts in this process, in a thread. `spool`: the folder for rows of trajectory files that the
    driver asks to keep. `slow_loop`: as in the rollout section; the driver is told what a watchdog finds.
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
        """Connect, play what is asked, and return once the driver says so or is gone. What cannot be built is told to the
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
        """Make and start the parts. False if they cannot be, or nobody needs them any more: what is started may wait for an
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
        """Nothing that plays here can go on: the driver is told by the end of the connection, and plays all of it elsewhere."""
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
