"""Train a policy of 130,000 parameters on rewards, on a teacher of 174,000 that solves the task, and on both.

    python benchmarks/distillation.py [--seeds 0 1 2]      # finished runs are skipped
    python benchmarks/distillation.py --report             # table, CSV and PNG of finished runs
    python benchmarks/distillation.py --quick              # a few updates, to try the script

The teacher is the trained policy of the quickstart; the student is a smaller model after the quickstart's warm start, which
stops too early. Each arm samples 128 episodes per update from the student (`algorithm.distillation`, docs/algorithms.md): 16
groups of 8 with rewards, 128 groups of 1 with the teacher alone. Greedy held-out success and `teacher/kl` are plotted over the
sampled tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "parts"))

from long_runs import COMMON, QUICK, command, curve, draw, finished, run, save, table, work

from agentrl.run.reader import load_run

CONFIG = "quickstart"
BACKEND = ["engine=embedded", "cluster.backend=inline"]
SMALL = ["model.init.layers=3", "model.init.hidden=48", "sft.max_steps=5000"]
FEW = ["steps=2", "eval.every=1", "eval.tasks=4", "rollout.groups=2"]
SIZE = ["steps=10", "eval.every=1", "eval.tasks=100", "stop_at_success=false", "next=false"]
TAUGHT = "algorithm.distillation={{path='{}',coef={},reward_coef={}}}"
ARMS = {"rewards": None, "teacher": (1.0, 0.0), "both": (0.3, 1.0)}
"""Coefficients of the teacher and of the rewards; None: without a teacher."""


def teacher() -> Path:
    """Train the quickstart, and return its model."""
    few = [*FEW, "sft.min_steps=20", "sft.max_steps=20", "sft.gate=0.0"] if QUICK in sys.argv else []
    run("teacher", CONFIG, [*BACKEND, *few])
    return work() / "runs" / "teacher" / "final"


def student() -> str:
    """Return the warm start of every arm as an override."""
    model = work() / "runs" / "student" / "warm_start"
    if not (model / "config.json").is_file():
        few = ["sft.min_steps=20", "sft.max_steps=20", "sft.gate=0.0"] if QUICK in sys.argv else []
        command("sft", CONFIG, "name=student", *BACKEND, *SMALL, *few, "--overwrite")
    return f"model.path={model}"


def train(seeds: Sequence[int]) -> None:
    path, model = teacher(), student()
    for seed in seeds:
        for arm, coefs in ARMS.items():
            own = [] if coefs is None else [TAUGHT.format(path, *coefs)]
            alone = ["rollout.groups=128", "rollout.group_size=1"] if coefs is not None and coefs[1] == 0 else []
            size = FEW if QUICK in sys.argv else SIZE
            run(f"{arm}-{seed}", CONFIG, [*COMMON, *size, *alone, f"seed={seed}", "~model.init", model, *own])


def report() -> None:
    done = {(arm, int(path.name.split("-")[1])) for arm in ARMS for path in work().glob(f"runs/{arm}-*") if finished(path)}
    curves = {key: curve("-".join(map(str, key)), ["success"]) for key in sorted(done)}
    rows = [[*key, *row] for key, rows in curves.items() for row in rows]
    save("distillation.csv", ["arm", "seed", "update", "tokens", "success"], rows)
    seeds = sorted({seed for _, seed in curves})
    head = [
        "arm",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "after 2 updates",
        "at the end",
        "KL to the teacher, first and last",
    ]
    found, lines = [], {}
    for place, arm in enumerate(arm for arm in ARMS if any(key[0] == arm for key in curves)):
        runs = [curves[arm, seed] for seed in seeds if (arm, seed) in curves]
        first, second, last = ([rows[min(number, len(rows) - 1)][2] for rows in runs] for number in (1, 2, 999))
        means = [f"{statistics.mean(ends):.2f}" for ends in (first, second, last)]
        found.append([arm, *(f"{end:.2f}" for end in first), *means, format_kl(arm, seeds)])
        points = [tuple(statistics.mean(row[k] for row in same) for k in (1, 2)) for same in zip(*runs, strict=True)]
        lines[arm] = (f"C{place}", points)
    before = statistics.mean(rows[0][2] for rows in curves.values())
    print(f"\ngreedy held-out success after one update of 128 episodes; before: {before:.2f}")
    table(head, found, "distillation_table.csv")
    draw("distillation.png", lines, "sampled tokens (mean of the seeds that were run)")


def format_kl(arm: str, seeds: Sequence[int]) -> str:
    """Format `teacher/kl` of the arm's first seed; empty without a teacher."""
    found = [row["teacher/kl"] for row in load_run(work() / "runs" / f"{arm}-{seeds[0]}").metrics if "teacher/kl" in row]
    return f"{found[0]:.3f}, {found[-1]:.3f}" if found else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--report", action="store_true", help="only the table and the picture")
    parser.add_argument(QUICK, action="store_true", help="a few updates, to try the script")
    args = parser.parse_args()
    if not args.report:
        train(args.seeds)
    report()


if __name__ == "__main__":
    main()
