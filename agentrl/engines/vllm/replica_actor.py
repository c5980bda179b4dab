"""One vLLM replica: AsyncLLM inside a Ray actor.

The stages of its start, the tokens of a turn as they are sampled, requests in segments, the actor."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from agentrl.engines.token_text import StopStrings, Words
from agentrl.engines.vllm.images import prompts_of
from agentrl.engines.vllm.options import BEFORE, GRAMMAR, check_calls, settle_scratch, tells_versions
from agentrl.engines.vllm.replica_calls import Answers, Paced, ReplicaDeadError, Request, answer_batches, settle
from agentrl.engines.weights.base import Adapter, Offer, PlainBucket
from agentrl.engines.weights.parameters import write_adapter
from agentrl.rollout.engine import EngineStats, Finish, Generation, Sampling, Told
from agentrl.rollout.workers.channel import Door
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
"""Ray's concurrency group of `VllmActor.stage`: a thread of its own, which answers while the start blocks the actor's loop."""
EVERY_S = 2.0


class StartStage:
    """Follows one start, in the replica. `imported`: the replica's own process has vLLM."""

    def __init__(self) -> None:
        self.imported = self._loading = False

    def now(self) -> str:
        """The stage, in a few words."""
        if not self.imported:
            return IMPORT
        maps = "".join(_maps())
        if ".safetensors\n" in maps or ".bin\n" in maps:
            self._loading = True
            return WEIGHTS
        if self._loading:
            return CACHE
        return PREPARE if "/vllm/_C" in maps else ENGINE


def _maps() -> Iterator[str]:
    """The files in the memory of this process's children, as Linux lists them; nothing elsewhere."""
    for child in psutil.Process().children(recursive=True):
        with suppress(OSError):  # psutil's own reads smaps, which takes long and holds the process up
            yield Path(f"/proc/{child.pid}/maps").read_text()


# Tokens of a turn


