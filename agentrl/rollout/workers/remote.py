"""A worker as the driver sees it: its channel, the jobs that it plays, and whether it is still heard of."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from agentrl.rollout.clock import Report, Watch
from agentrl.rollout.player import Job
from agentrl.rollout.workers.channel import Channel, Fields
from agentrl.rollout.workers.seats import Seat
from agentrl.rollout.workers.spool import Rows
from agentrl.rollout.workers.traces import Inbox, asked
from agentrl.rollout.workers.wire import fault_of, job_fields, trajectories_of
from agentrl.trajectory import Trajectory

RECENT = 64
"""Episodes of which a worker's speed is the median."""


class GoneError(Exception):
    """The worker that played the episode is gone, and what it had of it."""


class Watches:
    """The watches of the driver's players, by number, as workers know them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._of: dict[int, Watch] = {}

    def number(self, watch: Watch) -> int:
        found = next((number for number, one in self._of.items() if one is watch), None)
        if found is None:
            found = next(self._numbers)
            self._of[found] = watch
        return found

    def get(self, number: int) -> Watch | None:
        return self._of.get(number)

    def all(self) -> list[Watch]:
        return list(self._of.values())

    def keep(self, used: set[int]) -> None:
        """Forget the watches of which no episode runs: evaluations have one of their own each."""
        self._of = {number: watch for number, watch in self._of.items() if number in used}


class RemoteWorker:
    """`ready` is set once it plays; `gone` says why it does no longer."""

    def __init__(self, name: str, number: int, seat: Seat, watches: Watches) -> None:
        self.name, self.number, self.seat = name, number, seat
        self.pid = 0
        self.gone: str | None = None
        self.unfit: Exception | None = None
        self.draining = False
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: dict[int, int] = {}
        self.silent_s = self.lag_s = self.blocked_s = 0.0
        self.episodes = self.turns = 0
        self.turn_s: deque[float] = deque(maxlen=RECENT)
        self.on_gone: Callable[[RemoteWorker], None] = lambda worker: None
        self.on_slow: Callable[[str], None] = lambda line: None
        self._watches, self._rows, self._inbox = watches, Rows(), Inbox(name)
        self._known: dict[int, int] = {}
        self._channel: Channel | None = None
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[tuple[Fields, memoryview]]] = {}

    @property
    def able(self) -> bool:
        """Whether it takes jobs."""
        return self.settled.done() and self.gone is None and not self.draining

    def connected(self, channel: Channel) -> None:
        """Its process has come."""
        self._channel = channel
        channel.on |= {"ready": self._ready, "unfit": self._unfit, "beat": self._beat, "slow": self._slow}
        channel.on["spans"] = lambda fields, _: self._inbox.arrived(fields)
        channel.on |= dict.fromkeys(("done", "failed", "cancelled"), self._answered)
        channel.on_lost = lambda: self.end("its process ended")

    def end(self, cause: str) -> None:
        """It plays no more, for that reason; idempotent. Its episodes are told."""
        if self.gone is not None:
            return
        self.gone = cause
        self._rows = Rows()  # it writes no more: the last part file goes with the rows in it
        self.seat.kill()
        if self._channel is not None:
            self._channel.abort()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(GoneError(cause))
        for watch in self._watches.all():
            watch.told(self.name, None)
        if not self.settled.done():
            self.settled.set_result(None)
        self.on_gone(self)

    def dismiss(self) -> None:
        """Ask it to end."""
        if self._channel is not None:
            self._channel.send("end")

    async def left(self) -> None:
        """Its connection is over."""
        if self._channel is not None:
            await self._channel.lost.wait()

    # -- jobs --------------------------------------------------------------------------------------

    async def play(self, job: Job, watch: Watch, keep: bool) -> list[Trajectory]:
        """The episode of a job, and its branches, played there. Raises GoneError if the worker is gone, and what playing raised
        there."""
        assert self._channel is not None
        number, watched = next(self._numbers), self._watches.number(watch)
        fields = job_fields(job)
        answer: asyncio.Future[tuple[Fields, memoryview]] = asyncio.get_running_loop().create_future()
        self._answers[number], self.running[number] = answer, watched
        self._known.setdefault(watched, watch.moves)
        self._channel.send("play", id=number, job=fields, watch=watched, look=watch.look, keep=keep, trace=asked())
        try:
            try:
                await asyncio.wait([answer])
            except asyncio.CancelledError:
                self._channel.send("cancel", id=number)
                # Until it is torn down there, as an episode in this process is before its cancellation propagates.
                await asyncio.wait([answer])
                raise
            head, blob = answer.result()
        finally:
            if answer.done() and not answer.cancelled():
                answer.exception()  # it has been seen, also by who was cancelled
            del self._answers[number], self.running[number]
        if head["kind"] == "done":
            return self._finished(head, blob)
        if head["kind"] == "cancelled":  # it was not asked to: it ends, and plays no more
            raise GoneError("the worker ended")
        raise fault_of(head, f"rollout {self.name}")

    def _finished(self, head: Fields, blob: memoryview) -> list[Trajectory]:
        found = trajectories_of(head, blob)
        for each, trajectory in zip(head["episodes"], found, strict=True):
            if "row" in each:
                trajectory.stored = self._rows.row(each["row"])
            turns = len(trajectory.turns) - trajectory.branch_turn
            self.episodes += 1
            self.turns += turns
            # Less the engine's time, which other workers' requests take too: what is left is what this process does.
            own = trajectory.timings.get("episode_s", 0.0) - trajectory.timings.get("engine_s", 0.0)
            self.turn_s.append(own / max(turns, 1))
        return found

    def _answered(self, fields: Fields, blob: memoryview) -> None:
        answer = self._answers.get(fields["id"])
        if answer is not None and not answer.done():
            answer.set_result((fields, blob))

    # -- reports -----------------------------------------------------------------------------------

    def _ready(self, fields: Fields, _: memoryview) -> None:
        self.pid = fields["pid"]
        if not self.settled.done():
            self.settled.set_result(None)

    def _unfit(self, fields: Fields, _: memoryview) -> None:
        self.unfit = fault_of(fields, f"rollout {self.name}")
        self.end(f"it could not be built: {fields['message']}")

    def _beat(self, fields: Fields, _: memoryview) -> None:
        self.silent_s, self.lag_s = 0.0, max(self.lag_s, fields["lag"])
        self.blocked_s += fields["blocked"]
        for told in fields["watches"]:
            self._heard(told)

    def _slow(self, fields: Fields, _: memoryview) -> None:
        self.on_slow(fields["line"])

    def _heard(self, told: dict[str, Any]) -> None:
        number = told["watch"]
        watch = self._watches.get(number)
        if watch is None:
            return
        fresh = told["moves"]
        elsewhere = watch.moves - self._known.get(number, watch.moves)
        watch.moves += fresh
        watch.cut += told["cut"]
        self._known[number] = watch.moves
        waits = [(key, what, seconds) for key, what, seconds in told["waits"]]
        watch.told(self.name, Report(waits, told["more"]))
        if elsewhere and self._channel is not None:
            self._channel.send("heard", watch=number, moves=elsewhere)

    def median_turn_s(self) -> float | None:
        """Seconds that a turn takes beside the engine's; None before there are a few episodes."""
        return statistics.median(self.turn_s) if len(self.turn_s) >= RECENT // 8 else None
