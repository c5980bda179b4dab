"""vLLM engine: one or several AsyncLLM replicas, each in a Ray actor, behind the engine interface."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch

from agentrl.config.schema import VllmConfig
from agentrl.data.token_ledger import copy_ids
from agentrl.engines.token_text import LazyTokenizer, check_request
from agentrl.engines.vllm.options import UNUSED_IDS, engine_options
from agentrl.engines.vllm.replica_calls import InReplica, ReplicaDeadError
from agentrl.engines.vllm.replicas import Replica, Replicas, WorkersInReplicas
from agentrl.engines.weights.base import (
    Adapter,
    Bucket,
    MembersChangedError,
    Offer,
    Receiver,
    WakeStage,
    WeightTarget,
    open_receiver,
)
from agentrl.engines.weights.parameters import Arrivals, Expected, expected_parameters
from agentrl.render.modality import Modality
from agentrl.rollout.engine import EngineConnection, EngineStats, Generation, OnTokens, Sampling, StreamingEngine
from agentrl.rollout.workers.worker_pool import WorkerProcesses, WorkerRecipe
from agentrl.utils.errors import ConfigError, EngineError
from agentrl.utils.processor import size_of_folder, threads_for
from agentrl.utils.threads import in_thread

Kept = tuple[Bucket, ray.ObjectRef]
"""A published bucket, and its bytes, uint8 [nbytes], in Ray's object store."""
COUNTS = ("running", "waiting", "prompt_tokens", "cached_tokens", "sampled_tokens")
"""Counters that are summed over the replicas."""
TAGS: dict[WakeStage, str] = {"weights": "weights", "cache": "kv_cache"}
"""Wake stage -> vLLM's tag of the memory that it allocates."""


