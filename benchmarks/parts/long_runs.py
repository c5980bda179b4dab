"""Train runs of long episodes one after the other, and read their metrics: for long_horizon.py, long_horizon_means.py,
distillation.py and branching.py."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentrl.run.reader import load_run

HERE = Path(__file__).resolve().parents[1]
LADDER = "recipes/horizon/key_value"
QUICK = "--quick"
KEPT = {"distillation": "teachers"}
"""Folder of tables and pictures by script; `long_horizon` for the others."""
COMMON = [
    "engine=embedded",
    "cluster.backend=inline",
    "trajectories_every=100",
    "health.idle_updates=1000",  # an arm that learns nothing is a result
    "checkpoint.every=10",
    "sft=false",
    "~algorithm.experience",  # base configs reuse episodes and gold, which would disturb comparisons
    "~algorithm.demonstrations",
]
"""Overrides of all compared runs."""


def command(*words: str) -> None:
    """Run an agentrl command in the work folder and show its output."""
    subprocess.run([sys.executable, "-m", "agentrl.cli.main", *words], cwd=work(), check=True)


def work() -> Path:
    """Return the folder of runs, outside of the repository."""
    folder = Path(os.environ.get("LONG_HORIZON_RUNS", HERE.parent / "runs" / "long_horizon"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def results() -> Path:
    """Return the folder of tables and pictures; a quick run does not write to the repository."""
    folder = work() / "results" if QUICK in sys.argv else HERE / KEPT.get(Path(sys.argv[0]).stem, "long_horizon")
    folder.mkdir(exist_ok=True)
    return folder


def finished(folder: Path) -> bool:
    """Return True if a run is finished; an interrupted one has a summary too."""
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] != "interrupted"


def run(name: str, config: str, overrides: Iterable[str]) -> None:
    """Train or resume the run of this name, unless it is finished."""
    folder = work() / "runs" / name
    if finished(folder):
        print(f"{name}: already finished", flush=True)
    elif list(folder.glob("checkpoints/*/manifest.json")):
        command("train", "--resume", str(folder))
    else:
        command("train", config, f"name={name}", *overrides, "--overwrite")


def warm(quick: bool, config: str = LADDER, name: str = "warm", more: Sequence[str] = ()) -> str:
    """Return the warm start of this config with `more` overrides, as an override for runs that share it."""
    model = work() / "runs" / name / "warm_start"
    if not (model / "config.json").is_file():
        steps = ["sft.min_steps=50", "sft.max_steps=50", "sft.gate=0.0", "sft.gate_tasks=2"] if quick else []
        command("sft", config, f"name={name}", "engine=embedded", "cluster.backend=inline", *more, *steps, "--overwrite")
    return f"model.path={model}"


def curve(name: str, keys: Sequence[str]) -> list[list[float]]:
    """Return (update, tokens sampled for updates so far, values of `keys`) at each evaluation of a run."""
    tokens, rows = 0.0, list[list[float]]()
    for row in load_run(work() / "runs" / name).metrics:
        if row["phase"] == "train":
            tokens += row.get("tokens_sampled", row["tokens"])  # rows of older builds lack discarded tokens
        elif row["phase"] in ("before", "eval", "after") and (not rows or rows[-1][0] != row["step"]):
            rows.append([row["step"], tokens, *[float(row[key]) for key in keys]])
    return rows


def at(rows: Sequence[Sequence[float]], tokens: float) -> float:
    """Return success after `tokens` sampled tokens, interpolated between evaluations."""
    for before, after in pairwise(rows):
        if before[1] <= tokens <= after[1] and after[1] > before[1]:
            return before[2] + (after[2] - before[2]) * (tokens - before[1]) / (after[1] - before[1])
    return rows[-1][2]


def average(rows: Sequence[Sequence[float]], tokens: float) -> float:
    """Return mean success over the first `tokens` sampled tokens, which shows which run learns sooner."""
    points = [(row[1], row[2]) for row in rows if row[1] < tokens] + [(tokens, at(rows, tokens))]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / tokens


def draw(name: str, lines: dict[str, tuple[str, list[tuple[float, float]]]], over: str, how: str = "greedy") -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for label, (color, points) in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", color=color, markersize=3, linewidth=1, label=label)
    axes.set(xlabel=over, ylabel=f"held-out success, {how}", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(results() / name, dpi=110)


def save(name: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with (results() / name).open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], name: str) -> None:
    """Print a Markdown table; with a name, also write it as CSV."""
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row) + " |")
    if name:
        save(name, head, rows)
