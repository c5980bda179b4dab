"""vLLM replicas: start, failures, respawns, and rollout workers inside of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.config.schema import VllmConfig
from agentrl.engines.vllm.options import Scratch, environment
from agentrl.engines.vllm.replica_actor import GROUP, PROCESS, STAGE_POLL_S, VllmActor
from agentrl.engines.vllm.replica_calls import ReplicaDeadError, Request, RequestBatcher, TokenCounts
from agentrl.rollout.engine import EngineStats, Generation, Need, OnTokens, Placed, RequestRouter, block_names
from agentrl.rollout.workers.channel import DriverAddress
from agentrl.rollout.workers.worker_pool import WorkerProcess, WorkerProcesses, WorkerRecipe
from agentrl.utils.errors import EngineError
from agentrl.utils.event_loop import OwnedTasks, run_contained

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.5
"""Seconds between two polls of the replicas."""
_DROP_CACHES = frozenset({"pause", "adapt"})


@dataclass(eq=False, slots=True)
class Replica:
    """One replica. `cause`: why it is dead, None while alive. `stage`: stage of its start, "" once started. `current`: whether it
    has the engine's weights; if not, it waits for the next publish. `seen`: last counters that it reported."""

    number: int
    actor: Any
    request_batcher: RequestBatcher
    pid: int = 0
    cause: str | None = None
    stage: str = ""
    current: bool = True
    seen: EngineStats = field(default_factory=EngineStats)

    @property
    def name(self) -> str:
        return f"vLLM replica {self.number} (pid {self.pid or 'unknown'})"


