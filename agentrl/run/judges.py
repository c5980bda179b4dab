"""Judges on engines of the run's own (`reward.judge.engines`): verdicts of models whose weights stay as they are."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from agentrl.cluster.placement import has_gpus
from agentrl.config import TrainConfig
from agentrl.config.schema import ModelConfig, RolloutConfig
from agentrl.data.trajectory import Json, Message
from agentrl.render import make_renderer
from agentrl.render.base import Renderer
from agentrl.reward import Context, Scorer
from agentrl.reward.judge import PREFIX, JudgeFault, Verdict, VerdictCache, VerdictRequest, form_of, own_name, read_verdict
from agentrl.reward.leaf import JudgeClient
from agentrl.reward.nodes import LeafNode, walk
from agentrl.rollout.engine import ENGINES, Engine, EngineMaker, Processes, Sampling
from agentrl.run.digests import files_digest
from agentrl.run.engine_choice import AUTO, maker_of
from agentrl.trainer.pretrained import load_tokenizer, model_context, named_anywhere, unused_ids
from agentrl.utils.errors import ConfigError, EngineError, PromptTooLongError, RenderError, hint_text
from agentrl.utils.event_loop import LateError, within
from agentrl.utils.redaction import redact_said
from agentrl.utils.threads import background

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools


# A judge on an engine

BACKOFF = 0.5
"""Seconds before the second attempt; each further one waits twice as long."""
NO_LIBRARY = (
    "verdicts are not held to their form, which takes llguidance, and those that do not fit it leave their episodes unscored: "
    "pip install 'agentrl[server]'"
)


def can_constrain() -> bool:
    """Return True if the library is there that keeps an engine to a grammar."""
    return importlib.util.find_spec("llguidance") is not None


@dataclass(slots=True)
class Counted:
    """Of one judge, since its start: verdicts asked for, how many were known (or shared), how many failed; tokens; and the
    seconds in which it had something to do."""

    verdicts: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """`timeout` (seconds) of an attempt, which is not counted before there is a place for it; `retries` after a fault of the
    engine; `concurrency`: places. `reasoning`: whether a verdict may come after one."""

    timeout: float = 60.0
    retries: int = 3
    concurrency: int = 64
    reasoning: bool = False


class EngineJudge:
    """One model on one engine. It answers on the event loop on which it was started; see the module."""

    def __init__(
        self, name: str, engine: Engine, renderer: Renderer, model: str, cache: VerdictCache, limits: JudgeLimits
    ) -> None:
        """`model`: what tells its weights apart, for the cache, which other runs may share."""
        self.name, self.counted = name, Counted()
        self._engine, self._renderer, self._model, self._cache, self._limits = engine, renderer, model, cache, limits
        self._running: dict[str, asyncio.Task[Verdict]] = {}
        self._places = asyncio.Semaphore(limits.concurrency)
        self._grammars: dict[str, str | None] = {}
        self._busy, self._since = 0, 0.0

    async def start(self) -> None:
        """Load the model. Raises UserError or EngineError."""
        await self._engine.start()

    async def close(self) -> None:
        """End requests in progress, and the engine; idempotent."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._engine.close()

    async def forget(self) -> None:
        """Drop all that was computed so far: the rest must not depend on it, since a run that goes on from a
        checkpoint knows nothing. Verdicts in a folder stay. Not while something is under way."""
        if not self._busy:
            self._cache.forget()
            await self._engine.forget()

    async def verdict(self, request: VerdictRequest) -> Verdict:
        """The verdict, which equal requests share. Cancelling ends the waiting only."""
        self.counted.verdicts += 1
        key = self._key(request)
        kept = self._cache.get(key, request.schema)
        if kept is not None:
            self.counted.cached += 1
            # Without a folder it was said in this very update, to whoever came first, which is a matter of luck beside workers.
            return Verdict(kept, cached=self._cache.folder is not None)
        running = self._running.get(key)
        if running is None:
            running = asyncio.create_task(self._answer(key, request), name=f"a verdict of judge {self.name}")
            self._running[key] = running
            running.add_done_callback(lambda _: self._running.pop(key, None))
        else:
            self.counted.cached += 1
        # shield: another episode may share this verdict and still wait for it.
        return await asyncio.shield(running)

    def _key(self, request: VerdictRequest) -> str:
        """Key of a verdict in the shared cache: the weights and how they are asked, and not how a config calls them."""
        asked = f"{self._model}\n{self._limits.reasoning}\n{replace(request, model='').key()}"
        return hashlib.sha256(asked.encode()).hexdigest()

    async def _answer(self, key: str, request: VerdictRequest) -> Verdict:
        if not self._busy:
            self._since = time.monotonic()
        self._busy += 1
        try:
            value, why = await self._attempts(key, request)
        finally:
            self._busy -= 1
            if not self._busy:
                self.counted.busy_s += time.monotonic() - self._since
        if value is None:
            self.counted.failed += 1
            return Verdict(None, error=redact_said(f"{request.model}: {why}"))
        self._cache.put(key, value)
        return Verdict(value)

    async def _attempts(self, key: str, request: VerdictRequest) -> tuple[Json, str]:
        """A verdict, or None and the fault of the last attempt."""
        why = ""
        for attempt in range(self._limits.retries + 1):
            if attempt:
                await asyncio.sleep(BACKOFF * 2 ** (attempt - 1))
            try:
                async with self._places:
                    work = self._attempt(request, f"judge/{self.name}/{key[:16]}")
                    return await within(self._limits.timeout, work, f"judge {self.name}"), ""
            except (PromptTooLongError, RenderError, JudgeFault) as fault:
                # It samples greedily: asked again it would say the same.
                return None, str(fault)
            except (EngineError, LateError) as fault:
                why = str(fault)
        return None, why

    async def _attempt(self, request: VerdictRequest, key: str) -> Json:
        messages = [Message(cast(Any, message["role"]), message["content"]) for message in request.messages]
        prompt = await self._renderer.astart(messages, [])
        sampling = Sampling(
            max_tokens=request.max_tokens,
            temperature=0.0,
            stop_token_ids=self._renderer.stop_token_ids,
            grammar=self._grammar(request),
        )
        generation = await self._engine.generate(prompt, sampling, key)
        self.counted.prompt_tokens += len(prompt)
        self.counted.sampled_tokens += len(generation.token_ids)
        if generation.finish == "abort":
            raise EngineError("the request was aborted")
        said = await self._renderer.aparse(generation.token_ids, generation.finish)
        try:
            return read_verdict(said.content, request)
        except JudgeFault as fault:
            if generation.finish != "length":
                raise
            cut = f"it was cut after {len(generation.token_ids)} tokens: raise the leaf's max_tokens, or max_model_len"
            raise JudgeFault(f"{fault} ({cut})", again=False) from fault

    def _grammar(self, request: VerdictRequest) -> str | None:
        """The grammar of a verdict; None if the renderer knows none, or the engine cannot keep to it."""
        form = form_of(request.schema, request.max_tokens)
        key = repr(form)
        if key not in self._grammars:
            self._grammars[key] = grammar_of(self._engine, self._renderer, form, self._limits.reasoning)
        return self._grammars[key]


