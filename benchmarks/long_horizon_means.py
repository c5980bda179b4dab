"""Compare single measures for longer episodes at equal sampled tokens.

    python benchmarks/long_horizon_means.py [--seeds 0 1 2] [--arms base start ...]     # finished runs are skipped
    python benchmarks/long_horizon_means.py --report                                    # table, CSV and PNG of finished runs
    python benchmarks/long_horizon_means.py --quick --arms base start                   # a few updates, to try the script

Every run starts from the same warm start, that of `configs/recipes/horizon/key_value.toml`, whose policy makes right calls in
goals of up to 12 calls but stops too early. Tasks have 2 to 12 calls, the reward is the success of the episode; an arm has its
overrides in `long_horizon/means.toml`. A seed covers the tasks and the sampling.

Greedy held-out success is measured on tasks of 10 to 12 calls and of 2 to 12 calls, every few updates, over the sampled tokens,
including discarded groups. The table has it after 90,000 tokens, and its mean until then; for a run that ended earlier, the
values at its end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "parts"))

from long_runs import COMMON, HERE, LADDER, QUICK, at, average, curve, draw, finished, run, save, table, warm, work

UPDATES = 20
BUDGET = 90_000
"""Sampled tokens at which the arms are compared."""
FEW = ["steps=2", "eval.every=1", "eval.tasks=4", "rollout.groups=2"]
SHARED = "set_share = 0.0, keys = 14, max_value = 4"
ENV = """[[env]]
name = "{}"
id = "key_value"
reward = "key_value_exact"
weight = {}
params = {{ calls = {}, {} }}
eval = {{ tasks = {}, weight = {} }}
"""
WATCHED = {"long": "10 to 12 calls", "all": "2 to 12 calls"}
GROUPS = ("curriculum", "credit", "keeping", "entropy", "together")


def arms() -> dict[str, dict[str, Any]]:
    """Read the arms of `means.toml` by name."""
    return tomllib.loads((HERE / "long_horizon" / "means.toml").read_text())


def spec(quick: bool) -> str:
    """Write the config of all arms: one environment for updates, and one per measured held-out success."""
    few = 4 if quick else 48
    parts = [ENV.format("train", 1.0, "[2, 12]", SHARED, 1, 0.0), ENV.format("long", 0.0, "[10, 12]", SHARED, few, 1.0)]
    parts.append(ENV.format("all", 0.0, "[2, 12]", SHARED, few, 0.0))
    path = work() / "means.toml"
    path.write_text(f'base = "{LADDER}"\nname = "means"\n' + "\n".join(parts))
    return str(path)


def train(args: argparse.Namespace) -> None:
    """Train the selected arms of every seed, one after the other."""
    known, model, config = arms(), warm(args.quick), spec(args.quick)
    for seed in args.seeds:
        for arm in args.arms or known:
            size = FEW if args.quick else [f"steps={known[arm].get('steps', UPDATES)}", "eval.every=4"]
            run(
                f"means-{arm}-{seed}",
                config,
                [*COMMON, "~rollout.sampler", *size, f"seed={seed}", model, *known[arm]["overrides"]],
            )


def report() -> None:
    """Write a row per finished arm, a CSV of all evaluations, and a picture of each group's means with the base."""
    known = arms()
    done = [path.name.split("-")[1:] for path in sorted(work().glob("runs/means-*")) if finished(path)]
    keys = [f"env/{name}/success" for name in WATCHED]
    curves = {(arm, seed): curve(f"means-{arm}-{seed}", keys) for arm in known for name, seed in done if name == arm}
    save(
        "means.csv",
        ["arm", "seed", "update", "tokens", *WATCHED.values()],
        [[*key, *row] for key, rows in curves.items() for row in rows],
    )
    budget = min(BUDGET, max(rows[-1][1] for rows in curves.values()))
    print(f"\ngreedy held-out success after {budget:,.0f} sampled tokens, and its mean until then")
    seeds = sorted({seed for _, seed in curves})
    rows = [
        line(arm, [curves.get((arm, seed)) for seed in seeds], budget) for arm in known if any(name == arm for name, _ in curves)
    ]
    head = ["arm", *(f"long: {seed}" for seed in (*seeds, "mean")), "until: mean", "all: mean"]
    table(head, rows, "means_table.csv")
    for group in GROUPS:
        mine = [arm for arm in known if known[arm]["of"] in ("", group) and any(key[0] == arm for key in curves)]
        means = {arm: mean([curves[key] for key in curves if key[0] == arm]) for arm in mine}
        lines = {arm: ("k" if arm == "base" else f"C{place}", points) for place, (arm, points) in enumerate(means.items())}
        if len(lines) > 1:
            draw(f"means-{group}.png", lines, "sampled tokens (mean of the seeds that were run)")


def line(arm: str, runs: Sequence[list[list[float]] | None], budget: float) -> list[str]:
    """Return each seed's success on the longest tasks, their mean, the mean until then, and the mean on all lengths."""
    finished_runs = [rows for rows in runs if rows is not None]
    ends = ["-" if rows is None else f"{at(rows, budget):.2f}" for rows in runs]
    every = [[[*row[:2], row[3]] for row in rows] for rows in finished_runs]
    means = [
        statistics.mean(value(rows, budget) for rows in found)
        for value, found in ((at, finished_runs), (average, finished_runs), (at, every))
    ]
    return [arm, *ends, *(f"{value:.2f}" for value in means)]


def mean(runs: Sequence[list[list[float]]]) -> list[tuple[float, float]]:
    """Return (tokens, success on the longest tasks) at each evaluation, averaged over the seeds."""
    return [tuple(statistics.mean(row[k] for row in rows) for k in (1, 2)) for rows in zip(*runs, strict=True)]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=arms(), help="by default all")
    parser.add_argument("--report", action="store_true", help="only the table and the pictures")
    parser.add_argument(QUICK, action="store_true", help="a few updates, to try the script")
    args = parser.parse_args()
    if not args.report:
        train(args)
    report()


if __name__ == "__main__":
    main()
