"""vLLM replica: AsyncLLM inside of a Ray actor.

Stages of its start, tracking of a turn's tokens, and the actor."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from agentrl.data.images import Image
from agentrl.data.token_ledger import images_in
from agentrl.engines.token_text import LazyTokenizer, StopStrings
from agentrl.engines.vllm.options import GRAMMAR, settle_scratch
from agentrl.engines.vllm.replica_calls import LOCAL_ACTOR, Answers, ReplicaDeadError, Request, TokenCounts, answer_batches
from agentrl.engines.weights.base import Adapter, Bucket, Offer
from agentrl.engines.weights.parameters import write_adapter
from agentrl.render.modality import modality_in
from agentrl.rollout.engine import EngineStats, Finish, Generation, OnTokens, Sampling
from agentrl.rollout.workers.channel import DriverAddress
from agentrl.rollout.workers.rollout_worker import WorkerCore
from agentrl.rollout.workers.worker_pool import WorkerRecipe
from agentrl.utils.errors import EngineError, ModelError
from agentrl.utils.redaction import guard_process
from agentrl.utils.threads import in_thread

# Stages of the start

PROCESS = "a process for the replica"
IMPORT = "import of vLLM"
ENGINE = "vLLM's engine process, which imports it again"
PREPARE = "weights and KV cache"
WEIGHTS = "weights"
CACHE = "KV cache and a first step"
GROUP = "stage"
"""Ray concurrency group of `VllmActor.stage`: a separate thread, which answers while the start blocks the actor's loop."""
STAGE_POLL_S = 2.0
"""Seconds between two queries of the stage."""


class StartStage:
    """Determines the stage of a replica's start. `imported`: vLLM is imported in the replica's process."""

    imported = _loading = False

    def now(self) -> str:
        """Return the current stage."""
        if not self.imported:
            return IMPORT
        maps = ""  # files mapped by this process's children
        for child in psutil.Process().children(recursive=True):
            with suppress(OSError):  # psutil would read smaps, which is slow and blocks the process
                maps += Path(f"/proc/{child.pid}/maps").read_text()
        if ".safetensors\n" in maps or ".bin\n" in maps:
            self._loading = True
            return WEIGHTS
        if self._loading:
            return CACHE
        return PREPARE if "/vllm/_C" in maps else ENGINE


# Tokens of a turn


class TurnWatch:
    """Tracks the tokens of one turn. `end`: number of tokens to keep if a stop string ended it."""

    def __init__(self, emit: OnTokens | None, stops: StopStrings | None) -> None:
        self._emit, self._stops = emit, stops
        self.listens = emit is not None or stops is not None
        """Whether tokens are needed before the turn's end."""
        self.count = 0
        self.end: int | None = None

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Take the turn's next tokens. Returns True if a stop string ends the turn in them; later tokens, which vLLM samples
        until it is aborted, are ignored."""
        if self.end is not None or not token_ids:
            return False
        kept = len(token_ids)
        if self._stops is not None:
            kept = next((n for n, number in enumerate(token_ids, 1) if self._stops.completes(number)), kept + 1)
            if kept <= len(token_ids):
                self.end = self.count + kept
        self.count += len(token_ids)
        if self._emit is not None:
            self._emit(token_ids[:kept], logprobs[:kept])
        return self.end is not None


# The actor

EXPERTS_KEY = "agentrl_experts"
"""Key of a request's extra arguments: record its experts (contrib/moe)."""
DEATH_POLL_S = 0.5
"""Seconds between two checks for a dead engine."""
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


def drop_missing_prefix_cache(args: Any) -> Any:
    """Turn the prefix cache off in AsyncEngineArgs if vLLM has none for the model. It caches states of recurrent layers at the
    ends of prompt chunks, and CPUs compute prompts in one chunk (options.py)."""
    if args.enable_prefix_caching and args.enable_chunked_prefill is False and args.create_model_config().has_inner_state:
        args.enable_prefix_caching = False
    return args


