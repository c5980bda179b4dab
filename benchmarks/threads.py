"""Measure a model's tokens per second on a CPU, by threads and number type, on an idle machine and with a busy process.

    python benchmarks/threads.py [--models tiny,1m,6m,30m,135m] [--rounds 3] [--seconds 2]

Every cell is a separate process, because torch reads the wait policy at import; the cells of a model alternate, so that ratios
are of one run. "prefill": one pass over 512 tokens; "decode": over one token of each of 32 rows; "update": forward and backward
over 512 tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

MODELS: dict[str, dict[str, int]] = {
    "tiny": {"layers": 3, "hidden": 64, "mlp": 128, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 400},
    "1m": {"layers": 4, "hidden": 128, "mlp": 384, "heads": 4, "kv": 2, "head_dim": 32, "vocab": 400},
    "6m": {"layers": 6, "hidden": 256, "mlp": 768, "heads": 8, "kv": 4, "head_dim": 32, "vocab": 4096},
    "30m": {"layers": 8, "hidden": 512, "mlp": 1536, "heads": 8, "kv": 4, "head_dim": 64, "vocab": 8192},
    "135m": {"layers": 30, "hidden": 576, "mlp": 1536, "heads": 9, "kv": 3, "head_dim": 64, "vocab": 49152},
}
"""Models with random weights, since speed does not depend on them; "tiny": quickstart, "135m": SmolLM2-135M."""
SHAPES = {"prefill": (1, 512), "decode": (32, 1), "update": (1, 512)}


def cell(model: str, threads: int, dtype: str, seconds: float) -> dict[str, float]:
    """Measure tokens per second of each kind of work in this process."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.set_num_threads(threads)
    shape = MODELS[model]
    config = Qwen3Config(
        num_hidden_layers=shape["layers"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab"],
        tie_word_embeddings=True,
    )
    module: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))

    def work(kind: str) -> Callable[[], None]:
        ids = torch.randint(0, shape["vocab"], SHAPES[kind])

        def forward() -> None:
            with torch.inference_mode():
                module(input_ids=ids, use_cache=False)

        def update() -> None:
            module(input_ids=ids, use_cache=False).logits.float().mean().backward()
            module.zero_grad()

        return update if kind == "update" else forward

    found = {}
    for kind, (rows, width) in SHAPES.items():
        once = work(kind)
        once()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            once()
            count += 1
        found[kind] = rows * width * count / (time.perf_counter() - began)
    return {"parameters": sum(p.numel() for p in module.parameters()), **found}


@contextmanager
def background_load(busy: bool) -> Iterator[None]:
    """Run a process that computes without a pause, if `busy`."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def measure_in_subprocess(model: str, threads: int, dtype: str, seconds: float) -> dict[str, float]:
    """Run `cell` in a separate process."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--cell", model, str(threads), dtype, str(seconds)]
    found: dict[str, float] = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per kind of work and cell")
    parser.add_argument("--quiet-only", action="store_true")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        model, threads, dtype, seconds = args.cell
        print(json.dumps(cell(model, int(threads), dtype, float(seconds))))
        return
    rows = []
    print(f"{'model':6} {'machine':8} {'type':9} {'threads':>7} " + " ".join(f"{kind:>10}" for kind in SHAPES), flush=True)
    for model, busy in product(args.models.split(","), (False,) if args.quiet_only else (False, True)):
        cells = list(product(("float32", "bfloat16"), map(int, args.threads.split(","))))
        seen: dict[tuple[str, int], list[dict[str, float]]] = {one: [] for one in cells}
        with background_load(busy):
            for _ in range(args.rounds):
                for dtype, threads in cells:
                    seen[dtype, threads].append(measure_in_subprocess(model, threads, dtype, args.seconds))
        for (dtype, threads), found in seen.items():
            rates = {kind: statistics.median(one[kind] for one in found) for kind in SHAPES}
            row = {"model": model, "busy": busy, "dtype": dtype, "threads": threads, "parameters": found[0]["parameters"]}
            rows.append({**row, **{kind: round(rate, 1) for kind, rate in rates.items()}})
            text = " ".join(f"{rate:10,.0f}" for rate in rates.values())
            print(f"{model:6} {'busy' if busy else 'quiet':8} {dtype:9} {threads:7} {text}", flush=True)
    print(json.dumps({"benchmark": "threads", "rows": rows}))


if __name__ == "__main__":
    main()