def grammar_of(engine: Engine, renderer: Renderer, form: Mapping[str, Any], reasoning: bool) -> str | None:
    """The grammar of a turn that fits `form`, after a `reasoning` or none; None if the renderer knows none, or the engine cannot
    keep to it: verdicts are then read as they come."""
    try:
        grammar = renderer.grammar(form, reasons=reasoning)
    except RenderError:
        return None
    return None if engine.refusal(Sampling(max_tokens=1, grammar=grammar)) else grammar


# The judges of a run

ROLE = "judge"
"""In `cluster.roles`, of all judges that have processes of their own."""
Row = dict[str, float]


def judge_config(config: TrainConfig, name: str, positions: int | None = None) -> TrainConfig:
    """The config with the judge in the policy's place, as its engine's maker reads it. `positions`: of the model, if it is read
    already."""
    one = config.reward.judge.engines[name]
    longest = min(one.max_model_len, one.vllm.max_model_len, positions or one.max_model_len)
    own: dict[str, Any] = {
        "env": None,
        "engine": one.engine,
        "engine_args": one.engine_args,
        "model": ModelConfig(path=one.path, trust_remote_code=config.model.trust_remote_code, threads=config.model.threads),
        "rollout": RolloutConfig(max_episodes=one.concurrency, max_episode_tokens=longest),
        "vllm": one.vllm.model_copy(update={"max_model_len": longest}),
    }
    return config.model_copy(update=own)