def text_prompt(ids: list[int], images: Sequence[Image]) -> Any:
    """Wrap token ids as a vLLM prompt. Raises EngineError for images. Imports vLLM."""
    from vllm.inputs.engine import tokens_input

    if images:
        raise EngineError(f"a prompt with {len(images)} images for a model of text")
    return tokens_input(ids)


class VllmActor:
    """Ray actor of one replica; its methods, called by `Replicas`, run on the actor's event loop."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options`: keyword arguments for vLLM's AsyncEngineArgs."""
        guard_process(options)
        self._options = options
        self.words = LazyTokenizer(str(options["model"]), trust=bool(options.get("trust_remote_code")))
        self._engine: Any = None
        self._requests: dict[str, set[str]] = {}
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0
        self._version = 0
        self._lora: Any = None
        self._lora_folder: tempfile.TemporaryDirectory[str] | None = None
        self.unfit = self._cause = ""
        self._level = 0
        self._dead = asyncio.Event()
        self._stage = StartStage()

    async def stage(self) -> str:
        """Return the stage of `start`, from a separate thread."""
        return self._stage.now()

    async def start(self) -> int:
        """Load the model. Returns the process id. Raises ModelError for a folder that this machine does not see."""
        model = str(self._options["model"])
        if Path(model).is_absolute() and not Path(model).is_dir():  # vLLM would take it for a hub name
            raise ModelError(
                f"{model}: not a folder on {socket.gethostname()}. All nodes must see the model, and the run's folder if the "
                "model is built in it, at the same path (model.path, out)"
            )
        settle_scratch()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        modality = modality_in(model, bool(self._options.get("trust_remote_code")))
        self._prompt = text_prompt if modality is None else partial(resolve_name(modality.vllm_prompt), modality)
        self._stage.imported = True
        self._engine = AsyncLLM.from_engine_args(drop_missing_prefix_cache(AsyncEngineArgs(**self._options)))
        self._watching = asyncio.create_task(self._watch())
        self.context = int(self._engine.model_config.max_model_len)
        await self._set_version(0)
        LOCAL_ACTOR[:] = [self]
        return os.getpid()

    async def play(self, name: str, endpoint: DriverAddress, recipe: WorkerRecipe) -> bool:
        """Host a rollout worker until the driver dismisses it (True) or its connection is lost (False). Raises ReplicaDeadError
        if the engine dies first; the worker then ends too."""
        core = WorkerCore(name, recipe.build)
        playing, died = asyncio.create_task(core.run(endpoint)), asyncio.create_task(self._dead.wait())
        await asyncio.wait([playing, died], return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            core.abandon()
            raise ReplicaDeadError(self._cause)
        died.cancel()
        await playing
        return core.dismissed

    def note_death(self, cause: str) -> None:
        """Record that the engine is dead."""
        self._cause = self._cause or cause
        self._dead.set()

    async def _watch(self) -> None:
        """Poll for the death of the engine's processes, which vLLM does not report."""
        while not self._engine.errored:
            await asyncio.sleep(DEATH_POLL_S)
        self.note_death("a process of its engine is gone")

    async def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """Call a method of the engine. Raises ReplicaDeadError if the engine is dead or dies, which vLLM does not report."""
        call = asyncio.ensure_future(getattr(self._engine, method)(*args, **keywords))
        dead = asyncio.create_task(self._dead.wait())
        try:
            await asyncio.wait([call, dead], return_when=asyncio.FIRST_COMPLETED)
            if call.done() and (call.exception() is None or not self._engine.errored):
                return call.result()
            raise ReplicaDeadError(self._cause or str(call.exception()))
        finally:
            dead.cancel()
            call.cancel()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_key: str, request_id: str, emit: OnTokens | None = None
    ) -> Generation:
        """Sample a turn. `emit` receives the tokens as they are sampled."""
        stops = None
        if sampling.stop:
            await in_thread("load", self.words.load)
            stops = StopStrings(sampling.stop, self.words.decode)
        watch = TurnWatch(emit, stops)
        running = self._requests.setdefault(request_key, set())
        running.add(request_id)
        try:
            output = await self._sample(token_ids, sampling, request_id, watch)
            completion = output.outputs[0]
            ids, logprobs = _columns(output)
            # A publish in the middle of a request splits its tokens into spans, one per version.
            versions = [int(span.version) for span in completion.weight_versions or () for _ in range(span.start, span.end)]
            if len(versions) != len(ids):
                raise EngineError(f"vLLM reported a weights version for {len(versions)} of {len(ids)} tokens")
            end, experts = watch.end, None
            finish: Finish = "stop_string" if end is not None else _FINISH[completion.finish_reason]
            if sampling.experts_from is not None:  # the last token was not computed
                stop = len(token_ids) + len(ids[:end]) - 1
                answers = await self._call("collective_rpc", "agentrl_experts", args=(request_id, sampling.experts_from, stop))
                if (answer := next(filter(None, answers), None)) is None:
                    raise EngineError(f"vLLM does not know which experts the tokens of request {request_id} went to")
                data, shape, kind = answer
                experts = np.frombuffer(data, dtype=kind).reshape(shape)
        finally:
            running.discard(request_id)
            if not running:
                self._requests.pop(request_key, None)
        self._prompt_tokens += len(token_ids)
        self._cached_tokens += output.num_cached_tokens or 0
        self._sampled_tokens += len(ids[:end])
        return Generation(ids[:end], logprobs[:end], versions[:end], finish, experts=experts)

    async def _sample(self, token_ids: Sequence[int], sampling: Sampling, request_id: str, watch: TurnWatch) -> Any:
        """Return vLLM's last output for a request."""
        final = None
        try:
            params = _params(sampling, each=watch.listens)
            async for output in self._engine.generate(
                self._prompt(list(token_ids), images_in(token_ids)), params, request_id, lora_request=self._lora
            ):
                final = output
                if watch.listens and watch.take(*_columns(output, watch.count)):
                    await self._engine.abort(request_id)
        except EngineError:
            raise
        except Exception as problem:  # by the class the caller decides: another replica retries if the engine is dead
            kind = ReplicaDeadError if self._engine.errored else EngineError
            raise kind(f"{type(problem).__name__}: {problem}") from None
        if final is None:
            raise EngineError(f"vLLM gave no output for request {request_id}")
        return final

    async def generate_many(self, requests: Sequence[Request], live: Sequence[bool]) -> AsyncIterator[Answers]:
        """Run `generate` for each request and yield the answers as they arrive."""
        async for part in answer_batches(self.generate, requests, live):
            yield part

    async def pause(self) -> None:
        """Stop after the current step and drop all caches; running requests are recomputed after `resume`."""
        await self._call("pause_generation", mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._call("resume_generation")

    async def sleep(self, level: int) -> None:
        """Free the memory of weights (level 1 keeps a host copy, 2 none) and cache. The engine must be paused."""
        self._level, self.unfit = level, "the engine sleeps"
        await self._call("sleep", level, mode="keep")

    async def wake(self, tag: str) -> None:
        """Allocate the freed "weights" or "kv_cache" again; weights without a host copy are undefined."""
        await self._call("wake_up", tags=[tag])
        if self._level == 1 and tag == "kv_cache":
            self.unfit = ""

    async def begin_update(self) -> None:
        await self._call("collective_rpc", "agentrl_begin")

    async def load(self, data: npt.NDArray[np.uint8], bucket: Bucket) -> None:
        """Pass a kept bucket to the worker processes through a file in shared memory."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="agentrl-", dir=folder) as file:
            data.tofile(file)
            file.flush()
            await self._call("collective_rpc", "agentrl_load", args=(file.name, pickle.dumps(bucket)))

    async def attach(self, offer: Offer, base: int) -> str:
        """Open a route's receiver in every worker process, indices from `base` on. Returns the reason if one cannot, or ""."""
        # Pickled, since vLLM's calls to its processes take plain values only.
        answers: list[str] = await self._call("collective_rpc", "agentrl_attach", args=(pickle.dumps(offer), base))
        return next(filter(None, answers), "")

    async def receive(self, bucket: Bucket) -> None:
        """Load a bucket that arrives over the attached route."""
        await self._call("collective_rpc", "agentrl_receive", args=(pickle.dumps(bucket),))

    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Replace the adapter."""
        from vllm.lora.request import LoRARequest

        folder = tempfile.TemporaryDirectory(prefix="agentrl-adapter-")
        write_adapter(Path(folder.name), adapter)
        # Always the same id, replaced in place: a new id would need a second slot, and vLLM has one.
        await self._call("add_lora", LoRARequest("policy", 1, folder.name, load_inplace=True))
        # The folder must stay in case a worker has to load the adapter again for a request.
        self._lora, self._lora_folder = LoRARequest("policy", 1, folder.name), folder
        await self._call("reset_prefix_cache")  # it was computed with the old adapter
        await self._set_version(version)

    async def end_update(self, version: int | None) -> None:
        """End the update. `version`: None if it failed. Raises EngineError if vLLM loaded no weights for a layer."""
        untouched: list[list[str]] = await self._call("collective_rpc", "agentrl_end")
        await self._call("reset_prefix_cache")
        if version is not None and untouched[0]:
            raise EngineError(
                f"vLLM's loader of this model took no new weights for {', '.join(untouched[0][:3])} "
                f"({len(untouched[0])} layers), so it cannot be trained with engine = vllm; use engine = embedded"
            )
        if version is None:
            self.unfit = "new weights were only partly published"
            return
        self.unfit = ""
        await self._set_version(version)

    async def _set_version(self, version: int) -> None:
        self._version = version
        await self._call("update_weight_version", str(version))

    async def abort(self, request_key: str) -> None:
        for request_id in list(self._requests.get(request_key, ())):
            await self._engine.abort(request_id)

    async def cancel(self, request_id: str) -> None:
        if self._engine is not None:  # else closed, and its requests with it
            await self._engine.abort(request_id)

    def progress(self) -> TokenCounts:
        """Return request id -> number of sampled tokens."""
        states = self._engine.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    async def stats(self) -> EngineStats:
        """Return the counters; tokens count as they are sampled, and a request is waiting until its first token."""
        states = list(self._engine.output_processor.request_states.values())
        waiting = sum(state.is_prefilling for state in states)
        sampled = [state.detokenizer.num_output_tokens() for state in states]
        # vLLM's own figure needs its statistics, which cost time and are off. A shared prefix counts once per request, hence the
        # bound. None if this vLLM does not report the size of its cache.
        room: int | None = getattr(self._engine.vllm_config.cache_config, "kv_cache_size_tokens", None)
        held = sum(state.prompt_len for state in states) + sum(sampled)
        return EngineStats(
            running=len(states) - waiting,
            waiting=waiting,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled_tokens + sum(sampled),
            version=self._version,
            kv_used=min(held / room, 1.0) if room else None,
        )

    async def close(self) -> None:
        if self._engine is not None:
            self._watching.cancel()
            self._engine.shutdown()
            self._engine = None


def _columns(output: Any, start: int = 0) -> tuple[list[int], list[float]]:
    """Return the ids of a request's output from `start` on, and their log probabilities."""
    completion = output.outputs[0]
    ids, entries = list(completion.token_ids[start:]), (completion.logprobs or [])[start:]
    return ids, [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]


def _params(sampling: Sampling, *, each: bool) -> Any:
    """Build vLLM's SamplingParams. `each`: report tokens as they are sampled."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra: dict[str, Any] = {} if sampling.experts_from is None else {EXPERTS_KEY: True}
    if sampling.grammar is not None:
        extra[GRAMMAR] = sampling.grammar
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop_token_ids=list(sampling.stop_token_ids),
        # Only the renderer knows which tokens end a turn; vLLM's come from the model's files and may differ.
        ignore_eos=True,
        detokenize=False,
        # For the sampled token only; more would be computed and sent for every token.
        logprobs=0,
        extra_args=extra or None,
        # FINAL_ONLY: an output per token would wake the event loop each time; `progress` reads vLLM's states instead.
        output_kind=RequestOutputKind.CUMULATIVE if each else RequestOutputKind.FINAL_ONLY,
    )
