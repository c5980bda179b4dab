"""Pool of rollout workers in the driver: assigns jobs, and handles dead, hung, slow, new and lost workers."""

from __future__ import annotations

import asyncio
import itertools
import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol
from weakref import WeakValueDictionary

from agentrl.data.trajectory import Trajectory
from agentrl.rollout.deadlines import Watch
from agentrl.rollout.engine import Engine, Need, RequestRouter
from agentrl.rollout.episode import score_episode
from agentrl.rollout.player import Job, Player, RunEnv
from agentrl.rollout.workers.channel import Channel, ChannelServer, DriverAddress, Fields, PeerClosedError, load_fault
from agentrl.rollout.workers.rollout_worker import SpanReceiver, serve_engine, span_fields
from agentrl.utils.errors import WorkerDiedError
from agentrl.utils.event_loop import OwnedTasks

# Sources of processes


class WorkerRecipe(Protocol):
    """Picklable recipe that builds a worker's parts in any process; `build` as in `WorkerCore`."""

    def build(self, channel: Channel) -> Awaitable[Any]: ...


class WorkerProcess(ABC):
    """Handle of one worker process. The process itself connects to the driver's address."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait until the process has ended. Returns why it ended."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process if it still runs; idempotent."""


class WorkerProcesses(ABC):
    """Source of worker processes.

    `renews`: the source replaces dead processes itself and calls `on_free` with the number of processes without a worker; the
    pool then replaces none. `caches`: each worker has its own prefix cache, so that the choice of the worker for an episode
    matters.
    """

    renews = False
    caches = False
    on_free: Callable[[int], None] = staticmethod(lambda free: None)

    def expects_more(self) -> bool:
        """Return True if a process without a worker may still appear."""
        return False

    @abstractmethod
    def host(self) -> str:
        """Return the driver's address as seen by the worker processes."""

    @abstractmethod
    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        """Start a process that runs `WorkerCore.run(endpoint)` under this name, without waiting for it."""


# The driver's view of a worker

RECENT = 64
"""Number of episodes over which a worker's median speed is computed."""


class RemoteWorker:
    """Driver's view of one worker. `settled` is done once it is ready or has ended; `end_cause`: why it ended, else None."""

    def __init__(self, name: str, number: int, process: WorkerProcess, watches: MutableMapping[int, Watch]) -> None:
        """`watches`: number -> watch of the driver's players, as referred to by workers, while in use."""
        self.name, self.number, self.process = name, number, process
        self.pid = 0
        self.end_cause: str | None = None
        self.build_error: Exception | None = None
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running = 0
        self.silent_s = self.lag_s = self.blocked_s = 0.0
        self.episodes = self.turns = 0
        self.turn_s: deque[float] = deque(maxlen=RECENT)
        self.on_end: Callable[[RemoteWorker], None] = lambda worker: None
        self.on_slow: Callable[[str], None] = lambda line: None
        self._watches, self._spans = watches, SpanReceiver(name)
        self._channel: Channel | None = None

    def attach(self, channel: Channel, engine: Engine) -> None:
        """Take over the connection of the worker's process and serve the driver's engine to it."""
        serve_engine(channel, engine, self.name)
        self._channel, channel.peer = channel, f"rollout {self.name}"
        channel.on |= {"ready": self._ready, "unfit": self._fail, "beat": self._take_report}
        channel.on |= {"spans": self._spans.notify, "slow": lambda fields: self.on_slow(fields["line"])}
        channel.on_lost = lambda: self.end("its process ended")

    def end(self, cause: str) -> None:
        """Kill the worker for the reason `cause` and fail its jobs with PeerClosedError; idempotent."""
        if self.end_cause is not None:
            return
        self.end_cause = cause
        self.process.kill()
        if self._channel is not None:
            self._channel.abort()
            self._channel.fail(PeerClosedError(cause))
        for watch in list(self._watches.values()):
            watch.remote.pop(self.name, None)
        if not self.settled.done():
            self.settled.set_result(None)
        self.on_end(self)

    async def leave(self) -> None:
        """Ask the worker to end, and wait until it has disconnected."""
        if self._channel is not None:
            self._channel.send("end")
            await self._channel.lost.wait()

    # -- jobs --------------------------------------------------------------------------------------

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        """Play a job on the worker and return its episodes. Raises PeerClosedError if the worker ended, or its own error."""
        assert self._channel is not None
        self._watches[watch.number] = watch
        self.running += 1
        try:
            # With `waits`: a cancellation propagates after the teardown on the worker, as for an episode in this process.
            found: list[Trajectory] = await self._channel.call(
                "play", waits=True, job=job, watch=watch.number, poll_s=watch.poll_s, trace=span_fields()
            )
        finally:
            self.running -= 1
        for trajectory in found:
            turns = len(trajectory.turns) - trajectory.branch_turn
            self.episodes += 1
            self.turns += turns
            # Without the engine's time, which depends on all workers' requests: the rest is this worker's own speed.
            own = trajectory.timings.get("episode_s", 0.0) - trajectory.timings.get("engine_s", 0.0)
            self.turn_s.append(own / max(turns, 1))
        return found

    # -- reports -----------------------------------------------------------------------------------

    def _ready(self, fields: Fields) -> None:
        self.pid = fields["pid"]
        if not self.settled.done():
            self.settled.set_result(None)

    def _fail(self, fields: Fields) -> None:
        self.build_error = load_fault(fields, f"rollout {self.name}")
        self.end(f"it could not be built: {fields['message']}")

    def _take_report(self, fields: Fields) -> None:
        self.silent_s, self.lag_s = 0.0, max(self.lag_s, fields["lag"])
        self.blocked_s += fields["blocked"]
        for report in fields["watches"]:
            if (watch := self._watches.get(report["watch"])) is not None:
                watch.moves += report["moves"]
                watch.cut += report["cut"]
                watch.remote[self.name] = report["waits"], report["more"], time.monotonic()