def judge_maker(config: TrainConfig, name: str, positions: int | None = None) -> EngineMaker:
    """Maker of a judge's engine. Raises ConfigError for one that judges cannot be on."""
    engine, key = config.reward.judge.engines[name].engine, f"reward.judge.engines.{name}"
    able = sorted(entry.name for entry in ENGINES.own() if "judges" in entry.traits)
    if engine == AUTO or "judges" not in ENGINES.entry(engine).traits:
        raise ConfigError(f"{key}.engine = {engine!r}: no judge can be on it next to the policy's own; one of {', '.join(able)}")
    with name_judge_in_errors(key):
        maker = maker_of(engine, judge_config(config, name, positions))
    maker.on_gpus = partial(has_gpus, config.cluster, ROLE)
    return maker


@contextmanager
def name_judge_in_errors(key: str) -> Iterator[None]:
    """Begins a ConfigError with the judge's key."""
    try:
        yield
    except ConfigError as problem:
        raise ConfigError(f"{key}: {problem}") from problem


def judge_makers(config: TrainConfig) -> dict[str, EngineMaker]:
    """By name, who makes the engine of each judge."""
    return {name: judge_maker(config, name) for name in config.reward.judge.engines}


def judge_processes(config: TrainConfig) -> dict[str, Processes]:
    """The processes of each judge whose engine has some, by its name."""
    found = {name: maker.processes() for name, maker in judge_makers(config).items()}
    return {name: own for name, own in found.items() if own is not None}


def place_of(name: str) -> str:
    """Name of the processes of a judge without a pool, among a run's places."""
    return f"{ROLE} {name}"


def options_of(config: TrainConfig, name: str, pools: Pools | None) -> Sequence[Mapping[str, Any]]:
    """Ray's options for each process of a judge: those of its places; none if Ray finds them."""
    processes = judge_processes(config)
    if pools is None or name not in processes:
        return ()
    if ROLE not in pools:
        return pools.ray_options(place_of(name)) if place_of(name) in pools else ()
    # The judges share their pool, in the order of the config.
    first = sum(one.count for other, one in processes.items() if list(processes).index(other) < list(processes).index(name))
    return pools.ray_options(ROLE)[first : first + processes[name].count]


@dataclass(frozen=True, slots=True)
class OwnLeaf:
    """A judge leaf that asks a judge of the run's own: where it is in its spec, and the leaf."""

    at: str
    name: str
    leaf: Any


def own_leaves(scorer: Scorer) -> Iterator[OwnLeaf]:
    """The leaves of a spec that ask a judge of the run's own."""
    for node in (node for top in scorer.tops for node in walk(top)):
        if isinstance(node, LeafNode) and node.leaf.kind == "judge":
            name = own_name(str(node.leaf.args["model"]))
            if name is not None:
                yield OwnLeaf(f"{scorer.name}#{node.pointer}", name, node.leaf)


def check_names(scorers: Iterable[Scorer], engines: Mapping[str, Any], where: str = "reward.judge.engines") -> None:
    """Raise ConfigError for a leaf that asks a judge which `engines` do not have."""
    for found in (found for scorer in scorers for found in own_leaves(scorer)):
        if found.name not in engines:
            known = f"it has {', '.join(sorted(engines))}" if engines else "it has none"
            hint = hint_text(found.name, engines)
            raise ConfigError(f"{found.at}: model = {PREFIX + found.name!r}: {where} has no judge of that name; {known}{hint}")


