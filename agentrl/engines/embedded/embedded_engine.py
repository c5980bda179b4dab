"""Embedded engine: continuous batching with a KV cache in this process.

It serves any causal language model whose attention uses transformers' `AttentionInterface`, with the core dependencies only.
Forward passes of tiny models run on the event loop, with one loop iteration between two passes; others run in a thread, with
`ITERATIONS` between two. So a run whose tools are coroutines without clocks or threads always forms the same batches and samples
the same tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from pkgutil import resolve_name

import numpy as np
import torch

from agentrl.data.token_ledger import images_in
from agentrl.engines.embedded.embedded_model import EmbeddedModel, RecomputedModel
from agentrl.engines.embedded.kv_cache import Slots, cache_limit
from agentrl.engines.embedded.scheduler import Batcher, Drawn, Request
from agentrl.engines.token_text import LazyTokenizer, StopStrings, check_request
from agentrl.engines.weights.base import Adapter, Bucket, Offer, Receiver, WakeStage, WeightTarget, open_receiver
from agentrl.engines.weights.parameters import Arrivals, apply_adapter
from agentrl.render.modality import modality_in
from agentrl.rollout.engine import EngineStats, Generation, OnTokens, Sampling, StreamingEngine
from agentrl.utils.errors import EngineError, ModelError, ResourceError
from agentrl.utils.processor import set_cpu_threads, threads_for
from agentrl.utils.threads import in_thread

log = logging.getLogger(__name__)
ON_LOOP = 1_500_000
"""Largest model, in parameters, whose passes run on the event loop: a few ms, or about 0.1 s over `step_tokens`."""
ITERATIONS = 32
"""Loop iterations between two passes in a thread. An episode whose tools are coroutines needs fewer from its answer to its next
request, so that the request always joins the next pass."""


class EmbeddedEngine(StreamingEngine, WeightTarget):
    """Engine in this process; use it from one event loop only."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str | None = None,
        threads: int | None = None,
        max_slots: int = 256,
        max_context: int | None = None,
        kv_cache_mib: int | None = None,
        room: int | None = None,
        step_tokens: int = 2048,
        device: str | None = None,
        trust: bool = False,
        unused: Seq[int] = (),
        router_replay: bool = False,
        cache: bool = True,
    ) -> None:
        """`max_slots`: episodes held at once, running or idle. `max_context`: maximum tokens of an episode (by default the
        model's limit, or what the cache holds if less). `kv_cache_mib`: upper limit of the cache, which grows on demand; by
        default `room` bytes of a GPU minus the weights, or a part of host memory. `step_tokens`: prompt tokens computed per step.
        `device`: "cpu", "cuda", ... (by default a GPU if there is one). `dtype`: by default bfloat16 on a GPU, float32 on a CPU.
        `threads`: of a pass on a CPU, by default chosen by the model's size. `trust`: allow the model's own code to run.
        `unused`: ids without a token, which must never be drawn (`unused_ids`). `router_replay`: record which experts tokens go
        to, for requests that ask. `cache`: if False, each token costs a pass over its whole prefix, for families that keep more
        than keys and values (RecomputedModel).
        """
        self._path, self._trust, self._unused = model_path, trust, list(unused)
        self._words = LazyTokenizer(model_path, trust=trust)
        self._max_slots, self._max_context = max_slots, max_context
        self._kv_cache_mib, self._room = kv_cache_mib, room
        self._step_tokens, self._router_replay = step_tokens, router_replay
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._dtype = dtype or ("bfloat16" if self._device.type == "cuda" else "float32")
        self._cache, self._threads = cache, threads
        self._model: EmbeddedModel | None = None
        self._batcher: Batcher | None = None
        self._task: asyncio.Task[None] | None = None
        self._under_way: dict[str, Request] = {}
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        """Held during a pass, and by operations that must not overlap with one."""
        self._paused = False
        self._unfit: str | None = None
        self._asleep = self._arriving = False
        self._receiver: Receiver | None = None
        self._prompt_tokens = 0

    async def start(self) -> None:
        set_cpu_threads(self._threads)  # the probe below is tiny
        kind: type[EmbeddedModel] = EmbeddedModel if self._cache else RecomputedModel
        if (modality := modality_in(self._path, self._trust)) is not None:
            if self._cache:
                raise ModelError(
                    f"{self._path}: the embedded engine's cache does not support images. Set engine_args = {{ cache = false }}"
                )
            kind = resolve_name(modality.embedded_model)
        model = kind(self._path, self._dtype, self._device, self._trust, self._router_replay)
        weights, token = sum(p.nbytes for p in model.module.parameters()), model.shape.token_bytes
        limit = cache_limit(self._kv_cache_mib, self._room, weights, token, self._max_context or 1)
        context = self._max_context or min(model.positions, limit // token)
        if context > model.positions:
            raise ResourceError(f"max_context = {context}, but the model supports only {model.positions} positions")
        self._context = context
        size = sum(parameter.numel() for parameter in model.module.parameters())
        self._in_thread, self._threads = size > ON_LOOP, self._threads or threads_for(size)
        set_cpu_threads(self._threads)
        slots = Slots(model.shape, context, limit)
        self._model = model
        self._batcher = Batcher(model, slots, self._max_slots, self._step_tokens, [*self._unused, *model.never_drawn])
        self._task = asyncio.create_task(self._run(), name="embedded-engine")

    def refusal(self, sampling: Sampling) -> str:
        return self._words.refusal(sampling)

    async def stream(self, token_ids: Seq[int], sampling: Sampling, request_key: str, emit: OnTokens | None) -> Generation:
        _, model = self._running_parts(fit=True)
        check_request(token_ids, sampling, self._context, model.vocab)
        prompt = model.prompt(token_ids, images_in(token_ids))
        self._prompt_tokens += len(prompt)
        # One random stream per request, from system entropy without a seed. Philox is counter-based with the seed as its key,
        # so the streams of different seeds do not overlap.
        seed, budget = sampling.seed, min(sampling.max_tokens, self._context - len(prompt))
        stream = np.random.default_rng() if seed is None else np.random.Generator(np.random.Philox(key=seed % 2**128))
        request = Request(
            key=request_key,
            tokens=prompt,
            prompt=len(prompt),
            sampling=sampling,
            uniforms=stream.random(budget),
            done=asyncio.get_running_loop().create_future(),
            emit=emit,
            stops=StopStrings(sampling.stop, self._words.decode) if sampling.stop else None,
            constraint=None if sampling.grammar is None else self._words.constraint(sampling, model.vocab),
        )
        self._under_way[request_key] = request
        try:
            async with self._turn:
                batcher, _ = self._running_parts(fit=True)
                batcher.waiting.append(request)
            self._wake.set()
            return await request.done
        except asyncio.CancelledError:
            if self._batcher is not None and not self._turn.locked():  # otherwise the end of the pass drops it
                self._batcher.drop(request)
            raise
        finally:
            if self._under_way.get(request_key) is request:
                del self._under_way[request_key]

    def progress(self, request_key: str) -> int | None:
        request = self._under_way.get(request_key)
        return None if request is None else len(request.logprobs)

    async def pause(self) -> None:
        self._paused = True
        async with self._turn:
            return  # the current pass has ended

    async def resume(self) -> None:
        self._paused = False
        self._wake.set()

    def members(self) -> tuple[str, ...]:
        return ("this process",)

    async def attach(self, offer: Offer) -> None:
        # In a thread, since joining a group blocks until the other side joins.
        receiver = await in_thread("weights", open_receiver, offer, 0)
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = receiver

    async def receive(self, version: int, buckets: AsyncIterator[Bucket]) -> None:
        batcher, model = self._running_parts(awake=True)
        if self._receiver is None:
            raise EngineError("no route for weights is attached")
        # Set first, so that any failure below leaves the engine refusing to sample from half-written weights.
        self._unfit = f"weights version {version} were only partly published"
        was_paused, self._paused = self._paused, True
        self._arriving = True
        try:
            async with self._turn:
                batcher.reset()  # the cache was computed with the old weights
                if not batcher.requests():
                    model.drop_images()
            model.base.clear()
            weights, arrivals = model.module.state_dict(), Arrivals(model.expected)

            def load(receiver: Receiver, bucket: Bucket) -> None:
                for name, tensor in receiver.receive(bucket):
                    weights[arrivals.check(name, tuple(tensor.shape))].copy_(tensor)

            async for bucket in buckets:
                await in_thread("weights", load, self._receiver, bucket)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # the trainer overwrites the bucket once the next one is requested
            arrivals.complete()
        except EngineError as problem:
            self._unfit = str(problem)
            raise
        finally:
            self._paused, self._arriving = was_paused, False
            self._wake.set()
        batcher.version = version
        self._unfit = None

    async def adapt(self, version: int, adapter: Adapter) -> None:
        batcher, model = self._running_parts(awake=True)
        async with self._turn:
            apply_adapter(dict(model.module.named_parameters()), model.base, adapter)
            batcher.reset()
            batcher.version = version

    async def sleep(self) -> None:
        batcher, model = self._running_parts()
        async with self._turn:
            if batcher.requests():
                raise EngineError("the engine cannot sleep while requests are under way")
            batcher.reset(free_memory=True)
            model.base.clear()
            for parameter in model.module.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
            # Otherwise only this process could reuse the memory, not a trainer in another one. Does nothing without CUDA.
            torch.cuda.empty_cache()
            self._asleep, self._unfit = True, "the engine sleeps"

    async def wake(self, stage: WakeStage) -> None:
        _, model = self._running_parts()
        if stage == "weights" and self._asleep:
            for name, parameter in model.module.named_parameters():
                parameter.data = torch.empty(model.expected.shapes[name], dtype=parameter.dtype, device=self._device)
            self._asleep, self._unfit = False, "the engine woke up and has no weights yet"
        # The cache grows with requests, so the stage "cache" does nothing.

    async def forget(self) -> None:
        batcher, _ = self._running_parts()
        async with self._turn:
            batcher.reset()

    async def abort(self, request_key: str) -> None:
        batcher, _ = self._running_parts()
        async with self._turn:
            for request in batcher.requests():
                if request.key == request_key:
                    batcher.finish(request, "abort")

    async def stats(self) -> EngineStats:
        batcher, _ = self._running_parts()
        used = sum((pool.slots - len(pool.free)) * pool.slot_bytes for pool in batcher.slots.pools)
        return EngineStats(
            running=len(batcher.running),
            waiting=len(batcher.waiting),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=batcher.cached_tokens,
            sampled_tokens=batcher.sampled_tokens,
            version=batcher.version,
            kv_used=used / batcher.slots.limit,
            extra={"steps": batcher.steps, "idle": len(batcher.idle)},
        )

    async def close(self) -> None:
        if self._task is not None:
            async with self._turn:  # a pass in its thread would still use the parts freed here
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._batcher is not None:
            self._fail_all("the engine was closed")
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._task = self._batcher = self._model = None

    async def _run(self) -> None:
        batcher, _ = self._running_parts()

        def advance() -> Drawn:
            set_cpu_threads(self._threads)  # torch's setting is per thread
            return batcher.advance()

        while True:
            async with self._turn:
                runs = not self._paused and bool(batcher.requests())
                if runs and self._unfit is not None:
                    self._fail_all(self._unfit)
                elif runs:
                    try:
                        batcher.settle(await in_thread("engine", advance) if self._in_thread else batcher.advance())
                    except Exception as problem:  # every caller gets the error
                        log.exception("a step of the embedded engine failed")
                        self._fail_all(f"a step of the embedded engine failed: {problem!r}", problem)
                        batcher.reset()
            if not runs:
                self._wake.clear()
                await self._wake.wait()
                continue
            # Only here do tools and new requests get to run; otherwise they would wait for the end of the batch.
            for _ in range(ITERATIONS if self._in_thread else 1):
                await asyncio.sleep(0)

    def _fail_all(self, reason: str, cause: Exception | None = None) -> None:
        batcher, _ = self._running_parts()
        for request in batcher.requests():
            error = EngineError(reason)
            error.__cause__ = cause
            batcher.fail(request, error)

    def _running_parts(self, awake: bool = False, fit: bool = False) -> tuple[Batcher, EmbeddedModel]:
        """Return the parts of a started engine. Raises EngineError if it is not started, not `awake`, or not `fit` to sample."""
        if self._batcher is None or self._model is None:
            raise EngineError("the engine is not started or already closed")
        if awake and self._asleep:
            raise EngineError("the engine is asleep; wake its weights before a publish")
        # While weights arrive, new requests wait for them like running ones; `_run` fails them if the weights stay incomplete.
        if fit and self._unfit is not None and not self._arriving:
            raise EngineError(f"no generation until a publish succeeds: {self._unfit}")
        return self._batcher, self._model
