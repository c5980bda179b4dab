"""Rollout tokens per second through agentrl (collector, environment, renderer, ledger, vLLM engine) against raw
vLLM given the same token work: the opening and the answers of each episode as agentrl rendered them, turns of
the same forced length, an empty prefix cache at the start of a round. Rounds of the two alternate."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from work import CONTEXT, Forced, collector, publisher, vllm_section

from agentrl.backends.vllm.engine import VllmEngine
from agentrl.backends.vllm.options import environment
from agentrl.config import RolloutConfig
from agentrl.config.schema import InitModelConfig
from agentrl.render import make_renderer
from agentrl.rollout.collect import Collector
from agentrl.rollout.episode import Policy
from agentrl.train.init_model import init_model
from agentrl.train.pretrained import load_tokenizer
from agentrl.train.publish import Publisher
from agentrl.trajectory import Trajectory

TURNS, TOKENS = 3, 42


class RawVllm:
    """The process of raw_vllm.py, with the engine options and environment variables of agentrl's replica."""

    def __init__(self, model: str) -> None:
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
        }
        command = [sys.executable, str(Path(__file__).with_name("raw_vllm.py")), json.dumps(options)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment(False)},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def wait(self, word: str) -> str:
        """The rest of the next output line that begins with `word`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        self._log.seek(0)
        raise RuntimeError(f"raw vLLM ended: {self._log.read()[-1500:]}")

    def round(self, episodes: list[dict[str, Any]]) -> float:
        """Tokens per second of one round."""
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
    """The tokens of an episode that were not sampled: its opening and the tools' answers."""
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


async def one_round(collector: Collector, weights: Publisher) -> tuple[float, list[Trajectory]]:
    """Tokens per second of one update's groups; a publish before it empties the caches, as it does in training."""
    await collector.exchange(weights.send)
    start = time.perf_counter()
    groups = await collector.collect()
    seconds = time.perf_counter() - start
    collector.trained(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    assert all(t.sampled_tokens == TURNS * TOKENS for t in trajectories), {
        (t.sampled_tokens, t.stop, t.error) for t in trajectories
    }
    return sum(t.sampled_tokens for t in trajectories) / seconds, trajectories


async def compare(sizes: InitModelConfig, at_once: int, rounds: int) -> dict[str, Any]:
    """Compare the two. Both engines live from start to end; the one that is not measured is idle."""
    config = RolloutConfig(
        groups=at_once // 8,
        group_size=8,
        max_episodes=at_once,
        max_turns=TURNS,
        max_turn_tokens=TOKENS,
        max_episode_tokens=CONTEXT,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(sizes, Path(scratch) / "model", 0))
        raw = RawVllm(folder)
        engine = VllmEngine(folder, vllm_section(CONTEXT))
        try:
            raw.wait("READY")
            await engine.start()
            weights = publisher(folder, engine)
            driver = collector(Policy(engine, Forced(make_renderer(load_tokenizer(folder)))), config)
            through, bare = [], []
            for number in range(rounds + 1):
                rate, trajectories = await one_round(driver, weights)
                bare_rate = raw.round([work_of(t) for t in trajectories])
                if number:  # the first round warms both up
                    through.append(rate)
                    bare.append(bare_rate)
            await driver.close()
        finally:
            await engine.close()
            raw.close()
    return {
        "agentrl": statistics.median(through),
        "raw_vllm": statistics.median(bare),
        "ratio": statistics.median(a / b for a, b in zip(through, bare, strict=True)),
        "rounds": [[round(a), round(b)] for a, b in zip(through, bare, strict=True)],
    }


def run(sizes: InitModelConfig, at_once: int, rounds: int) -> dict[str, Any]:
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2)
    try:
        return asyncio.run(compare(sizes, at_once, rounds))
    finally:
        ray.shutdown()