class Judges:
    """A run's own judges. A question to another model goes on to the judge behind it (`beside`)."""

    def __init__(self, config: TrainConfig, pools: Pools | None = None) -> None:
        """Nothing is made yet. `pools`: the run's."""
        self._config, self._pools = config, pools
        self.names: list[str] = []
        """Of those that are asked."""
        self._judges: dict[str, EngineJudge] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._told: dict[str, Row] = {}
        self._paid: JudgeClient | None = None

    def beside(self, context: Context) -> Context:
        """A spec's context, with these judges for its leaves. Questions to other models go through one client, since
        its budget and its limit of calls at a time are the whole run's."""
        if context.judge is None:
            return context
        self._paid = self._paid or context.judge
        return replace(context, judge=_Either(self, self._paid) if self._config.reward.judge.engines else self._paid)

    def expect(self, scorers: Iterable[Scorer]) -> None:
        """Specs that will ask: only their judges are started. Raises ConfigError for one that the config does not have."""
        scorers = list(scorers)
        check_names(scorers, self._config.reward.judge.engines)
        self.names = sorted({*self.names, *(found.name for scorer in scorers for found in own_leaves(scorer))})

    async def start(self) -> None:
        """Start the engines of the judges that are asked; they answer on this event loop. Raises UserError or EngineError, and
        has then closed those that it started."""
        self._loop = asyncio.get_running_loop()
        try:
            for name in self.names:
                self._judges[name] = self._make(name)
                await self._judges[name].start()
        except BaseException:
            await self.close()
            self._loop = None  # who asks next starts them again, and hears why they do not
            raise

    async def close(self) -> None:
        """End the engines; idempotent."""
        judges, self._judges = self._judges, {}
        for judge in judges.values():
            await judge.close()

    async def forget(self) -> None:
        """As `EngineJudge.forget`, of all."""
        for judge in self._judges.values():
            await judge.forget()

    async def aask(self, request: VerdictRequest) -> Verdict:
        """The verdict of one of these judges, on whatever loop it is."""
        assert self._loop is not None
        answer = self._judges[str(own_name(request.model))].verdict(request)
        if asyncio.get_running_loop() is self._loop:
            return await answer
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def ask(self, request: VerdictRequest) -> Verdict:
        """The same, blocking, from a thread without an event loop; starts them if nobody did."""
        with self._starting:
            if self._loop is None:
                asyncio.run_coroutine_threadsafe(self.start(), background().loop).result()
        assert self._loop is not None
        answer = self._judges[str(own_name(request.model))].verdict(request)
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    def shut(self) -> None:
        """`close`, for who asked by `ask`."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.close(), self._loop).result()

    def metrics(self) -> Row:
        """Of each judge since the last call: verdicts, how many were known and how many failed, tokens, the seconds in which
        it had something to do, and sampled tokens in each of these."""
        row: Row = {}
        for name, judge in self._judges.items():
            now: Row = {key: float(value) for key, value in asdict(judge.counted).items()}
            before = self._told.get(name, dict.fromkeys(now, 0.0))
            self._told[name] = now
            since = {key: value - before[key] for key, value in now.items()}
            busy = since.pop("busy_s")
            row |= {f"judge/{name}/{key}": value for key, value in since.items()}
            row[f"time/judge/{name}_s"] = busy
            row[f"throughput/judge/{name}_tokens_per_s"] = since["sampled_tokens"] / max(busy, 1e-9)
        return row

    def _make(self, name: str) -> EngineJudge:
        config, judge = judge_config(self._config, name), self._config.reward.judge
        path, trust = judge.engines[name].path, config.model.trust_remote_code
        tokenizer = load_tokenizer(path, trust)
        maker = judge_maker(self._config, name)
        maker.unused = unused_ids(tokenizer, path, trust)
        engine = maker.make(named_anywhere(path), model_context(path, trust), options_of(self._config, name, self._pools))
        one = judge.engines[name]
        limits = JudgeLimits(judge.timeout, judge.retries, one.concurrency, one.reasoning)
        cache = VerdictCache(None if judge.cache is None else Path(judge.cache))
        renderer = make_renderer(tokenizer, day=config.model.date)
        return EngineJudge(name, engine, renderer, files_digest(path) or path, cache, limits)


class _Either:
    """Asks the run's own judges for their models, and `other` for all else."""

    def __init__(self, own: Judges, other: JudgeClient) -> None:
        self._own, self._other = own, other

    def ask(self, key: str, request: VerdictRequest) -> Verdict:
        answer: Verdict = self._own.ask(request) if own_name(request.model) else self._other.ask(key, request)
        return answer

    async def aask(self, key: str, request: VerdictRequest) -> Verdict:
        answer: Verdict = await (self._own.aask(request) if own_name(request.model) else self._other.aask(key, request))
        return answer
