"""Benchmarks of the trainer on a CPU: packed against padded, chunked logprobs, publish, overhead of a step.

    python benchmarks/train.py [--threads 1] [--quick]

Every figure is a ratio of two things that this run measures one after the other on the same machine; the
last line is one JSON object. Times are process CPU seconds where one thread computes, so that other
load on the machine shows less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from agentrl.batch import collate
from agentrl.batch.rows import jagged, offsets_of
from agentrl.cluster.launch import launch
from agentrl.config.schema import AlgorithmConfig, InitModelConfig, ModelConfig, OptimConfig
from agentrl.train.actor import Actor
from agentrl.train.fsdp import FsdpEngine
from agentrl.train.init_model import init_model
from agentrl.train.micro import Pack
from agentrl.trajectory import Task, TokenLedger, Trajectory

SIZES = InitModelConfig(layers=4, hidden=128, mlp=384, heads=8, kv_heads=2, head_dim=32, context=4096)


def median(call: Callable[[], Any], repeats: int) -> float:
    """Median CPU seconds of a call, after one call that is not counted."""
    call()
    found = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return sorted(found)[len(found) // 2]


def ragged_batch(rows: int, seed: int = 0) -> Any:
    """Rows of lognormal length (median 120 tokens, at most 1024), two turns each."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(rows):
        ledger = TokenLedger()
        total = int(np.clip(rng.lognormal(np.log(120), 0.7), 8, 1024))
        for turn in range(2):
            ledger.append_context(rng.integers(7, 400, size=total // 4).tolist(), turn)
            n = total // 4
            ledger.append_sampled(rng.integers(7, 400, size=n).tolist(), [-6.0] * n, [0] * n, turn)
        task = Task(id=str(index // 8), seed=index // 8)
        found.append(Trajectory("bench", task, member=index % 8, ledgers=[ledger], reward=float(index % 2)))
    batch = collate(found)
    sampled = batch["sampled"]
    return batch.update({"advantages": jagged(sampled.values().float(), offsets_of(sampled))})


def padded_pass(model: Any, ids: torch.Tensor, mask: torch.Tensor, wanted: torch.Tensor) -> None:
    """What a padded trainer does: a batch padded to its longest row, logits of every token."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
    (chosen * wanted[:, 1:]).sum().backward()


def packed_against_padded(folder: str, repeats: int) -> dict[str, float]:
    """Forward and backward over 32 rows: one padded batch, the same sorted into 4, and packed."""
    from transformers import AutoModelForCausalLM

    batch = ragged_batch(32)
    tokens = int(offsets_of(batch["token_ids"])[-1])
    engine = FsdpEngine(folder, ModelConfig(), 1.0)

    def packed() -> None:
        piece = Pack(batch, list(range(32)), engine.device)
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


def step_overhead(folder: str, repeats: int) -> dict[str, float]:
    """Share of an actor's update that is neither forward, backward nor optimizer."""
    actors = launch(Actor, backend="inline", world_size=1)
    actors.run(Actor.init_model, folder, ModelConfig(), OptimConfig())
    batch, algorithm = ragged_batch(64), AlgorithmConfig(minibatch=32)
    spent = {"model": 0.0}

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent["model"] += time.process_time() - began

        return call

    plain = {name: getattr(FsdpEngine, name) for name in ("logprobs", "backward", "step")}
    for name, function in plain.items():
        setattr(FsdpEngine, name, timed(function))
    try:
        actors.run(Actor.update, batch, algorithm)
        spent["model"] = 0.0
        began = time.process_time()
        for _ in range(repeats):
            actors.run(Actor.update, batch, algorithm)
        total = time.process_time() - began
    finally:
        for name, function in plain.items():
            setattr(FsdpEngine, name, function)
    return {"share_outside_model": 1 - spent["model"] / total}


def publish_against_memcpy(repeats: int) -> dict[str, float]:
    """Bytes/s of exporting all weights to host buckets (same process) against a plain copy of them."""
    with tempfile.TemporaryDirectory() as scratch:
        large = SIZES.model_copy(update={"layers": 12, "hidden": 512, "mlp": 1536})
        folder = init_model(large, Path(scratch) / "large", 0)
        engine = FsdpEngine(str(folder), ModelConfig(), 1.0)
    flat = torch.cat([p.detach().flatten() for _, p in engine.named()])
    out = torch.empty_like(flat)
    copy = median(lambda: out.copy_(flat), repeats)
    export = median(lambda: list(engine.weights(64 << 20)), repeats)
    return {"publish_mib": flat.nbytes / 2**20, "publish_over_memcpy": copy / export}


LOGPROBS = """
import sys, time, torch
from pathlib import Path
from agentrl.train.logprobs import token_logprobs

def peak():
    # VmHWM and not ru_maxrss: the latter is inherited from the parent process
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

torch.manual_seed(0)
tokens, vocabulary, width = (int(x) for x in sys.argv[2:5])
h = torch.randn(tokens, width, requires_grad=True)
w = torch.randn(vocabulary, width, requires_grad=True)
y = torch.randint(0, vocabulary, (tokens,))
base, began = peak(), time.process_time()
if sys.argv[1] == "full":
    torch.log_softmax((h @ w.t()).float(), -1).gather(1, y[:, None]).sum().backward()
else:
    token_logprobs(h, w, y, chunk=256, entropy=False)[0].sum().backward()
print(time.process_time() - began, peak() - base)
"""


def chunked_logprobs(quick: bool) -> dict[str, float]:
    """Time and extra peak memory against full logits, each in a process of its own."""
    sizes = ("1024", "50000", "256") if quick else ("2048", "100000", "512")
    found = {}
    for kind in ("full", "chunked"):
        command = [sys.executable, "-c", LOGPROBS, kind, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[kind] = [float(x) for x in done.stdout.split()[-2:]]
    return {
        "chunked_time_over_full": found["chunked"][0] / found["full"][0],
        "chunked_memory_over_full": found["chunked"][1] / found["full"][1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer repeats, smaller vocabulary")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    repeats = 2 if args.quick else 5
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(init_model(SIZES, Path(scratch) / "model", 0))
        for part in (
            lambda: packed_against_padded(folder, repeats),
            lambda: step_overhead(folder, repeats),
            lambda: publish_against_memcpy(repeats),
            lambda: chunked_logprobs(args.quick),
        ):
            found = part()
            for name, value in found.items():
                print(f"{name:34s} {value:10.3f}", flush=True)
            ratios.update(found)
    result = {
        "benchmark": "train",
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "threads": args.threads},
        "torch": torch.__version__,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
