"""The SGLang engine: a client of servers that are already running, through their native token-in, token-out API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from agentrl.backends.parameters import Arrivals, Expected, expected_parameters
from agentrl.backends.sglang.files import check_names, weight_files
from agentrl.backends.sglang.http import ServerDeadError
from agentrl.backends.sglang.probe import prove_temperature
from agentrl.backends.sglang.servers import Server, Servers
from agentrl.backends.sglang.turn import BOTH, PARTS, WHOLE, TurnRequests
from agentrl.backends.sglang.updates import FileUpdate, HttpUpdate, Update
from agentrl.backends.sglang.versions import Versions
from agentrl.config.schema import SglangConfig
from agentrl.deadline import OwnedTasks
from agentrl.errors import EngineError, PromptTooLongError
from agentrl.executors import in_thread
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.weights.bucket import Bucket
from agentrl.weights.route import Offer, Receiver
from agentrl.weights.routes import open_receiver
from agentrl.weights.target import Adapter, WeightTarget

RETRIES = 3
"""Times that a turn is sampled again, besides once for each server, since its connection broke."""


class SglangEngine(Engine, WeightTarget):
    """Routes each episode to one server, so that its turns find their prefix cache there.

    If a server dies, its episodes go on at another one. Nobody here starts it again: at each publish it is asked whether it is
    back, and takes requests once it has the new weights.
    """

    loads_saved = True

    def __init__(
        self,
        model: str,
        cfg: SglangConfig,
        *,
        key: str | None = None,
        folder: str | None = None,
        model_type: str | None = None,
        trust: bool = False,
        unused: Sequence[int] = (),
    ) -> None:
        """`model`: a folder or hub name, whose weights the servers are given at the start. `key`: the servers' API key. `folder`:
        that they see too (`weights.folder`). `model_type`: as its config says; None if it is not known. `trust`: code of the
        model's own may run. `unused`: ids for which there is no token (`unused_ids`)."""
        self._model, self._cfg, self._model_type = model, cfg, model_type
        self._trust, self._unused = trust, frozenset(unused)
        self._servers = Servers(cfg, key)
        self._versions = Versions()
        self._update: Update = (
            FileUpdate(self._servers, cfg.load_timeout, folder)
            if cfg.update == "files"
            else HttpUpdate(self._servers, cfg.load_timeout)
        )
        self._expected: Expected | None = None
        self._receiver: Receiver | None = None
        self._context = 0
        self._turns: dict[str, list[tuple[TurnRequests, Server, asyncio.Task[None]]]] = {}
        self._unfit: str | None = None
        self._whole = asyncio.Event()
        self._whole.set()
        self._lock = asyncio.Lock()
        self._paused = False
        self._version = 0
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0
        self._tasks = OwnedTasks()

    async def start(self) -> None:
        """Give all servers the model's weights, and prove what can be proven. Raises EngineError with server and cause."""
        expected = expected_parameters(self._model, saved=True, trust=self._trust)
        for server in self._servers.all:
            await self._servers.look(server, self._model_type)
        self._context = min(server.facts.context for server in self._servers.all if server.facts is not None)
        # They may have the weights of another model of this kind, or of an earlier run. Paused, as at every update: a server may
        # still sample for a run that was killed.
        await self._servers.post(self._servers.all, "/pause_generation", {"mode": "retract"})
        await self._update.first(self._model, self._versions.name(self._version))
        await self._servers.post(self._servers.all, "/continue_generation", {})
        for server in self._servers.all:
            await prove_temperature(server.http, [0, min(1, expected.vocab - 1)])
        self._expected = expected

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """If the server dies meanwhile, the turn is sampled again on another one, from the same ids. While weights arrive, the
        request waits for them."""
        # A server that breaks every connection and still answers must not keep a turn for ever.
        for left in range(len(self._servers.all) + RETRIES, -1, -1):
            await self._whole.wait()
            self._check(token_ids, sampling)
            server = self._servers.route(request_key)
            budget = min(sampling.max_tokens, self._context - len(token_ids))
            turn = TurnRequests(server.address, list(token_ids), sampling, budget, self._unused)
            try:
                generation = await self._turn(turn, server, request_key)
            except ServerDeadError as cause:
                await self._servers.lost(server, cause)
                if left == 0:
                    raise
                continue
            self._prompt_tokens += len(token_ids)
            self._cached_tokens += turn.cached
            return generation
        raise AssertionError("the last attempt returns or raises")

    async def _turn(self, turn: TurnRequests, server: Server, key: str) -> Generation:
        """A turn, in as many requests as it takes."""
        server.in_flight += 1
        try:
            while turn.finish is None:
                task = self._tasks.start(self._request(turn, server), f"SGLang request of {key}")
                entry = (turn, server, task)
                self._turns.setdefault(key, []).append(entry)
                try:
                    await asyncio.wait([task])
                finally:
                    self._left(key, entry)
                if not task.cancelled():
                    task.result()
                if turn.aborted:
                    turn.finish = "abort"
        finally:
            server.in_flight -= 1
        return turn.over(turn.finish)

    def _left(self, key: str, entry: tuple[TurnRequests, Server, asyncio.Task[None]]) -> None:
        turn, server, task = entry
        self._turns[key].remove(entry)
        if not self._turns[key]:
            del self._turns[key]
        if not task.done():  # the caller was cancelled
            task.cancel()
            self._abort_later(turn, server)

    async def _request(self, turn: TurnRequests, server: Server) -> None:
        facts = server.facts
        assert facts is not None
        body = turn.request(PARTS if facts.incremental else WHOLE, facts.seeds)
        async with contextlib.aclosing(server.http.events("/generate", body)) as parts:
            async for part in parts:
                before = len(turn.token_ids)
                turn.add(part, self._versions)
                self._sampled_tokens += len(turn.token_ids) - before

    def progress(self, request_key: str) -> int | None:
        """Tokens come in parts."""
        found = self._turns.get(request_key)
        return len(found[-1][0].token_ids) if found else None

    async def abort(self, request_key: str) -> None:
        for turn, server, task in list(self._turns.get(request_key, ())):
            turn.aborted = True
            if not turn.in_scheduler:
                task.cancel()  # the server may hold it back before its scheduler, which would take no notice of the abort
            with contextlib.suppress(ServerDeadError):  # then the request itself reports it
                await server.http.post("/abort_request", {"rid": turn.rid})

    def _abort_later(self, turn: TurnRequests, server: Server) -> None:
        async def tell() -> None:
            with contextlib.suppress(EngineError):  # nobody waits for it
                await server.http.post("/abort_request", {"rid": turn.rid})

        self._tasks.start(tell(), "abort of a cancelled SGLang request")

    async def pause(self) -> None:
        async with self._lock:
            await self._pause()

    async def _pause(self) -> None:
        self._paused = True
        # Not "in_place", which keeps the caches of the old weights, and not "abort", which ends every request.
        await self._servers.post(self._servers.alive(), "/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        async with self._lock:
            await self._resume()

    async def _resume(self) -> None:
        self._paused = False
        await self._servers.post(self._servers.alive(), "/continue_generation", {})

    def members(self) -> tuple[str, ...]:
        """This process receives the weights and passes them on."""
        return ("this process",)

    async def attach(self, offer: Offer) -> None:
        expected, _ = self._started()
        check_names(await in_thread("files", weight_files, self._model), expected)
        receiver = await in_thread("weights", open_receiver, offer, 0)
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        async with self._lock:
            expected, receiver = self._started()
            if receiver is None:
                raise EngineError("no route for weights is attached")
            self._unfit = f"weights version {version} were only partly published"
            self._whole.clear()
            try:
                await self._replace(version, buckets, expected, receiver)
            except EngineError as problem:
                self._unfit = str(problem)
                raise
            finally:
                self._whole.set()  # after a failure too: `_check` then refuses the waiting requests by `_unfit`
            self._unfit, self._version = None, version

    async def _replace(self, version: int, buckets: AsyncIterator[Bucket], expected: Expected, receiver: Receiver) -> None:
        paused = self._paused
        if not paused:
            await self._pause()
        try:
            await self._ask_the_dead()
            arrivals = Arrivals(expected)
            await self._update.start(self._servers.alive(), self._versions.name(version))
            async for bucket in buckets:
                for entry in bucket.entries:
                    arrivals.check(entry.name, entry.shape)
                await self._update.add(await in_thread("weights", receiver.receive, bucket))
            arrivals.complete()
            await self._update.finish()
        except EngineError:
            await self._update.drop()
            raise
        finally:
            if not paused:
                await self._resume()

    async def _ask_the_dead(self) -> None:
        """A dead server that answers again is paused as the others are, and gets the weights with them."""
        for server in self._servers.all:
            if server.cause is not None:
                with contextlib.suppress(EngineError):  # it stays dead, for the cause that it has
                    await self._servers.look(server, self._model_type)
                    await server.http.post("/pause_generation", {"mode": "retract"})
                    server.cause = None

    async def adapt(self, version: int, adapter: Adapter) -> None:
        raise EngineError(
            "an SGLang server names no weight version for an adapter, so adapters are published merged (weights.lora)"
        )

    async def stats(self) -> EngineStats:
        """Of this run's requests; `extra`: how many servers are alive."""
        turns = [turn for entries in self._turns.values() for turn, _, _ in entries]
        running = sum(bool(turn.token_ids) for turn in turns)
        return EngineStats(
            running=running,
            waiting=len(turns) - running,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled_tokens,
            version=self._version,
            extra={"servers": len(self._servers.alive())},
        )

    async def close(self) -> None:
        """The servers go on, with the last weights."""
        await self._tasks.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._update.close()
        await self._servers.close()
        self._expected = None

    @property
    def homes(self) -> dict[str, str]:
        """The server that each episode's requests go to, for users and tests."""
        return self._servers.homes()

    def _started(self) -> tuple[Expected, Receiver | None]:
        if self._expected is None:
            raise EngineError("the engine is not started or already closed")
        return self._expected, self._receiver

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        expected, _ = self._started()
        if self._unfit is not None:
            raise EngineError(f"no generation until a publish succeeds: {self._unfit}")
        if not token_ids:
            raise EngineError("the prompt is empty")
        if len(token_ids) >= self._context:
            raise PromptTooLongError(f"a prompt of {len(token_ids)} tokens leaves no room in a context of {self._context}")
        if min(token_ids) < 0 or max(token_ids) >= expected.vocab:
            raise EngineError(f"the prompt has token ids outside [0, {expected.vocab})")
        if sampling.max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        if sampling.top_k and sampling.top_p < 1:
            raise EngineError(BOTH)
