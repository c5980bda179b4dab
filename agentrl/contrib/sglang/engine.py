"""SGLang engine: a client of running servers, through their native token-in, token-out API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from agentrl.config.schema import SglangConfig
from agentrl.contrib.sglang.servers import (
    PARTS,
    TOP_K_WITH_TOP_P,
    WHOLE,
    Json,
    Server,
    ServerDeadError,
    Servers,
    TurnRequests,
    Versions,
    check_names,
    sampling_params,
    weight_files,
)
from agentrl.engines.token_text import check_request
from agentrl.engines.weights.base import Adapter, Bucket, Named, Offer, Receiver, WeightTarget, open_receiver
from agentrl.engines.weights.parameters import Arrivals, Expected, expected_parameters
from agentrl.rollout.engine import Engine, EngineStats, Generation, Sampling
from agentrl.utils.errors import ConfigError, EngineError
from agentrl.utils.event_loop import OwnedTasks
from agentrl.utils.threads import in_thread

# Test of a server's log probabilities

log = logging.getLogger(__name__)
TOKENS = 8
LEAST = 1e-3
"""Difference of logprobs below which a distribution is too flat for the test."""


async def prove_temperature(server: Server, prompt: list[int]) -> None:
    """Raise EngineError if the server's logprobs ignore the temperature. `prompt`: any token ids of the model."""
    found: list[dict[int, float]] = []  # the most likely next tokens with their logprobs
    where = server.address
    for temperature in (1.0, 2.0):
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": sampling_params(Sampling(max_tokens=1, temperature=temperature), 1),
            "return_logprob": True,
            "top_logprobs_num": TOKENS,
        }
        answer: Json = await server.call("/generate", body)
        try:
            [entries] = answer["meta_info"]["output_top_logprobs"]
        except (KeyError, ValueError) as problem:
            raise EngineError(f"{where}/generate: no output_top_logprobs in {str(answer)[:200]}") from problem
        found.append({int(token): float(value) for value, token, *_ in entries if value is not None})
    cold, hot = found
    both = sorted(cold.keys() & hot.keys(), key=lambda token: cold[token])
    if len(both) < 2 or (spread := cold[both[-1]] - cold[both[0]]) < LEAST:
        log.warning("%s: the model's distribution is too flat to tell whether its logprobs follow the temperature", where)
        return
    ratio = (hot[both[-1]] - hot[both[0]]) / spread
    if ratio > 0.75:
        raise EngineError(
            f"{where} reports logprobs of another temperature than the request's (at T = 2 they differ {ratio:.2f} times "
            "as much as at T = 1, and not 0.5): start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )


# New weights

FROM_DISK = "/update_weights_from_disk"
# Not "in_place", which keeps the caches of the old weights, and not "abort", which ends every request.
PAUSE, GO_ON = ("/pause_generation", {"mode": "retract"}), ("/continue_generation", dict[str, str]())


class FileUpdate:
    """Publishes weights as files in a folder under `parent`, which the servers must see. Call `start`, `add` for all tensors,
    `finish`; or `drop` to abandon an incomplete update."""

    def __init__(self, servers: Servers, seconds: float, parent: str | None) -> None:
        """`seconds`: how long a server may take to load weights."""
        self._servers, self._seconds = servers, seconds
        self._parent = Path(parent or tempfile.gettempdir()).absolute()
        self._folder: Path | None = None
        self._current: Path | None = None
        self._parts = 0

    async def first(self, model: str, name: str) -> None:
        """Load the weights of folder or hub name `model` as version `name`. Raises EngineError, ModelError."""
        files = await in_thread("files", weight_files, model)
        if not Path(model).is_dir():
            await self._load(model, name, f"the servers must be able to load {model} themselves")
            return
        folder = self.start()
        # Link the files into the folder of later updates: a folder that the servers do not see then fails now.
        for file in files:
            (folder / file.name).symlink_to(file.resolve())
        await self.finish(name)

    def start(self) -> Path:
        """Begin an update and return the folder for its files. Raises ConfigError if it cannot be created."""
        try:
            self._folder, self._parts = Path(tempfile.mkdtemp(prefix="agentrl-sglang-", dir=self._parent)), 0
            self._folder.chmod(0o755)  # the servers may run as another user
        except OSError as problem:
            raise ConfigError(f"sglang: cannot write to weights.folder {self._parent}: {problem}") from problem
        return self._folder

    async def add(self, tensors: list[Named]) -> None:
        """Write the next tensors; the caller may overwrite them when this returns."""
        assert self._folder is not None
        self._parts += 1
        await in_thread("files", save_file, dict(tensors), self._folder / f"model-{self._parts:05d}.safetensors")

    async def finish(self, name: str) -> None:
        """Load the complete update on all servers as version `name` and flush their caches. Raises EngineError."""
        assert self._folder is not None
        where = f"the servers must see {self._folder} and the model's folder under these paths"
        await self._load(str(self._folder), name, f"{where}; set weights.folder to one that all machines share")
        # The previous folder is kept until now: servers reload it if they cannot load the new one.
        _remove(self._current)
        self._current, self._folder = self._folder, None

    async def _load(self, path: str, name: str, condition: str) -> None:
        # "auto", because a server started with `--load-format dummy` otherwise loads nothing.
        body = {"model_path": path, "load_format": "auto", "weight_version": name, "flush_cache": True}
        try:
            await self._servers.post(self._servers.alive(), FROM_DISK, body, self._seconds)
        except EngineError as problem:
            raise EngineError(f"{problem} ({condition})") from problem

    def drop(self) -> None:
        """Abandon an incomplete update."""
        _remove(self._folder)
        self._folder = None

    def close(self) -> None:
        """Remove all files; idempotent."""
        self.drop()
        _remove(self._current)
        self._current = None


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


RETRIES = 3
"""Retries of a turn after a broken connection, in addition to one per server."""
LOADING = 5
"""Timeout for loading weights, as a multiple of `sglang.timeout`."""


class SglangEngine(Engine, WeightTarget):
    """Routes each episode to one server, so that its turns find their prefix cache there.

    If a server dies, its episodes move to another one. The engine does not restart it, but asks it at each publish whether it
    is back; it then takes requests once it has the new weights.
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
        """`model`: folder or hub name of the initial weights. `key`: the servers' API key. `folder`: parent of the weights'
        folders, which the servers see too (`weights.folder`). `model_type`: as in the model's config; None if unknown.
        `trust`: the model's custom code may run. `unused`: ids without a token (`unused_ids`)."""
        self._model, self._model_type = model, model_type
        self._trust, self._unused = trust, frozenset(unused)
        self._servers = Servers(cfg, key)
        self._versions = Versions()
        self._update = FileUpdate(self._servers, LOADING * cfg.timeout, folder)
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
        """Check all servers and load the model's weights on them. Raises EngineError with server and cause."""
        expected = expected_parameters(self._model, saved=True, trust=self._trust)
        for server in self._servers.all:
            await self._servers.check_facts(server, self._model_type)
        self._context = min(server.facts.context for server in self._servers.all if server.facts is not None)
        # Servers may have weights of another model of this type, or of an earlier run. Pause them, as at every update: a server
        # may still sample for a killed run.
        await self._servers.post(self._servers.all, *PAUSE)
        await self._update.first(self._model, self._versions.name(self._version))
        await self._servers.post(self._servers.all, *GO_ON)
        for server in self._servers.all:
            await prove_temperature(server, [0, min(1, expected.vocab - 1)])
        self._expected = expected

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, request_key: str) -> Generation:
        """Sample a turn; if the server dies, sample it again on another one from the same ids. During a weight update, the
        request waits."""
        # Limited, because a server may break every connection and still answer when asked.
        for left in range(len(self._servers.all) + RETRIES, -1, -1):
            await self._whole.wait()
            self._check(token_ids, sampling)
            server = self._servers.route(request_key)
            budget = min(sampling.max_tokens, self._context - len(token_ids))
            turn = TurnRequests(server.address, list(token_ids), sampling, budget, self._unused)
            try:
                generation = await self._turn(turn, server, request_key)
            except ServerDeadError as cause:
                await self._servers.check_lost(server, cause)
                if left == 0:
                    raise
                continue
            self._prompt_tokens += len(token_ids)
            self._cached_tokens += turn.cached
            return generation
        raise AssertionError("the last attempt returns or raises")

    async def _turn(self, turn: TurnRequests, server: Server, key: str) -> Generation:
        """Sample a turn in as many requests as it needs."""
        server.in_flight += 1
        try:
            while turn.finish is None:
                task = self._tasks.start(self._request(turn, server), f"SGLang request of {key}")
                entry = (turn, server, task)
                self._turns.setdefault(key, []).append(entry)
                try:
                    await asyncio.wait([task])
                finally:
                    self._turns[key].remove(entry)
                    if not self._turns[key]:
                        del self._turns[key]
                    if not task.done():  # the caller was cancelled
                        task.cancel()
                        self._tasks.start(self._give_up(turn, server), "abort of a cancelled SGLang request")
                if not task.cancelled():
                    task.result()
                if turn.aborted:
                    turn.finish = "abort"
        finally:
            server.in_flight -= 1
        return Generation(turn.token_ids, turn.logprobs, turn.versions, turn.finish)

    async def _request(self, turn: TurnRequests, server: Server) -> None:
        facts = server.facts
        assert facts is not None
        body = turn.request(PARTS if facts.incremental else WHOLE, facts.seeds)
        async with contextlib.aclosing(server.events("/generate", body)) as parts:
            async for part in parts:
                before = len(turn.token_ids)
                turn.add(part, self._versions)
                self._sampled_tokens += len(turn.token_ids) - before

    def progress(self, request_key: str) -> int | None:
        found = self._turns.get(request_key)
        return len(found[-1][0].token_ids) if found else None

    async def abort(self, request_key: str) -> None:
        for turn, server, task in list(self._turns.get(request_key, ())):
            turn.aborted = True
            if not turn.in_scheduler:
                task.cancel()  # the request may not be in the server's scheduler yet, where an abort would have no effect
            with contextlib.suppress(ServerDeadError):  # the request itself reports a dead server
                await server.call("/abort_request", {"rid": turn.rid})

    async def _give_up(self, turn: TurnRequests, server: Server) -> None:
        with contextlib.suppress(EngineError):  # no caller awaits the result
            await server.call("/abort_request", {"rid": turn.rid})

    async def pause(self) -> None:
        async with self._lock:
            await self._switch(True)

    async def resume(self) -> None:
        async with self._lock:
            await self._switch(False)

    async def _switch(self, paused: bool) -> None:
        self._paused = paused
        await self._servers.post(self._servers.alive(), *(PAUSE if paused else GO_ON))

    def members(self) -> tuple[str, ...]:
        """Return this process, which receives the weights and passes them on."""
        return ("this process",)

    async def attach(self, offer: Offer) -> None:
        expected = self._running()
        check_names(await in_thread("files", weight_files, self._model), expected)
        receiver = await in_thread("weights", open_receiver, offer, 0)
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        async with self._lock:
            expected, receiver = self._running(), self._receiver
            if receiver is None:
                raise EngineError("no route for weights is attached")
            self._unfit = f"weights version {version} were only partly published"
            self._whole.clear()
            paused = self._paused
            try:
                if not paused:
                    await self._switch(True)
                try:
                    # A dead server that answers again is paused and updated with the others.
                    for server in self._servers.all:
                        if server.cause is not None:
                            with contextlib.suppress(EngineError):  # it stays dead, with its recorded cause
                                await self._servers.check_facts(server, self._model_type)
                                await server.call(*PAUSE)
                                server.cause = None
                    arrivals = Arrivals(expected)
                    self._update.start()
                    async for bucket in buckets:
                        for entry in bucket.entries:
                            arrivals.check(entry.name, entry.shape)
                        await self._update.add(await in_thread("weights", receiver.receive, bucket))
                    arrivals.complete()
                    await self._update.finish(self._versions.name(version))
                except EngineError:
                    self._update.drop()
                    raise
                finally:
                    if not paused:
                        await self._switch(False)
            except EngineError as problem:
                self._unfit = str(problem)
                raise
            finally:
                self._whole.set()  # after a failure too: `_check` then fails the waiting requests with `_unfit`
            self._unfit, self._version = None, version

    async def adapt(self, version: int, adapter: Adapter) -> None:
        raise EngineError(
            "an SGLang server names no weight version for an adapter, so adapters are published merged (weights.lora)"
        )

    async def stats(self) -> EngineStats:
        """Return statistics of this run's requests; `extra`: the number of live servers."""
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
        """Close the client; the servers keep running with the last weights."""
        await self._tasks.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._update.close()
        await self._servers.close()
        self._expected = None

    def _running(self) -> Expected:
        if self._expected is None:
            raise EngineError("the engine is not started or already closed")
        return self._expected

    def _check(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        expected = self._running()
        if self._unfit is not None:
            raise EngineError(f"no generation until a publish succeeds: {self._unfit}")
        check_request(token_ids, sampling, self._context, expected.vocab)
        if sampling.top_k and sampling.top_p < 1:
            raise EngineError(TOP_K_WITH_TOP_P)