# The pool

log = logging.getLogger(__name__)

SLOW_FACTOR = 3.0
"""A worker is reported as slow if its turns take this many times the median of the other workers."""
SLOW_TURN_S = 0.005
"""Turns shorter than this many seconds are never reported as slow."""
LEAVE_S = 10.0
"""Seconds for a worker to end by itself."""
PROMPT_TOKENS, REMEMBERED_TASKS = 512, 256
"""Assumed prompt length in tokens before any is known; number of tasks per worker whose prompts are presumed cached."""


class WorkerPool(Player):
    """Plays each job on the least loaded rollout worker. If workers have their own caches, it prefers one that has the task's
    prompt cached, as far as loads allow (`RequestRouter`).

    `count`: number of workers at the start. `timeout`: seconds without a report after which a worker counts as dead;
    `startup_timeout`: seconds for its start. `respawns`: total number of dead workers to replace (ignored by sources that renew
    processes); after that the run continues with fewer, and with none left `play` raises WorkerDiedError. `engine`: the driver's
    engine, for workers that reach it through their channels. `say`: shows a message to the user.
    """

    def __init__(
        self,
        envs: Iterable[RunEnv],
        processes: WorkerProcesses,
        *,
        count: int,
        engine: Engine,
        timeout: float,
        startup_timeout: float,
        respawns: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._envs = {env.name: env for env in envs}
        self._processes, self._engine = processes, engine
        self._count, self._timeout, self._startup, self._respawns = count, timeout, startup_timeout, respawns
        self._say = say
        self._server = ChannelServer()
        self._watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()
        self._numbers = itertools.count()
        self._workers: list[RemoteWorker] = []
        self._starting, self._tasks = OwnedTasks(), OwnedTasks()
        self._changed = asyncio.Event()
        self._closing = False
        self._deaths: list[str] = []
        self._named: set[str] = set()
        self._router: RequestRouter[RemoteWorker] = RequestRouter(REMEMBERED_TASKS)
        self._prompt_tokens = PROMPT_TOKENS
        self.respawned = self.returned = 0

    # -- workers -----------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._server.open(self._processes.host())
        self._processes.on_free = self._use_processes
        self._tasks.start(self._watch_silence(), "rollout workers' reports")
        fresh = [self._begin(next(self._numbers)) for _ in range(self._count)]
        await asyncio.gather(*(self._wait_until_ready(worker) for worker in fresh))

    async def close(self) -> None:
        self._closing = True
        await self._starting.close()
        await self._tasks.close()
        workers, self._workers = self._workers, []
        async with OwnedTasks() as tasks:
            live = [worker for worker in workers if worker.end_cause is None]
            leaving = [tasks.start(worker.leave(), f"rollout {worker.name} leaves") for worker in live]
            if leaving:
                await asyncio.wait(leaving, timeout=LEAVE_S)
        for worker in workers:
            worker.end("it was dismissed")
        # Waiting for an end is a pending call to a Ray actor, and none may be pending when Ray is stopped.
        ends = [self._tasks.start(worker.process.wait(), f"end of rollout {worker.name}") for worker in workers]
        if ends:
            await asyncio.wait(ends, timeout=LEAVE_S)
        await self._tasks.close()
        self._server.close()

    @property
    def workers(self) -> list[RemoteWorker]:
        """Workers that are running or starting."""
        return [worker for worker in self._workers if worker.end_cause is None]

    def _begin(self, number: int) -> RemoteWorker:
        # One name per process, not per worker number: late frames of a dead process must not count for its successor.
        name = f"worker {number}" if all(one.number != number for one in self._workers) else f"worker {number}+{self.respawned}"
        assert self._server.endpoint is not None
        self._server.expected[name] = lambda channel: worker.attach(channel, self._engine)
        worker = RemoteWorker(name, number, self._processes.begin(name, self._server.endpoint), self._watches)
        worker.on_end, worker.on_slow = self._handle_end, self._warn
        self._workers = [one for one in self._workers if one.number != number] + [worker]
        self._workers.sort(key=lambda one: one.number)
        return worker

    async def _wait_until_ready(self, worker: RemoteWorker) -> None:
        """Wait until a worker is ready. Raises the error that prevented it."""
        try:
            async with OwnedTasks() as tasks:
                ended = tasks.start(worker.process.wait(), f"process of rollout {worker.name}")
                both: set[asyncio.Future[Any]] = {ended, worker.settled}
                await asyncio.wait(both, timeout=self._startup, return_when=asyncio.FIRST_COMPLETED)
                if not worker.settled.done():
                    late = f"it did not start within {self._startup:g} s (cluster.startup_timeout)"
                    worker.end(ended.result() if ended.done() else late)
        finally:
            self._server.expected.pop(worker.name, None)
        if worker.build_error is not None:
            raise worker.build_error
        if worker.end_cause is not None:
            raise WorkerDiedError(f"rollout {worker.name}: {worker.end_cause}")

    def _handle_end(self, worker: RemoteWorker) -> None:
        self._router.leave(worker)
        self._wake()
        if self._closing:  # a regular end
            return
        line = f"rollout {worker.name} (pid {worker.pid or 'unknown'}) is gone: {worker.end_cause}"
        self._deaths.append(line)
        if not worker.pid:  # it was never ready: `_wait_until_ready` raises the error
            return
        line += f"; its {worker.running} episodes are played again elsewhere"
        if self._processes.renews:
            line += "; its replica is restarted if possible"
        elif self.respawned < self._respawns:
            self.respawned += 1
            line += f", and it is started again ({self.respawned} of {self._respawns})"
            self._watch_start(self._begin(worker.number))
        else:
            line += f"; {len(self.workers)} of {self._count} workers are left, and no more are started (after {self._respawns})"
        self._warn(line)

    def _warn(self, line: str) -> None:
        log.warning(line)
        self._say(f"warning: {line}")

    def _use_processes(self, free: int) -> None:
        """Start workers on `free` new processes, in place of dead workers first. Also wakes jobs that wait for a worker."""
        for _ in range(0 if self._closing else free):
            dead = next((worker.number for worker in self._workers if worker.end_cause is not None), None)
            self.respawned += dead is not None
            self._watch_start(self._begin(next(self._numbers) if dead is None else dead))
        self._wake()

    def _watch_start(self, fresh: RemoteWorker) -> None:
        """Wait in the background until a new worker is ready."""
        self._starting.start(self._await_start(fresh), f"start rollout {fresh.name}").add_done_callback(lambda _: self._wake())

    async def _await_start(self, fresh: RemoteWorker) -> None:
        try:
            await self._wait_until_ready(fresh)
        except asyncio.CancelledError:
            fresh.end("the pool was closed")
            raise
        except Exception as problem:  # of any kind: the run continues with the other workers
            self._warn(f"rollout {fresh.name} could not be started: {problem}; {len(self.workers)} of {self._count} are left")

    def _wake(self) -> None:
        """Wake the jobs that wait for a worker."""
        self._changed.set()
        self._changed.clear()

    async def _watch_silence(self) -> None:
        """End each worker that sent nothing for `timeout` seconds, not counting time in which this event loop was blocked."""
        every = min(self._timeout / 8, 1.0)
        last = time.monotonic()
        while True:
            await asyncio.sleep(every)
            now = time.monotonic()
            # Capped: while this loop is blocked, reports are unread, and their workers are not silent.
            passed, last = min(now - last, 2 * every), now
            for worker in self.workers:
                if not worker.pid:
                    continue
                worker.silent_s += passed
                if worker.silent_s > self._timeout:
                    worker.end(f"nothing was heard of it for {self._timeout:g} s")

    # -- jobs --------------------------------------------------------------------------------------

    async def play(self, job: Job, watch: Watch) -> list[Trajectory]:
        key, task = job.spec.key, (job.env, job.spec.split, job.spec.task_seed)
        most = self._envs[job.env].limits.max_episode_tokens
        while True:
            while not (ready := [worker for worker in self.workers if worker.settled.done()]):
                starting = any(not worker.settled.done() for worker in self.workers)
                if self._closing or not (self._starting or starting or self._processes.expects_more()):
                    raise WorkerDiedError("no rollout worker is left: " + ("; ".join(self._deaths) or "the pool is closed"))
                with watch.waits(key, lambda: "a rollout worker; none is up"):
                    await self._changed.wait()
            need = Need(key, 0, 1.0, lambda: ())  # workers with a shared cache: each episode is a load of one
            if self._processes.caches:  # estimated from earlier episodes: prompt length, and tokens sampled after it
                need = Need(key, self._prompt_tokens, self._router.forecast(most), lambda: [task], self._prompt_tokens)
            placed = self._router.begin(need, ready)
            worker, found = placed.host, list[Trajectory]()
            try:
                found = await worker.play(job, watch)
                break
            except PeerClosedError:
                self.returned += 1
                log.warning("episode %s was on rollout %s: it is played again elsewhere", key, worker.name)
            finally:
                self._router.end(placed, sum(map(self._count_computed, found)) if found else None)
                self._router.over(key)
                self._wake()
        watch.moves += 1
        scorer = self._envs[job.env].scorer
        if scorer.asks:
            keys = {spec.seed: spec.key for spec in job.specs()}
            with watch.count_cut(lambda: found):
                await asyncio.gather(*(score_episode(each, scorer, keys[each.seed], watch) for each in found))
        return found

    def _count_computed(self, trajectory: Trajectory) -> int:
        """Count an episode's tokens after its first prompt, and update the running mean of prompt lengths."""
        if trajectory.parent is not None:
            return sum(int((ledger.turns >= trajectory.branch_turn).sum()) for ledger in trajectory.ledgers)
        if not trajectory.turns:
            return 0
        first = trajectory.turns[0].prompt_tokens
        self._prompt_tokens += round((first - self._prompt_tokens) / 8)
        return max(sum(len(ledger) for ledger in trajectory.ledgers) - first, 0)

    # -- numbers -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return metrics of the workers, since the last call unless stated otherwise.

        `rollout/workers`: running now; `rollout/respawns` and `rollout/returned`: workers replaced and jobs replayed since the
        start. Of each worker i: `rollout/worker_i/episodes` and `turns`; `turn_ms`: median time per turn outside of the engine;
        `lag_ms`: longest delay of its event loop; `blocked_s`: seconds that its event loop was blocked by slow calls."""
        found = {
            "rollout/workers": float(len(self.workers)),
            "rollout/respawns": float(self.respawned),
            "rollout/returned": float(self.returned),
        }
        times: dict[RemoteWorker, float] = {}
        for worker in self.workers:
            begin = f"rollout/worker_{worker.number}"
            found |= {f"{begin}/episodes": float(worker.episodes), f"{begin}/turns": float(worker.turns)}
            found |= {f"{begin}/lag_ms": 1000 * worker.lag_s, f"{begin}/blocked_s": worker.blocked_s}
            if len(worker.turn_s) >= RECENT // 8:
                times[worker] = statistics.median(worker.turn_s)
                found[f"{begin}/turn_ms"] = 1000 * times[worker]
            worker.episodes = worker.turns = 0
            worker.lag_s = worker.blocked_s = 0.0
        if len(times) < 2:
            return found
        # Warn once about each worker that has become slow.
        slow = set()
        for worker, turn in times.items():
            usual = statistics.median(other for one, other in times.items() if one is not worker)
            if turn < SLOW_TURN_S or turn < SLOW_FACTOR * usual:
                continue
            slow.add(worker.name)
            if worker.name not in self._named:
                speed = f"{1000 * turn:.0f} ms per turn, others {1000 * usual:.0f}"
                self._warn(f"rollout {worker.name} (pid {worker.pid}) is slow: {speed}")
        self._named = slow
        return found