class VllmEngine(StreamingEngine, WeightTarget):
    """Engine that routes each episode to one replica, where its turns find their prefix cache.

    If a replica dies, its episodes continue on another one (which recomputes their prefix), and a new replica replaces it; it
    gets the newest weights and their version before it takes requests.
    """

    loads_saved = True

    def __init__(
        self,
        model_path: str,
        cfg: VllmConfig,
        *,
        dtype: str | None = None,
        threads: int | None = None,
        cuda: bool | None = None,
        lora_rank: int | None = None,
        sleeps: bool = False,
        router_replay: bool = False,
        ray_options: Sequence[Mapping[str, Any]] = (),
        trust: bool = False,
        unused: Sequence[int] = (),
        modality: Modality | None = None,
    ) -> None:
        """`cfg.max_model_len` must not exceed the model's limit. `dtype`: compute type, by default bfloat16 on GPUs, else
        float32. `threads`: per process on a CPU, by default chosen by the model's size. `cuda`: run replicas on GPUs, by default
        if this process sees one. `lora_rank`: reserve space for adapters of this rank (see `adapt`). `sleeps`: allow `sleep`.
        `ray_options`: Ray options per replica, if a pool places them. `modality`: of a model that takes images. `router_replay`,
        `trust`, `unused`: as in `EmbeddedEngine`.
        """
        self._path, self._trust = model_path, trust
        self._words = LazyTokenizer(model_path, trust=trust)
        self._lora_rank, self._sleeps = lora_rank, sleeps
        self._asleep: tuple[WakeStage, ...] = ()
        self._sleep_level = 2 if lora_rank is None else 1
        self._context, self._count = cfg.max_model_len, cfg.replicas
        cuda = torch.cuda.is_available() if cuda is None else cuda
        dtype = dtype or ("bfloat16" if cuda else "float32")
        asked: dict[str, Any] = {"lora_rank": lora_rank, "sleeps": sleeps, "router_replay": router_replay}
        options = {"model": model_path, **engine_options(cfg, cuda=cuda, dtype=dtype, **asked)}
        if trust:
            options["trust_remote_code"] = True
        if modality is not None:
            options |= modality.vllm_options(options)
            unused = [*unused, *modality.special]
        if unused:
            options["additional_config"] = {**options.get("additional_config", {}), UNUSED_IDS: list(unused)}
        count = threads or threads_for(size_of_folder(model_path), processes=cfg.replicas * cfg.tensor_parallel)
        self._replicas = Replicas(options, cfg, cuda=cuda, threads=count, ray_options=ray_options, catch_up=self._catch_up)
        self._under_way: dict[str, str] = {}
        """Request key of an episode -> id of its request."""
        self._expected: Expected | None = None
        self._numbers = itertools.count()
        self._unfit: str | None = None
        self._weights_whole = asyncio.Event()
        self._weights_whole.set()
        # Held by pause, publish and resume, so that no new replica joins during one and misses part of it.
        self._update_lock = asyncio.Lock()
        self._paused = False
        self._version = 0
        self._newest: list[Kept] = []
        # The driver keeps a copy of the weights for new replicas, unless they go from GPU to GPU and never reach it.
        self._keep = not cuda and cfg.max_respawns > 0
        self._own: Receiver | None = None
        self._workers, self._attached = cfg.tensor_parallel, tuple[str, ...]()
        self._published = False
        self._adapter: Adapter | None = None

    async def start(self) -> None:
        self._expected = expected_parameters(self._path, saved=True, trust=self._trust)
        if not ray.is_initialized():
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
        await self._replicas.start()

    def starting(self) -> str:
        stages = Counter(one.stage for one in self._replicas.every if one.stage and one.cause is None)
        return ", ".join(stage if count == 1 else f"{count} x {stage}" for stage, count in stages.items())

    async def stream(self, token_ids: Sequence[int], sampling: Sampling, request_key: str, emit: OnTokens | None) -> Generation:
        """Sample a turn; if the replica dies, sample it again on another one from the same ids. Requests wait while weights
        arrive. Raises EngineError if the replica dies after tokens were passed on, since they cannot be taken back."""
        begun = False

        def tell(fresh: Sequence[int], logprobs: Sequence[float]) -> None:
            nonlocal begun
            begun = True
            if emit is not None:
                emit(fresh, logprobs)

        while True:
            request_id = f"{request_key}#{next(self._numbers)}"
            self._under_way[request_key] = request_id
            replica: Replica | None = None
            answer: Generation | None = None
            try:
                await self._weights_whole.wait()
                expected = self._running()
                if self._unfit is not None:
                    raise EngineError(f"no generation until a publish succeeds: {self._unfit}")
                check_request(token_ids, sampling, self._context, expected.vocab)
                request = copy_ids(token_ids), sampling, request_key, request_id
                replica = await self._replicas.route(request)
                answer = await self._replicas.generate(replica, request, None if emit is None else tell)
                return answer
            except ReplicaDeadError:
                if begun:
                    raise
            except asyncio.CancelledError:
                if replica is not None:
                    replica.request_batcher.cancel(request_id)
                raise
            finally:
                self._replicas.end_request(request_id, answer)
                # The episode may already have a newer request, whose id must stay.
                if self._under_way.get(request_key) == request_id:
                    del self._under_way[request_key]

    def refusal(self, sampling: Sampling) -> str:
        return self._words.refusal(sampling)

    def progress(self, request_key: str) -> int | None:
        request_id = self._under_way.get(request_key)
        return None if request_id is None else self._replicas.progress(request_id)

    async def pause(self) -> None:
        async with self._update_lock:
            self._paused = True
            await self._replicas.all("pause")

    async def resume(self) -> None:
        async with self._update_lock:
            self._paused = False
            await self._replicas.all("resume")

    async def sleep(self) -> None:
        """Free the GPUs' memory. Fully published weights are discarded (vLLM's level 2); with adapters, the base weights are kept
        in host memory (level 1)."""
        if not self._sleeps:
            raise EngineError("the engine cannot sleep: it was started without `sleeps`")
        async with self._update_lock:
            if not self._asleep:
                await self._replicas.all("sleep", self._sleep_level)
                self._asleep, self._unfit, self._newest = ("weights", "cache"), "the engine sleeps", []

    async def wake(self, stage: WakeStage) -> None:
        async with self._update_lock:
            if self._asleep[:1] != (stage,):
                return
            await self._replicas.all("wake", TAGS[stage])
            self._asleep = self._asleep[1:]
            if self._sleep_level == 1:
                self._unfit = "the engine has no cache yet" if self._asleep else None
            elif stage == "weights":
                self._unfit = "the engine woke up and has no weights yet"

    def seats(
        self, workers: int, recipe: Callable[[EngineConnection | None], WorkerRecipe], host: Callable[[], str]
    ) -> WorkerProcesses | None:
        if workers != self._count:
            return None
        return WorkersInReplicas(self._replicas, lambda: recipe(InReplica(self._running().vocab)), host)

    async def wait_until_starved(self) -> None:
        while all(replica.current for replica in self._replicas.alive()):
            await self._replicas.changed.wait()

    def members(self) -> tuple[str, ...]:
        workers = [f"{r.number}.{r.pid}.{rank}" for r in self._replicas.alive() for rank in range(self._workers)]
        return (*workers, "driver") if self._keep else tuple(workers)

    async def attach(self, offer: Offer) -> None:
        async with self._update_lock:
            self._attached = ()
            members, alive = self.members(), self._replicas.alive()
            # Concurrently, since joining a group blocks until every member has joined.
            workers = [self._replicas.ask(replica, "attach", offer, at * self._workers) for at, replica in enumerate(alive)]
            own = in_thread("weights", open_receiver, offer, len(members) - 1) if self._keep else asyncio.sleep(0)
            receiver, *answers = await asyncio.gather(own, *workers, return_exceptions=True)
            if self._own is not None:
                self._own.close()
            # Stored before the answers are checked, so that `close` frees it even if another process failed.
            self._own = receiver if isinstance(receiver, Receiver) else None
            # A death takes precedence over other errors.
            if any(isinstance(answer, ReplicaDeadError) for answer in answers):
                raise MembersChangedError("a replica of the vLLM engine died while a route for weights was attached")
            for answer in (receiver, *answers):
                if isinstance(answer, BaseException):
                    raise answer
                if isinstance(answer, str) and answer:
                    raise ConfigError(answer)
            self._attached = members

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        async with self._update_lock:
            if not self._attached or self.members() != self._attached:
                raise MembersChangedError("a replica of the vLLM engine was replaced after the route for weights was attached")
            self._weights_whole.clear()
            try:
                await self._update(version, buckets)
            finally:
                self._weights_whole.set()  # after a failure too: `stream` then fails the waiting requests by `_unfit`

    async def adapt(self, version: int, adapter: Adapter) -> None:
        if self._lora_rank is None:
            raise EngineError("the engine was started without room for an adapter (lora_rank)")
        async with self._update_lock:
            await self._replicas.all("adapt", version, adapter)
            self._adapter, self._version = adapter, version

    async def _update(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        """Load all buckets while sampling is paused; keep copies for later replicas."""
        expected = self._running()
        self._unfit = f"weights version {version} were only partly published"
        self._newest = []  # dropped first, since two sets of weights may not fit in the object store
        arrivals = Arrivals(expected)
        kept: list[Kept] = []
        complete = False
        if not self._paused:
            # A scheduler step in the middle of an update would crash the engine's process.
            await self._replicas.all("pause")
        await self._replicas.all("begin_update")
        try:
            async for bucket in buckets:
                for entry in bucket.entries:
                    arrivals.check(entry.name, entry.shape)
                # On a CPU, vLLM packs a separate copy of a tied output head; it would keep the old weights unless the update
                # names it.
                whole = bucket.with_aliases(expected.tied)
                loading = self._replicas.all("receive", whole)
                # Concurrently: a collective broadcast ends only when the driver has received its copy too.
                copied: list[Kept]
                copied, _ = await asyncio.gather(in_thread("weights", self._copy, whole), loading)
                kept += copied
            arrivals.complete()
            complete = True
        except EngineError as problem:
            self._unfit = str(problem)
            raise
        finally:
            await self._replicas.all("end_update", version if complete else None)
            if not self._paused:
                await self._replicas.all("resume")
        self._unfit, self._version, self._newest, self._published = None, version, kept, True
        self._replicas.note_weights()

    def _copy(self, bucket: Bucket) -> list[Kept]:
        """Return the driver's copy of a bucket; empty if it keeps no weights."""
        if self._own is None:
            return []
        data = torch.empty(bucket.nbytes, dtype=torch.uint8)
        for (_, kept), (_, tensor) in zip(bucket.cut(data), self._own.receive(bucket), strict=True):
            kept.copy_(tensor)
        return [(bucket, ray.put(data.numpy()))]

    async def _catch_up(self, replica: Replica) -> None:
        """Give a new replica the current weights and let it join; without a kept copy it waits for the next publish."""
        async with self._update_lock:
            await self._replicas.control(replica, "pause")
            if self._asleep:  # like the others, it gets weights with the next publish
                await self._replicas.control(replica, "sleep", self._sleep_level)
                if "weights" not in self._asleep:
                    await self._replicas.control(replica, "wake", TAGS["weights"])
            if self._newest:
                await self._replicas.control(replica, "begin_update")
                for bucket, data in self._newest:
                    await self._replicas.control(replica, "load", data, bucket)
                await self._replicas.control(replica, "end_update", self._version)
            if self._adapter is not None and not self._asleep:
                await self._replicas.control(replica, "adapt", self._version, self._adapter)
            if not self._paused:
                await self._replicas.control(replica, "resume")
            replica.current = not self._published or bool(self._newest)
            self._replicas.join(replica)

    async def abort(self, request_key: str) -> None:
        await self._replicas.all("abort", request_key)

    async def stats(self) -> EngineStats:
        """Return counters summed over all replicas, including the last ones of dead replicas. `extra`: number of live and of
        replaced replicas."""
        alive = self._replicas.alive()
        asked = [self._replicas.control(replica, "stats") for replica in alive]
        for replica, answer in zip(alive, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answer, EngineStats):
                replica.seen = answer
            elif not isinstance(answer, ReplicaDeadError):
                raise answer
        parts = [
            one.seen if one.cause is None else replace(one.seen, running=0, waiting=0, kv_used=None)
            for one in (*self._replicas.past, *self._replicas.every)
        ]
        used = [part.kv_used for part in parts if part.kv_used is not None]
        summed: dict[str, int] = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
        extra: dict[str, float] = {"replicas": len(self._replicas.alive()), "respawns": self._replicas.respawns}
        return EngineStats(version=self._version, kv_used=sum(used) / len(used) if used else None, extra=extra, **summed)

    async def close(self) -> None:
        await self._replicas.close()
        if self._own is not None:
            self._own.close()
            self._own = None
        self._newest = []

    def _running(self) -> Expected:
        if self._expected is None:
            raise EngineError("the engine is not started or already closed")
        return self._expected
