"""Measure the trainer on a CPU: a GRPO step against TRL, packed and prefix-shared against padded updates, chunked
logprobs against full logits, and the share of a step outside the model.

    python benchmarks/train.py [--only trl|forms|logprobs|overhead] [--quick]

Every figure is a ratio of two measurements of one run; a peer that cannot be installed gives null, and the
reason is printed. TRL has a separate virtual environment (.ci/integrations.py creates it). What one thread computes is
timed in processor seconds, which other load affects less; the GRPO step in wall-clock time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers niceness 15. Peers run at 0, so other load would slow only agentrl.
os.environ.setdefault("RAY_worker_niceness", "0")

sys.path.insert(0, str(Path(__file__).parent / "parts"))

import grpo_step
import numpy as np
import torch
from tensordict import TensorDict
from work import MILLION

from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, ClusterConfig, EnvConfig, ModelConfig, OptimConfig, TrainConfig
from agentrl.data.rows import Ragged, collate, nested_tensor, offsets_of
from agentrl.data.token_ledger import TokenLedger
from agentrl.data.trajectory import Task, Trajectory
from agentrl.trainer.actor import Actor
from agentrl.trainer.fsdp import FsdpEngine
from agentrl.trainer.learner import Learner
from agentrl.trainer.pretrained import init_model
from agentrl.trainer.update import Pack
from agentrl.utils.processor import raise_gc_threshold

Results = tuple[dict[str, Any], dict[str, Any]]


def median(call: Callable[[], Any], repeats: int) -> float:
    """Return the median CPU seconds of a call, after a warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return sorted(times)[len(times) // 2]


def ragged_batch(rows: int, seed: int = 0) -> Any:
    """Make rows of lognormal length (median 120 tokens, at most 1024), two turns each."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for index in range(rows):
        ledger = TokenLedger()
        total = int(np.clip(rng.lognormal(np.log(120), 0.7), 8, 1024))
        for turn in range(2):
            ledger.append_context(rng.integers(7, 400, size=total // 4).tolist(), turn)
            n = total // 4
            ledger.append_sampled(rng.integers(7, 400, size=n).tolist(), [-6.0] * n, [0] * n, turn)
        task = Task(id=str(index // 8), seed=index // 8)
        trajectories.append(Trajectory("bench", task, member=index % 8, ledgers=[ledger], reward=float(index % 2)))
    batch = collate(trajectories)
    sampled = batch["sampled"]
    return batch.update({"advantages": nested_tensor(sampled.values().float(), offsets_of(sampled))})


def padded_pass(model: Any, ids: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor) -> None:
    """Run a padded trainer's pass: a batch padded to its longest row, with logits of every token."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
    (chosen * wanted[:, 1:]).sum().backward()  # type: ignore[no-untyped-call]


def _one_step(learner: Learner, batch: TensorDict) -> None:
    asyncio.run(learner.step(batch, 0))


def packed_against_padded(folder: str, repeats: int) -> dict[str, float]:
    """Measure forward and backward over 32 rows: one padded batch, 4 padded batches sorted by length, and packed."""
    from transformers import AutoModelForCausalLM

    batch = ragged_batch(32)
    tokens = int(offsets_of(batch["token_ids"])[-1])
    engine = FsdpEngine(folder, ModelConfig(), 1.0)

    def packed() -> None:
        piece = Pack(Ragged.of(batch), list(range(32)), engine.device)
        logprobs, _ = engine.logprobs(piece.micro, 1.0, False)
        engine.backward(logprobs.sum(), last=True)

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    rows = [batch["token_ids"][i] for i in range(32)]
    flags = [batch["sampled"][i].float() for i in range(32)]
    order = sorted(range(32), key=lambda i: len(rows[i]))

    def padded(groups: list[list[int]]) -> None:
        for group in groups:
            pad = torch.nn.utils.rnn.pad_sequence
            ids = pad([rows[i] for i in group], batch_first=True)
            mask = pad([torch.ones_like(rows[i]) for i in group], batch_first=True)
            padded_pass(model, ids, mask, pad([flags[i] for i in group], batch_first=True))

    seconds = {
        "packed": median(packed, repeats),
        "padded": median(lambda: padded([list(range(32))]), repeats),
        "sorted": median(lambda: padded([order[i : i + 8] for i in range(0, 32, 8)]), repeats),
    }
    return {
        "packed_tokens_per_cpu_second": tokens / seconds["packed"],
        "packed_over_padded": seconds["padded"] / seconds["packed"],
        "packed_over_sorted_padded": seconds["sorted"] / seconds["packed"],
    }


def grouped_batch(groups: int, prompt: int, response: int) -> Any:
    """Make groups of 8 rows that share a prompt, with one response per row, all of the same length."""
    rng = np.random.default_rng(0)
    trajectories = []
    for group in range(groups):
        head = rng.integers(7, 400, size=prompt).tolist()
        for member in range(8):
            ledger = TokenLedger()
            ledger.append_context(head, 0)
            ledger.append_sampled(rng.integers(7, 400, size=response).tolist(), [-6.0] * response, [0] * response, 0)
            task = Task(id=str(group), seed=group)
            trajectories.append(Trajectory("bench", task, member=member, ledgers=[ledger], reward=float(member % 2)))
    return collate(trajectories, groups=[index // 8 for index in range(groups * 8)])


def shared_against_packed(folder: str, repeats: int) -> dict[str, float]:
    """Measure a GRPO update of two groups with and without prefix sharing: prompts of 1024 and 256, responses of 256."""
    results = {}
    for prompt in (1024, 256):
        batch = grouped_batch(2, prompt, 256)
        seconds = {}
        for mode in ("off", "on"):
            config = TrainConfig(
                env=EnvConfig(id="key_value"),
                algorithm=AlgorithmConfig(minibatch=16),
                cluster=ClusterConfig(backend="inline"),
                optim=OptimConfig(micro_tokens=16384, prefix_sharing=mode),
            )
            actors = launch(Actor, backend="inline", world_size=1)
            actors.run(Actor.init_model, folder, config.model, config.optim)
            learner = Learner(config, actors)
            seconds[mode] = median(partial(_one_step, learner, batch), repeats)
            actors.close()
        tokens = int(offsets_of(batch["token_ids"])[-1])
        results[f"packed_{prompt}_tokens_per_cpu_second"] = tokens / seconds["off"]
        results[f"shared_over_packed_{prompt}"] = seconds["off"] / seconds["on"]
        results[f"products_over_shared_{prompt}"] = products(2, prompt, 256, False) / products(2, prompt, 256, True)
    return results


def products(groups: int, prompt: int, response: int, shared: bool) -> float:
    """Count the multiplications of `shared_against_packed`'s update, forward and backward: three per weight and token, seven per
    pair of tokens of which one attends to the other (two products forward, five backward). Nothing else is counted."""
    one, heads = MILLION, MILLION.heads * MILLION.head_dim
    keys = MILLION.kv_heads * MILLION.head_dim
    weights = 2 * one.hidden * heads + 2 * one.hidden * keys + 3 * one.hidden * one.mlp
    rows, length = 8, prompt + response
    if shared:
        tokens = prompt + rows * response
        pairs = prompt**2 / 2 + rows * (response * prompt + response**2 / 2)
    else:
        tokens, pairs = rows * length, rows * length**2 / 2
    return groups * one.layers * (3 * weights * tokens + 7 * heads * pairs)


LOGPROBS = """
import sys, time, torch
from pathlib import Path
from types import SimpleNamespace
from agentrl.trainer.language_model import HeadRule

def peak():
    # VmHWM, because ru_maxrss is inherited from the parent process
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

torch.manual_seed(0)
tokens, vocabulary, width = (int(x) for x in sys.argv[2:5])
h = torch.randn(tokens, width, requires_grad=True)
w = torch.randn(vocabulary, width, requires_grad=True)
y = torch.randint(0, vocabulary, (tokens,))
base, start = peak(), time.process_time()
if sys.argv[1] == "full":
    torch.log_softmax((h @ w.t()).float(), -1).gather(1, y[:, None]).sum().backward()  # type: ignore[no-untyped-call]
else:
    head = SimpleNamespace(weight=w, bias=None)
    HeadRule().logprobs(h, head, y, chunk=256, entropy=False)[0].sum().backward()  # type: ignore[no-untyped-call]
print(time.process_time() - start, peak() - base)
"""


def chunked_logprobs(quick: bool) -> dict[str, float]:
    """Compare time and extra peak memory with full logits, each in a separate process."""
    sizes = ("1024", "50000", "256") if quick else ("2048", "100000", "512")
    results = {}
    for kind in ("full", "chunked"):
        command = [sys.executable, "-c", LOGPROBS, kind, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        results[kind] = [float(x) for x in done.stdout.split()[-2:]]
    return {
        "chunked_time_over_full": results["chunked"][0] / results["full"][0],
        "chunked_memory_over_full": results["chunked"][1] / results["full"][1],
    }


def trl(quick: bool) -> Results:
    """Compare the seconds of a TRL step with those of an agentrl step; aim 5."""
    return grpo_step.against_trl(2 if quick else 3)


def forms(quick: bool) -> Results:
    """Measure forward and backward by batch layout."""
    repeats = 2 if quick else 3
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(MILLION, Path(scratch) / "model", 0))
        results = {**packed_against_padded(folder, repeats), **shared_against_packed(folder, repeats)}
    return split(results)


def logprobs(quick: bool) -> Results:
    """Compare time and memory of chunked log probabilities with full logits."""
    return split(chunked_logprobs(quick))


def overhead(quick: bool) -> Results:
    """Measure the share of a step outside the model; aim under 0.05."""
    return grpo_step.overhead(2 if quick else 3)


def split(results: dict[str, float]) -> Results:
    """Separate the ratios from the other figures."""
    ratios = {name: round(value, 4) for name, value in results.items() if "_over_" in name}
    return ratios, {name: round(value, 1) for name, value in results.items() if name not in ratios}


PARTS: dict[str, Callable[[bool], Results]] = {"trl": trl, "forms": forms, "logprobs": logprobs, "overhead": overhead}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller vocabulary")
    args = parser.parse_args()
    raise_gc_threshold()  # as in every run
    torch.set_num_threads(args.threads)
    ratios: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in args.only or PARTS:
        print(f"-- {name}", flush=True)
        results, details[name] = PARTS[name](args.quick)
        for key, value in results.items():
            print(f"{key:44s} {'null' if value is None else f'{value:10.3f}'}", flush=True)
        ratios |= results
    machine = {"cpus": os.cpu_count(), "arch": platform.machine(), "threads": args.threads}
    print(json.dumps({"benchmark": "train", "ratios": ratios, **details, "machine": machine, "torch": torch.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