class Replicas:
    """Starts `cfg.replicas` replicas, routes each episode to its prefix cache, and replaces replicas that die."""

    def __init__(
        self,
        options: dict[str, Any],
        cfg: VllmConfig,
        *,
        cuda: bool,
        threads: int = 1,
        catch_up: Callable[[Replica], Awaitable[None]],
        ray_options: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """`options`: vLLM's arguments; `cuda`: run on GPUs; `threads`: per process on a CPU. `catch_up` gives a new replica the
        current weights and then calls `join`. `ray_options`: Ray options per replica, if a pool places them."""
        self._options, self._cfg = options, cfg
        self._cuda, self._threads, self.respawns = cuda, threads, 0
        self._catch_up, self._ray_options = catch_up, ray_options
        self.every: list[Replica] = []
        self._started = False
        self._scratch = Scratch()
        self.starting, self._asking = OwnedTasks(), OwnedTasks()
        self.router: RequestRouter[Replica] = RequestRouter()
        self._requests: dict[str, Placed[Replica]] = {}
        self._polls, self._counts = OwnedTasks(), TokenCounts()
        self.past: list[Replica] = []
        self.changed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Start all replicas. Raises EngineError if one fails; the others are then stopped too."""
        self.every = [self._spawn(number) for number in range(self._cfg.replicas)]
        starting = [self.starting.start(self._boot(replica), f"start {replica.name}") for replica in self.every]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            await self.close()
            raise
        self._started = True

    async def close(self) -> None:
        """End every process, also those that are starting; idempotent."""
        self._started = False
        await self._polls.close()
        # First the starting ones: a replica that joins after the list below was made would be left running.
        await self.starting.close()
        replicas, self.every = self.every, []
        for replica in (*self.past, *replicas):
            await replica.request_batcher.close()
        for replica in replicas:
            if replica.cause is None and ray.is_initialized():
                with contextlib.suppress(EngineError, TimeoutError):  # it is killed next in any case
                    await asyncio.wait_for(self.ask(replica, "close"), 30)
            _kill(replica)
        await self._asking.close()
        self._scratch.close()
        self.router = RequestRouter()

    def alive(self) -> list[Replica]:
        return [replica for replica in self.every if replica.cause is None]

    async def route(self, request: Request) -> Replica:
        """Choose a replica for a request and add the request to its load until `end_request`. Waits for a replica with the
        current weights. Raises EngineError if no replica is alive or starting."""
        while not (usable := [one for one in self.alive() if one.current]):
            self._require_replica()
            await self.changed.wait()
        token_ids, sampling, key, request_id = request
        expected = self.router.forecast(sampling.max_tokens)
        placed = self.router.begin(Need(key, len(token_ids), expected, partial(block_names, token_ids)), usable)
        self._requests[request_id] = placed
        return placed.host

    def end_request(self, request_id: str, answer: Generation | None) -> None:
        """Remove a request from its replica's load; idempotent. `answer`: None if it failed."""
        if (placed := self._requests.pop(request_id, None)) is not None:
            self.router.end(placed, None if answer is None else len(answer.token_ids))

    def note_weights(self) -> None:
        """Record that every live replica has the engine's weights."""
        for replica in self.alive():
            replica.current = True
        self._wake()

    def _wake(self) -> None:
        """Wake the requests that wait for a replica."""
        self.changed.set()
        self.changed.clear()
        self.on_change()

    async def all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every live replica and return the answers of those that survive. Raises EngineError if a call fails,
        or if no replica is alive or starting."""
        replicas = self.alive()
        if method in _DROP_CACHES:
            self.router.forget()
        calls = [self.control(replica, method, *args) for replica in replicas]
        # Collect all answers before raising: otherwise calls would still be running, with the engine partly paused or updated.
        # A replica that dies here needs no care: its successor catches up.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaDeadError):
                raise answer
        self._require_replica()
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def ask(self, replica: Replica, method: str, *args: Any) -> Any:
        """Await a remote call. Raises EngineError, naming the replica, if it fails; ReplicaDeadError if the replica is dead."""
        with self._failures(replica):
            name = f"{method} of {replica.name}"
            return await run_contained(self._asking.start(_answer(getattr(replica.actor, method), args), name), name, EngineError)

    async def generate(self, replica: Replica, request: Request, emit: OnTokens | None = None) -> Generation:
        """Sample a turn on a replica; concurrent requests share one call. `emit` receives tokens as they are sampled."""
        with self._failures(replica):
            return await replica.request_batcher.generate(request, emit)

    @contextlib.contextmanager
    def _failures(self, replica: Replica) -> Iterator[None]:
        try:
            yield
        except (EngineError, RayError) as problem:
            cause = problem.cause if isinstance(problem, RayTaskError) else problem
            if isinstance(cause, RayActorError | ReplicaDeadError):
                raise self.record_death(replica, str(cause)) from problem
            raise EngineError(f"{replica.name}: {cause}") from problem

    async def control(self, replica: Replica, method: str, *args: Any) -> Any:
        """Like `ask`, with a deadline of `call_timeout`: a replica that hangs is killed, so that its requests move on."""
        try:
            async with asyncio.timeout(self._cfg.call_timeout):
                return await self.ask(replica, method, *args)
        except TimeoutError:
            raise self.record_death(replica, f"no answer to {method} within {self._cfg.call_timeout:g} s") from None

    def progress(self, request_id: str) -> int:
        """Return the number of tokens sampled by a request, up to POLL_S old; the first call starts the polling."""
        if not self._polls:
            self._polls.start(self._poll(), "progress of vLLM requests")
        return self._counts.get(request_id, 0)

    async def _poll(self) -> None:
        # Ends with the last request, so that an idle engine is not polled.
        while self._requests:
            asked = [self.control(replica, "progress") for replica in self.alive()]
            counts = TokenCounts()
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                counts |= {} if isinstance(answer, BaseException) else answer
            # Replaced, not merged, so that requests of a dead replica do not seem to continue. Only after all answers: a count
            # that vanished in between would look like new tokens when it returns.
            self._counts = counts
            for request_id, tokens in counts.items():
                if (placed := self._requests.get(request_id)) is not None:
                    self.router.note_sampled(placed, tokens)
            await asyncio.sleep(POLL_S)

    def _require_replica(self) -> None:
        if not self.alive() and not self.starting:
            deaths = "; ".join(replica.cause or "" for replica in self.every) or "the engine is closed"
            raise EngineError(f"no replica of the vLLM engine is alive: {deaths}")

    def expects_more(self) -> bool:
        """Return True if a replica is starting or waits for weights."""
        return self._started and (bool(self.starting) or any(not replica.current for replica in self.alive()))

    def join(self, replica: Replica) -> None:
        """Put a started replica in its predecessor's place."""
        place = next(at for at, one in enumerate(self.every) if one.number == replica.number)
        self.past.append(self.every[place])
        self.every[place] = replica
        self._wake()
        does = "takes requests" if replica.current else "waits for a publish"
        log.warning("%s has replaced the dead one and %s", replica.name, does)

    def _spawn(self, number: int) -> Replica:
        anywhere = {"num_cpus": 0, "num_gpus": self._cfg.tensor_parallel if self._cuda else 0}
        options = {**(self._ray_options[number] if self._ray_options else anywhere)}
        given = options.pop("runtime_env", {}).get("env_vars", {})
        # An async actor runs at most `max_concurrency` calls, and control calls must get through next to all requests.
        variables = {"env_vars": {**environment(self._cuda, self._threads), **self._scratch.environment(), **given}}
        remote = ray.remote(concurrency_groups={GROUP: 1})(VllmActor)
        handle = remote.options(max_concurrency=4096, runtime_env=variables, **options).remote(self._options)
        return Replica(number, handle, RequestBatcher(handle))

    async def _boot(self, replica: Replica) -> None:
        replica.stage = PROCESS
        try:
            async with asyncio.timeout(self._cfg.startup_timeout), OwnedTasks() as tasks:
                tasks.start(self._watch_start(replica), f"stages of {replica.name}")
                replica.pid = await self.ask(replica, "start")
        except TimeoutError:
            limit = f"{self._cfg.startup_timeout:g} s (vllm.startup_timeout; it waited for: {replica.stage})"
            raise EngineError(f"vLLM did not start within {limit}") from None
        replica.stage = ""

    async def _watch_start(self, replica: Replica) -> None:
        stage = replica.actor.stage.options(concurrency_group=GROUP)
        with contextlib.suppress(RayError):  # of a dead replica, which `start` reports
            while True:
                replica.stage = await stage.remote()
                await asyncio.sleep(STAGE_POLL_S)

    def record_death(self, replica: Replica, cause: str) -> ReplicaDeadError:
        """Record a death once, however many requests report it, and start a new replica if that is still allowed."""
        if replica.cause is None:
            reason = " ".join(cause.split())  # Ray writes a paragraph
            replica.cause = f"{replica.name} died: {reason[:400]}"
            _kill(replica)  # the process may outlive the engine inside it
            self.router.leave(replica)
            # Without Ray the whole run is ending.
            if self._started and self.respawns < self._cfg.max_respawns and ray.is_initialized():
                self.respawns += 1
                moved = sum(placed.host is replica for placed in self._requests.values())
                log.warning("%s; its %d requests move on, and it is started again (%d of max_respawns = %d)",
                            replica.cause, moved, self.respawns, self._cfg.max_respawns)  # fmt: skip
                fresh = self._spawn(replica.number)
                self.starting.start(self._replace(fresh), f"start {fresh.name}").add_done_callback(lambda _: self._wake())
            elif self._started:
                log.error("%s; %d of %d replicas are alive and no more are started (max_respawns = %d)", replica.cause,
                          len(self.alive()), self._cfg.replicas, self._cfg.max_respawns)  # fmt: skip
            self._wake()
        return ReplicaDeadError(replica.cause)

    async def _replace(self, fresh: Replica) -> None:
        """Start a replica and give it the weights; if that fails, it has died too."""
        try:
            await self._boot(fresh)
            await self._catch_up(fresh)
        except EngineError as problem:
            self.record_death(fresh, str(problem))
        except asyncio.CancelledError:
            _kill(fresh)
            raise


async def _answer(method: Any, args: tuple[Any, ...]) -> Any:
    return await method.remote(*args)


def _kill(replica: Replica) -> None:
    if ray.is_initialized():  # otherwise its processes have ended with it
        ray.kill(replica.actor)


# Rollout workers in replicas

PATIENCE = 10.0
"""Seconds for a worker to end after its connection is closed; then its replica is killed."""
MAX_ENDS = 3
"""A live replica gets no more workers after this many have ended unasked."""


class WorkerInReplica(WorkerProcess):
    """Rollout worker inside of a replica. `replica`: None if no replica was free."""

    def __init__(self, replicas: Replicas, replica: Replica | None, name: str, *args: Any) -> None:
        """`args`: arguments of `VllmActor.play` after the name."""
        self._replicas, self.replica = replicas, replica
        self._killing: asyncio.Task[None] | None = None
        self.dismissed = False
        self.playing = asyncio.create_task(self._play(name, *args), name=f"rollout {name}")

    async def _play(self, *args: Any) -> str:
        if self.replica is None:
            return "no replica of the vLLM engine is free"
        try:
            self.dismissed = await self._replicas.ask(self.replica, "play", *args)
            return "its worker ended"
        except EngineError as problem:  # `ask` has recorded a death, and another replica may be starting
            return str(problem)

    @property
    def busy(self) -> bool:
        return not self.playing.done()

    async def wait(self) -> str:
        return await asyncio.shield(self.playing)

    def kill(self) -> None:
        """Wait for the worker to end, since its connection is closed; if it hangs, kill its replica."""
        if self.busy and self._killing is None:
            self._killing = asyncio.create_task(self._end(), name="end of a worker in a replica")

    async def _end(self) -> None:
        await asyncio.wait([self.playing], timeout=PATIENCE)
        if self.busy and self.replica is not None:
            self._replicas.record_death(self.replica, f"its rollout worker did not end within {PATIENCE:g} s")


class WorkersInReplicas(WorkerProcesses):
    """Places rollout workers in replicas. `recipe` is called once, for the first worker, when the engine has started."""

    renews = True
    caches = True

    def __init__(self, replicas: Replicas, recipe: Callable[[], WorkerRecipe], host: Callable[[], str]) -> None:
        self._replicas, self._make, self._host = replicas, recipe, host
        self._recipe: Any = None
        self._workers: list[WorkerInReplica] = []
        self._vacated: set[Replica] = set()
        self._endings: Counter[Replica] = Counter()
        replicas.on_change = self._report_free

    def host(self) -> str:
        return self._host()

    def begin(self, name: str, endpoint: DriverAddress) -> WorkerProcess:
        if self._recipe is None:
            self._recipe = ray.put(self._make())
        replica = next(iter(self._free()), None)
        if replica is not None:
            self._vacated.discard(replica)
        worker = WorkerInReplica(self._replicas, replica, name, endpoint, self._recipe)
        self._workers = [one for one in self._workers if one.busy] + [worker]
        worker.playing.add_done_callback(lambda task: None if task.cancelled() else self._leave(worker))
        return worker

    def _leave(self, worker: WorkerInReplica) -> None:
        replica = worker.replica
        if replica is not None and replica.cause is None:  # else its successor gets a new worker
            self._endings[replica] += 1
            if worker.dismissed or self._endings[replica] == MAX_ENDS:
                self._vacated.add(replica)
            if not worker.dismissed:
                log.error(
                    "a rollout worker in %s ended by itself (time %d of %d)", replica.name, self._endings[replica], MAX_ENDS
                )
        self._report_free()

    def expects_more(self) -> bool:
        # A worker's end is noticed before its replica's; `on_free` reports what follows from the latter.
        return any(worker.busy for worker in self._workers) or self._replicas.expects_more()

    def _free(self) -> list[Replica]:
        taken = {worker.replica for worker in self._workers if worker.busy}
        return [replica for replica in self._replicas.alive() if replica.current and replica not in taken]

    def _report_free(self) -> None:
        if self._recipe is not None:  # else the pool has not started
            self.on_free(sum(replica not in self._vacated for replica in self._free()))