class TurnWatch:
    """Of one turn, over all its segments (segments.py)."""

    def __init__(self, told: Told | None, stops: StopStrings | None) -> None:
        self._told, self._stops = told, stops
        self.count = 0
        self.end: int | None = None

    @property
    def wanted(self) -> bool:
        """True if tokens are wanted before the turn is over."""
        return self._told is not None or self._stops is not None

    def begin(self) -> None:
        """A segment begins; `count` and `end` are numbers of its tokens."""
        self.count, self.end = 0, None

    def heard(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
        """The segment's next tokens. Whether a stop string ends the turn among them, after `end` tokens of the segment; what
        vLLM samples until it hears of that is not listened to."""
        if self.end is not None or not token_ids:
            return False
        kept = len(token_ids)
        if self._stops is not None:
            kept = next((n for n, number in enumerate(token_ids, 1) if self._stops.completed(number)), kept + 1)
            if kept <= len(token_ids):
                self.end = self.count + kept
        self.count += len(token_ids)
        if self._told is not None:
            self._told(token_ids[:kept], logprobs[:kept])
        return self.end is not None


# A request as several, on a vLLM that does not say which weights sampled which token.
#
# Before weights change, every request is ended and keeps what it has sampled; afterwards it goes on as another request whose
# prompt
# ends with those tokens. So nothing that vLLM answers spans two versions, and each token has the version of its segment. What is
# computed again, the prefix, a vLLM with spans computes again too, since no cache outlives an update.

RETRY_S = 0.01
"""Between two attempts to end requests on their way into the engine."""


@dataclass(slots=True)
class SegmentedRequest:
    """A request's samples in its segments so far; `stopped` is set once its caller wants no more."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: npt.NDArray[Any] | None = None
    segments: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def rest(self, sampling: Sampling) -> Sampling:
        """The sampling of its next segment. The seed is another one in each: drawn with the same numbers as the first, its tokens
        would depend on the earlier ones in a way that the policy does not have."""
        seed = sampling.seed
        # The first segment keeps the caller's seed: without an update in between, the tokens are those of an uncut request.
        if seed is not None and self.segments:
            # SeedSequence takes no negative numbers, and what comes out has to fit a signed 64-bit integer.
            seed = int(np.random.SeedSequence((seed % 2**63, self.segments)).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return replace(sampling, max_tokens=sampling.max_tokens - len(self.token_ids), seed=seed)

    def add(self, part: Generation) -> None:
        """A segment is over."""
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.versions += part.versions
        self.experts = part.experts  # only a vLLM that needs no segments tells them
        self.segments += 1

    def over(self, finish: Finish) -> Generation:
        """All segments together."""
        return Generation(self.token_ids, self.logprobs, self.versions, finish, experts=self.experts)


class Segments:
    """The gate in front of vLLM: closed while weights change. `abort` ends requests, which then return what they sampled."""

    def __init__(self, abort: Callable[[list[str]], Awaitable[None]]) -> None:
        self._abort = abort
        self._open = asyncio.Event()
        self._open.set()
        self._inside: set[str] = set()
        self._cut: set[str] = set()

    async def enter(self, request_id: str, request: SegmentedRequest) -> bool:
        """Wait until the gate is open; False if the request was stopped meanwhile. `leave` must follow."""
        # A loop: before this task gets its turn, the gate that opened may have closed again for the next weights.
        while not self._open.is_set() and not request.stopped.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self._open, request.stopped)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if request.stopped.is_set():
            return False
        self._inside.add(request_id)  # at once: a request that `close` does not see here must not get in
        return True

    def leave(self, request_id: str) -> bool:
        """vLLM has answered. Whether that was because the gate closed, so that the request goes on when it opens."""
        self._inside.discard(request_id)
        cut = request_id in self._cut
        self._cut.discard(request_id)
        return cut

    async def close(self) -> None:
        """Let nothing in, and end all that is inside; returns when all of it has left."""
        # First, so that nobody enters while the loop waits, which then ends.
        self._open.clear()
        while self._inside:
            # Before the abort: an answer may come while it is awaited, and would pass for the request's own end.
            self._cut |= self._inside
            await self._abort(sorted(self._inside))
            # Again, because vLLM ignores an abort of what has entered here and not yet reached it.
            await asyncio.sleep(RETRY_S)

    def open(self) -> None:
        self._open.set()


# The actor

ASKED = "agentrl_experts"
"""In a request's extra arguments: its experts will be asked for (experts.py)."""
DEATH_LOOK = 0.5
"""Seconds between two looks whether the engine lives."""
_FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


def check_sees(model: str) -> None:
    """Raise ModelError for an absolute path that is not a folder here: vLLM would take it for the name of a model on a hub."""
    if Path(model).is_absolute() and not Path(model).is_dir():
        raise ModelError(
            f"{model}: not a folder on {socket.gethostname()}. All nodes must see the model, and the run's folder if the model "
            "is built in it, at the same path (model.path, out)"
        )


def possible(args: Any) -> Any:
    """AsyncEngineArgs without the prefix cache if vLLM has none for the model: states of recurrent layers are kept at the ends of
    chunks of a prompt, and CPUs compute prompts in one (options.py)."""
    if args.enable_prefix_caching and args.enable_chunked_prefill is False and args.create_model_config().has_inner_state:
        args.enable_prefix_caching = False
    return args


def prompt_of() -> Callable[[list[int]], Any]:
    """Token ids to the form in which the installed vLLM takes them without looking for text: a prompt of any other form goes
    through a thread, where it is tokenized. Imports vLLM."""
    try:
        from vllm.inputs.engine import tokens_input
    except ImportError:  # before 0.32
        return lambda token_ids: {"prompt_token_ids": token_ids}
    made: Callable[[list[int]], Any] = tokens_input
    return made


class VllmActor:
    """See `VllmEngine`; methods run on the actor's own event loop."""

    def __init__(self, options: dict[str, Any]) -> None:
        """`options`: keyword arguments for vLLM's AsyncEngineArgs."""
        guard_process(options)
        self._options = options
        self._words = Words(str(options["model"]), trust=bool(options.get("trust_remote_code")))
        self._engine: Any = None
        self._requests: dict[str, dict[str, SegmentedRequest]] = {}
        self._prompt_tokens = self._cached_tokens = self._sampled_tokens = 0
        self._version = 0
        self._lora: Any = None
        self._lora_folder: tempfile.TemporaryDirectory[str] | None = None
        self._unfit = self._cause = ""
        self._level = 0
        self._dead = asyncio.Event()
        self._stage = StartStage()

    async def stage(self) -> str:
        """The stage of `start`, on another thread than that."""
        return self._stage.now()

    async def node(self) -> str:
        """Ray's id of this machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def start(self) -> int:
        """Load the model; returns the process id. Raises DependencyError for a vLLM that lacks a call that is made here,
        ModelError for a folder that this machine does not see."""
        check_sees(str(self._options["model"]))
        settle_scratch()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_calls()
        self._spans = tells_versions()
        self._prompt = prompts_of(self._options, prompt_of())
        self._stage.imported = True
        self._engine = AsyncLLM.from_engine_args(possible(AsyncEngineArgs(**self._options)))
        self._segments = Segments(lambda requests: self._engine.abort(requests))
        self._watching = asyncio.create_task(self._watch())
        self.context = int(self._engine.model_config.max_model_len)
        await self._set_version(0)
        settle(self)
        return os.getpid()

    async def play(self, name: str, door: Door, recipe: WorkerRecipe, spool: str | None) -> bool:
        """Host a rollout worker until the driver dismisses it (True) or its connection is lost. `spool`: see `WorkerCore`. Raises
        ReplicaDeadError if the engine dies meanwhile, and the worker with it."""
        core = WorkerCore(name, recipe.build, None if spool is None else Path(spool))
        playing, died = asyncio.create_task(core.run(door)), asyncio.create_task(self._dead.wait())
        await asyncio.wait([playing, died], return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            core.abandon()
            raise ReplicaDeadError(self._cause)
        died.cancel()
        await playing
        return core.dismissed

    def died(self, cause: str) -> None:
        """The engine inside is dead."""
        self._cause = self._cause or cause
        self._dead.set()

    async def _watch(self) -> None:
        """Notice the death of the engine's processes, which vLLM notes and tells nobody."""
        while not self._engine.errored:
            await asyncio.sleep(DEATH_LOOK)
        self.died("a process of its engine is gone")

    async def _call(self, method: str, *args: Any, **keywords: Any) -> Any:
        """A method of the engine. Raises ReplicaDeadError if the engine is dead or dies, which vLLM reports to no call."""
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

    def refusal(self, sampling: Sampling) -> str:
        """`Engine.refusal`."""
        return self._words.refusal(sampling)

    def check_fit(self) -> None:
        """Raise EngineError while the weights are not whole."""
        if self._unfit:
            raise EngineError(f"no generation until a publish succeeds: {self._unfit}")

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, request_key: str, request_id: str, told: Told | None = None
    ) -> Generation:
        """`told`: gets the tokens as they are sampled."""
        if sampling.stop:
            await in_thread("load", self._words.load)
        watch = TurnWatch(told, self._words.stops(sampling))
        request = self._requests.setdefault(request_key, {}).setdefault(request_id, SegmentedRequest())
        finish: Finish = "abort"
        try:
            while await self._segments.enter(request_id, request):
                finish, cut = await self._sample(token_ids, sampling, request_id, request, watch)
                if finish != "abort" or not cut or request.stopped.is_set():
                    break
        finally:
            self._segments.leave(request_id)
            self._requests[request_key].pop(request_id, None)
            if not self._requests[request_key]:
                del self._requests[request_key]
        self._prompt_tokens += len(token_ids)
        return request.over(finish)

    async def _sample(
        self, token_ids: Sequence[int], sampling: Sampling, request_id: str, request: SegmentedRequest, watch: TurnWatch
    ) -> tuple[Finish, bool]:
        """One request to vLLM, for the rest of `request`: how it ended, and whether that was for an update of the weights."""
        final = None
        try:
            prompt = self._prompt(token_ids, request.token_ids)
            params = _params(request.rest(sampling), len(request.token_ids), each=watch.wanted)
            watch.begin()
            async for output in self._engine.generate(prompt, params, request_id, lora_request=self._lora):
                final = output
                if watch.wanted and watch.heard(*_columns(output, watch.count)):
                    await self._engine.abort(request_id)
        except EngineError:
            raise
        except Exception as problem:  # the caller decides by the type: a dead engine means another replica may retry
            kind = ReplicaDeadError if self._engine.errored else EngineError
            raise kind(f"{type(problem).__name__}: {problem}") from None
        finally:
            cut = self._segments.leave(request_id)
        if final is None:
            raise EngineError(f"vLLM gave no output for request {request_id}")
        part = self._read(final, watch.end)
        if sampling.experts_from is not None:
            tokens = len(token_ids) + len(request.token_ids) + len(part.token_ids)
            part = replace(part, experts=await self._experts(request_id, sampling.experts_from, tokens - 1))
        request.add(part)
        return part.finish, cut

    async def _experts(self, request_id: str, start: int, stop: int) -> npt.NDArray[Any]:
        """The experts that a request's tokens [start, stop) went to, or those of them that were computed."""
        answers = await self._call("collective_rpc", "agentrl_experts", args=(request_id, start, stop))
        if (found := next(filter(None, answers), None)) is None:
            raise EngineError(f"vLLM does not know which experts the tokens of request {request_id} went to")
        data, shape, kind = found
        return np.frombuffer(data, dtype=kind).reshape(shape)

    async def generate_many(self, requests: Sequence[Request], live: Sequence[bool]) -> AsyncIterator[Answers]:
        """`generate` for each, with the answers as they arrive (see request_batcher.py)."""
        async for part in answer_batches(self.generate, requests, live):
            yield part

    async def pause(self) -> None:
        """Stop after the current step and drop all caches: running requests are computed again after `resume`."""
        if not self._spans:
            await self._segments.close()
        await self._call("pause_generation", mode="keep", clear_cache=True)

    async def resume(self) -> None:
        await self._call("resume_generation")
        self._segments.open()

    async def sleep(self, level: int) -> None:
        """Free the memory of the weights (level 1 keeps a copy on the host, 2 none) and of the cache. The engine is paused."""
        self._level, self._unfit = level, "the engine sleeps"
        await self._call("sleep", level, mode="keep")

    async def wake(self, tag: str) -> None:
        """Allocate what `sleep` freed of "weights" or "kv_cache"; of weights without a copy the numbers are undefined."""
        await self._call("wake_up", tags=[tag])
        if self._level == 1 and tag == "kv_cache":
            self._unfit = ""

    async def begin_update(self) -> None:
        await self._call("collective_rpc", "agentrl_begin")

    async def load(self, data: npt.NDArray[np.uint8], plain: PlainBucket) -> None:
        """Hand one kept bucket to the worker processes through a file in shared memory."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="agentrl-", dir=folder) as file:
            data.tofile(file)
            file.flush()
            await self._call("collective_rpc", "agentrl_load", args=(file.name, plain))

    async def attach(self, offer: Offer, base: int) -> str:
        """Open a route's receiver in every worker process; indices start at `base`. Returns why one cannot be served, or ""."""
        # vLLM's call to its processes serializes plain values only.
        plain = (offer.route, offer.slot_bytes, offer.receivers, list(offer.where))
        answers: list[str] = await self._call("collective_rpc", "agentrl_attach", args=(plain, base))
        return next(filter(None, answers), "")

    async def receive(self, plain: PlainBucket) -> None:
        """Load a bucket that arrives over the attached route."""
        await self._call("collective_rpc", "agentrl_receive", args=(plain,))

    async def adapt(self, version: int, adapter: Adapter) -> None:
        """Use an adapter from now on, instead of the previous one."""
        from vllm.lora.request import LoRARequest

        folder = tempfile.TemporaryDirectory(prefix="agentrl-adapter-")
        write_adapter(Path(folder.name), adapter)
        # The same id each time, replaced in place: a new id would take another of vLLM's slots, of which there is one.
        await self._call("add_lora", LoRARequest("policy", 1, folder.name, load_inplace=True))
        # Requests name the loaded adapter; its folder must stay in case a worker has to load it again.
        self._lora, self._lora_folder = LoRARequest("policy", 1, folder.name), folder
        await self._call("reset_prefix_cache")  # keys and values of the old adapter
        await self._set_version(version)

    async def end_update(self, version: int | None) -> None:
        """End the update; `version` is None if it failed. Raises EngineError if vLLM left out a layer of a whole update."""
        untouched: list[list[str]] = await self._call("collective_rpc", "agentrl_end")
        await self._call("reset_prefix_cache")
        if version is not None and untouched[0]:
            raise EngineError(
                f"vLLM's loader of this model took no new weights for {', '.join(untouched[0][:3])} "
                f"({len(untouched[0])} layers), so it cannot be trained with engine = vllm; use engine = embedded"
            )
        if version is None:
            self._unfit = "new weights were only partly published"
            return
        self._unfit = ""
        await self._set_version(version)

    async def _set_version(self, version: int) -> None:
        self._version = version
        if self._spans:
            await self._call("update_weight_version", str(version))

    async def abort(self, request_key: str) -> None:
        for request_id, request in list(self._requests.get(request_key, {}).items()):
            request.stopped.set()
            await self._engine.abort(request_id)

    async def cancel(self, request_id: str) -> None:
        for requests in self._requests.values():
            if request_id in requests:
                requests[request_id].stopped.set()
        if self._engine is not None:  # else closed, and its requests with it
            await self._engine.abort(request_id)

    async def progress(self) -> Paced:
        """The progress of each request, its earlier segments included."""
        return self.told()

    def told(self) -> Paced:
        """`progress`, in this process."""
        states = self._engine.output_processor.request_states.values()
        told = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}
        for requests in self._requests.values():
            for name, request in requests.items():
                if request.segments:
                    told[name] = told.get(name, 0) + len(request.token_ids)
        return told

    async def stats(self) -> EngineStats:
        """Tokens are counted as they are sampled, not only when a request finishes; a request counts as waiting until
        its first token."""
        states = list(self._engine.output_processor.request_states.values())
        waiting = sum(state.is_prefilling for state in states)
        return EngineStats(
            running=len(states) - waiting,
            waiting=waiting,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            sampled_tokens=self._sampled_tokens + sum(state.detokenizer.num_output_tokens() for state in states),
            version=self._version,
            kv_used=self._kv_used(states),
        )

    def _kv_used(self, states: Sequence[Any]) -> float | None:
        """Tokens of the cache that requests hold; None if this vLLM does not tell its size. vLLM's own number comes with its
        statistics, which cost time and are turned off. A prefix that requests share counts for each, hence the bound."""
        room: int | None = getattr(self._engine.vllm_config.cache_config, "kv_cache_size_tokens", None)
        if not room:
            return None
        held: int = sum(state.prompt_len + state.detokenizer.num_output_tokens() for state in states)
        return min(held / room, 1.0)

    async def close(self) -> None:
        if self._engine is not None:
            self._watching.cancel()
            self._engine.shutdown()
            self._engine = None

    def _read(self, output: Any, end: int | None) -> Generation:
        """`end`: how many tokens of it are the turn's, if a stop string ended it."""
        completion = output.outputs[0]
        ids, logprobs = _columns(output)
        versions = self._versions(completion, len(ids))
        if len(versions) != len(ids):
            raise EngineError(f"vLLM reported a weights version for {len(versions)} of {len(ids)} tokens")
        finish: Finish = "stop_string" if end is not None else _FINISH[completion.finish_reason]
        found = Generation(ids[:end], logprobs[:end], versions[:end], finish)
        self._cached_tokens += output.num_cached_tokens or 0
        self._sampled_tokens += len(found.token_ids)
        return found

    def _versions(self, completion: Any, count: int) -> list[int]:
        """The version of each token: a publish in the middle of a request splits its tokens into spans, one per version."""
        if not self._spans:
            return [self._version] * count  # all of one version (segments.py), and the weights change only when none is inside
        versions: list[int] = []
        for span in completion.weight_versions or []:
            versions += [int(span.version)] * (span.end - span.start)
        return versions


