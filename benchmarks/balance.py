"""The balancer against Karmarkar-Karp with equal counts, first-fit decreasing and least-loaded.

For lognormal, bimodal and agentic lengths, 8 to 256 ranks and caps of 8k to 64k tokens: the slowest rank's cost,
summed over rows of micro-batches and divided by its lower bound, and the CPU time for 100,000 sequences. The baselines
run their micro-batches in the order that they return. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from karmarkar_karp import as_given, karmarkar_ranks

from agentrl.data.packing import baselines, lower_bound, portfolio

KINDS = ("lognormal", "bimodal", "agentic")


def lengths(kind: str, count: int, cap: int, rng: np.random.Generator) -> np.ndarray:
    """Sequence lengths in tokens, cut at the cap."""
    if kind == "lognormal":
        values = rng.lognormal(6.5, 0.8, count)
    elif kind == "bimodal":
        values = np.where(rng.random(count) < 0.8, rng.normal(400, 80, count), rng.normal(6000, 800, count))
    else:  # a prompt and a geometric number of turns, each with a tool's answer
        values = rng.integers(200, 600, count) + rng.geometric(1 / 6, count) * rng.lognormal(5, 0.7, count)
    return np.clip(values, 1, cap).astype(np.int64)


def costs_of(tokens: np.ndarray) -> np.ndarray:
    """a n + b n^2, in which both parts are equal at 8192 tokens."""
    return tokens + tokens.astype(np.float64) ** 2 / 8192


def one(tokens: np.ndarray, ranks: int, cap: int) -> dict[str, float]:
    """Inefficiency of each packing on one instance: cost over lower bound."""
    costs = costs_of(tokens)
    bound = lower_bound(tokens, costs, ranks, cap)
    peers = [("karmarkar_ranks", karmarkar_ranks(tokens, costs, ranks, cap)), *baselines(tokens, costs, ranks, cap)]
    totals = {name: as_given(name, bins, costs, ranks).cost for name, bins in peers}
    totals["portfolio"] = portfolio(tokens, costs, ranks, cap).cost
    return {name: cost / bound for name, cost in totals.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer instances, no 100,000-sequence timing")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    counts = (512,) if args.quick else (256, 2048, 16384)
    ranks, caps = (8, 64, 256), (8192, 16384, 65536)
    results: dict[str, list[float]] = {}
    worse = 0
    for count, kind, rank, cap in itertools.product(counts, KINDS, ranks, caps):
        row = one(lengths(kind, count, cap, rng), rank, cap)
        for name, value in row.items():
            results.setdefault(name, []).append(value)
        worse += any(row["portfolio"] > value * (1 + 1e-9) for value in row.values())
        print(f"{count:6d} {kind:9s} R={rank:<3d} cap={cap:<5d} " + "  ".join(f"{n} {v:.4f}" for n, v in row.items()))
    seconds: dict[str, float] = {}
    for kind, rank, cap in () if args.quick else ((k, r, c) for k in KINDS for r, c in ((8, 8192), (64, 16384), (256, 65536))):
        tokens = lengths(kind, 100_000, cap, rng)
        start = time.process_time()
        portfolio(tokens, costs_of(tokens), rank, cap)
        seconds[f"{kind}_{rank}"] = round(time.process_time() - start, 3)
        print(f"100000 {kind:9s} R={rank:<3d} cap={cap:<5d} {seconds[f'{kind}_{rank}']:.2f} CPU seconds")
    mean = {name: float(np.mean(values)) for name, values in results.items()}
    print(
        json.dumps(
            {
                "benchmark": "balance",
                "ratios": {
                    f"{name}_over_portfolio": round(value / mean["portfolio"], 4)
                    for name, value in mean.items()
                    if name != "portfolio"
                },
                "inefficiency_mean": {name: round(value, 4) for name, value in mean.items()},
                "instances": len(results["portfolio"]),
                "instances_worse_than_a_baseline": worse,
                "cpu_seconds_100k": seconds,
                "cpu_seconds_100k_max": max(seconds.values(), default=None),
            }
        )
    )


if __name__ == "__main__":
    main()
