"""Compare rollout tokens per second of agentrl (collector, environment, renderer, ledger, vLLM engine) with raw vLLM on the same
token work: prompts and tool results as agentrl rendered them, turns of the same forced length, an empty prefix cache at the
start of each round. Rounds of both alternate."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from work import CONTEXT, Forced, collector, collector_of, publisher, run_env, vllm_section, workers

from agentrl.config import RolloutConfig
from agentrl.config.schema import InitModelConfig
from agentrl.data.trajectory import Trajectory
from agentrl.engines.vllm.options import PROCESSORS, environment
from agentrl.engines.vllm.vllm_engine import VllmEngine
from agentrl.render import make_renderer
from agentrl.rollout.collector import Collector
from agentrl.rollout.episode import Policy
from agentrl.trainer.pretrained import init_model, load_tokenizer

TURNS, TOKENS = 3, 42
EXACT = {"logprobs_mode": "processed_logits", "logits_processors": list(PROCESSORS)}
"""vLLM's options to report log probabilities as the trainer computes them (agentrl/engines/vllm/logprobs.py)."""


class RawVllm:
    """The process of raw_vllm.py, with the engine options and environment variables of agentrl's replica."""

    def __init__(self, model: str, **more: Any) -> None:
        options = {
            "model": model,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "block_size": 32,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "kv_cache_memory_bytes": 256 << 20,
            "max_model_len": CONTEXT,
            "enforce_eager": True,
            "dtype": "float32",
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": CONTEXT,
            "distributed_executor_backend": "uni",
            **more,
        }
        command = [sys.executable, str(Path(__file__).with_name("raw_vllm.py")), json.dumps(options)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment(False)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, word: str) -> str:
        """Return the rest of the next output line that starts with `word`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        self._log.seek(0)
        raise RuntimeError(f"raw vLLM ended: {self._log.read()[-1500:]}")

    def round(self, episodes: list[dict[str, Any]]) -> float:
        """Run one round and return its tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"tokens": TOKENS, "episodes": episodes}) + "\n")
        self._process.stdin.flush()
        seconds, sampled = json.loads(self.wait("RESULT"))
        return float(sampled / seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def work_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the tokens of an episode that were not sampled: its opening and the tool results."""
    [ledger] = trajectory.ledgers
    spans: list[list[int]] = []
    before = True
    for token, sampled in zip(ledger.ids(), ledger.sampled.tolist(), strict=True):
        if not sampled and before:
            spans.append([])
        if not sampled:
            spans[-1].append(token)
        before = sampled
    return {"opening": spans[0], "answers": spans[1:TURNS]}


async def one_round(collector: Collector) -> tuple[float, list[Trajectory]]:
    """Return tokens per second and episodes of one update's groups. Publish before, to empty the caches as in training."""
    start = time.perf_counter()
    groups = await collector.collect()
    seconds = time.perf_counter() - start
    collector.trained(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    assert all(t.sampled_tokens == TURNS * TOKENS for t in trajectories), {
        (t.sampled_tokens, t.stop, t.error) for t in trajectories
    }
    return sum(t.sampled_tokens for t in trajectories) / seconds, trajectories


@dataclass
class Spent:
    """Tokens per second, and processor seconds per 1000 tokens, of each round of one contender."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, rate: float, cpu: float, trajectories: list[Trajectory]) -> None:
        self.rates.append(rate)
        self.cpu.append(1000 * cpu / (TURNS * TOKENS * len(trajectories)))


class Processor:
    """Processor time of an engine's processes and of `others`; `read` returns the seconds since the last call."""

    def __init__(self, engine: int, *others: int) -> None:
        root = psutil.Process(engine)
        self._processes = [root, *root.children(recursive=True), *map(psutil.Process, others)]
        self.read()

    def read(self) -> float:
        now = sum(sum(process.cpu_times()[:2]) for process in self._processes)
        passed, self._last = now - getattr(self, "_last", now), now
        return passed


async def compare(sizes: InitModelConfig, at_once: int, rounds: int) -> dict[str, Any]:
    """Compare agentrl, with episodes in the driver or in a rollout worker of the replica, with raw vLLM, without and with
    the exact log probabilities of agentrl. All run from start to end; all but the measured one are idle."""
    config = RolloutConfig(
        groups=at_once // 8,
        group_size=8,
        max_episodes=at_once,
        max_turns=TURNS,
        max_turn_tokens=TOKENS,
        max_episode_tokens=CONTEXT,
    )
    found = {"raw_vllm": Spent(), "raw_exact": Spent(), "driver": Spent(), "worker": Spent()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(sizes, Path(scratch) / "model", 0))
        peers = {"raw_vllm": RawVllm(folder), "raw_exact": RawVllm(folder, **EXACT)}
        engine = VllmEngine(folder, vllm_section(CONTEXT))
        policy = Policy(engine, Forced(make_renderer(load_tokenizer(folder))))
        try:
            for peer in peers.values():
                peer.wait("READY")
            await engine.start()
            pool = workers(folder, policy, config, 1)
            await pool.start()
            weights = publisher(folder, engine)
            ways = {"driver": collector(policy, config), "worker": collector_of(pool, run_env(policy, config), config)}
            agentrl = Processor(engine._replicas.every[0].pid, os.getpid())
            processors = {name: Processor(peer.pid) for name, peer in peers.items()}
            for number in range(rounds + 1):
                for way, driver in ways.items():
                    await driver.exchange(weights.send)
                    agentrl.read()
                    rate, trajectories = await one_round(driver)
                    if number:  # the first round is a warm-up
                        found[way].add(rate, agentrl.read(), trajectories)
                for name, peer in peers.items():
                    processors[name].read()
                    rate = peer.round([work_of(t) for t in trajectories])
                    if number:
                        found[name].add(rate, processors[name].read(), trajectories)
            for driver in ways.values():
                await driver.close()
            await pool.close()
        finally:
            await engine.close()
            for peer in peers.values():
                peer.close()
    return {name: vars(spent) for name, spent in found.items()} | {"ratios": ratios_of(found)}


def ratios_of(found: dict[str, Spent]) -> dict[str, float]:
    """Return median ratios to raw vLLM over the rounds: tokens per second, and tokens per processor second (`_cpu`)."""
    raw, row = found["raw_vllm"], {}
    for way in ("driver", "worker", "raw_exact"):
        row[way] = statistics.median(a / b for a, b in zip(found[way].rates, raw.rates, strict=True))
        row[f"{way}_cpu"] = statistics.median(b / a for a, b in zip(found[way].cpu, raw.cpu, strict=True))
    return row


def run(sizes: InitModelConfig, at_once: int, rounds: int) -> dict[str, Any]:
    import ray

    # Rollout workers in the replica import the modules of this benchmark from the same path.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    try:
        return asyncio.run(compare(sizes, at_once, rounds))
    finally:
        ray.shutdown()