def _columns(output: Any, start: int = 0) -> tuple[list[int], list[float]]:
    """The ids of a request's output from `start` on, and their log probabilities."""
    completion = output.outputs[0]
    ids, entries = list(completion.token_ids[start:]), (completion.logprobs or [])[start:]
    return ids, [entry[token].logprob for token, entry in zip(ids, entries, strict=True)]


def _params(sampling: Sampling, before: int, *, each: bool) -> Any:
    """`before`: how many tokens of the turn are in the prompt. `each`: whether each of its tokens is waited for."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra: dict[str, Any] = {} if sampling.experts_from is None else {ASKED: True}
    if sampling.grammar is not None:
        extra |= {GRAMMAR: sampling.grammar, BEFORE: before}
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=None if sampling.seed is None else sampling.seed % 2**63,
        stop_token_ids=list(sampling.stop_token_ids),
        # Only the renderer knows which tokens end a turn; vLLM's own idea comes from the model's files and may differ.
        ignore_eos=True,
        detokenize=False,
        # Of the sampled token alone; each further one would be computed and sent for every token.
        logprobs=0,
        extra_args=extra or None,
        # An output per token would wake the event loop for each; progress is read from vLLM's states (`told`).
        output_kind=RequestOutputKind.CUMULATIVE if each else RequestOutputKind.FINAL_ONLY,
    )
