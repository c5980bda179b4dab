"""The judges of a run on engines of its own (`reward.judge.engines`): made from the config, started with the run, asked by name.

All are in the driver, where every episode is scored that has a judge, whoever played it; an engine with processes of its own has
them beside the policy's. Weights are never published to them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.background import background
from agentrl.cluster.devices import has_gpus
from agentrl.config import TrainConfig
from agentrl.config.schema import ModelConfig, RolloutConfig
from agentrl.errors import ConfigError, hinted
from agentrl.render import make_renderer
from agentrl.reward import Context, Scorer
from agentrl.reward.judge import Verdict, VerdictCache, VerdictRequest
from agentrl.reward.judge.own import PREFIX, own_name
from agentrl.reward.leaf import JudgeClient
from agentrl.reward.node import LeafNode, walk
from agentrl.rollout.engine_maker import ENGINES, EngineMaker, Processes
from agentrl.rollout.judge import EngineJudge, JudgeLimits
from agentrl.run.contents import files_digest
from agentrl.run.engines import AUTO, maker_of
from agentrl.train.pretrained import load_tokenizer, model_context, named_anywhere, unused_ids

if TYPE_CHECKING:
    from agentrl.cluster.placement import Pools

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
    """Who makes the engine of a judge. Raises ConfigError for one that judges cannot be on."""
    engine, key = config.reward.judge.engines[name].engine, f"reward.judge.engines.{name}"
    able = sorted(entry.name for entry in ENGINES.own() if "judges" in entry.traits)
    if engine == AUTO or "judges" not in ENGINES.entry(engine).traits:
        raise ConfigError(f"{key}.engine = {engine!r}: no judge can be on it beside the policy's own; one of {', '.join(able)}")
    with told(key):
        maker = maker_of(engine, judge_config(config, name, positions))
    maker.on_gpus = partial(has_gpus, config.cluster, ROLE)
    return maker


@contextmanager
def told(key: str) -> Iterator[None]:
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
    """What the processes of a judge without a pool are called among a run's places."""
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
    tops = [scorer.root, *scorer.metrics, *([] if scorer.success is None else [scorer.success])]
    for node in (node for top in tops for node in walk(top)):
        if isinstance(node, LeafNode) and node.leaf.kind == "judge":
            name = own_name(str(node.leaf.args["model"]))
            if name is not None:
                yield OwnLeaf(f"{scorer.name}#{node.pointer}", name, node.leaf)


def check_names(scorers: Iterable[Scorer], engines: Mapping[str, Any], where: str = "reward.judge.engines") -> None:
    """Raise ConfigError for a leaf that asks a judge which `engines` do not have."""
    for found in (found for scorer in scorers for found in own_leaves(scorer)):
        if found.name not in engines:
            known = f"it has {', '.join(sorted(engines))}" if engines else "it has none"
            hint = hinted(found.name, engines)
            raise ConfigError(f"{found.at}: model = {PREFIX + found.name!r}: {where} has no judge of that name; {known}{hint}")


class Judges:
    """A run's own judges. What is asked of another model goes on to the judge behind it (`beside`)."""

    def __init__(self, config: TrainConfig, pools: Pools | None = None) -> None:
        """Nothing is made yet. `pools`: the run's."""
        self._config, self._pools, self._asked = config, pools, set[str]()
        self._judges: dict[str, EngineJudge] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._told: dict[str, Row] = {}
        self._paid: JudgeClient | None = None

    def beside(self, context: Context) -> Context:
        """A spec's context, with these judges for its leaves. What they ask of others is asked by one client for all specs, since
        its budget and its limit of calls at a time are the whole run's."""
        if context.judge is None:
            return context
        self._paid = self._paid or context.judge
        return replace(context, judge=_Either(self, self._paid) if self._config.reward.judge.engines else self._paid)

    def asked(self, scorers: Iterable[Scorer]) -> None:
        """Which specs will ask: only their judges are started. Raises ConfigError for one that the config does not have."""
        scorers = list(scorers)
        check_names(scorers, self._config.reward.judge.engines)
        self._asked |= {found.name for scorer in scorers for found in own_leaves(scorer)}

    @property
    def names(self) -> list[str]:
        """Of those that are asked."""
        return sorted(self._asked)

    async def start(self) -> None:
        """Start the engines of the judges that are asked; they answer on this event loop. Raises UserError or EngineError, and
        has then closed those that it started."""
        self._loop = asyncio.get_running_loop()
        try:
            for name in self.names:
                self._judges[name] = self._made(name)
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

    def _made(self, name: str) -> EngineJudge:
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
