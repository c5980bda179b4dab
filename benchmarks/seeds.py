"""Train one config with several seeds, and compare held-out success before and after the updates with intervals.

    python benchmarks/seeds.py run configs/results/sql_135m.toml --seeds 1,2,3     a run per seed, one after the other
    python benchmarks/seeds.py table runs/sql_135m_seed*                           the table of docs/results.md

The table has every started seed. An existing run is resumed, or skipped if it is finished.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from agentrl.data.trajectory import Trajectory

RESAMPLES = 10_000
Outcomes = dict[str, float]


def run(config: Path, seeds: Sequence[int], overrides: Sequence[str]) -> int:
    """Train each seed to its end; return the exit code of the first run that fails, else 0."""
    for seed in seeds:
        name = f"{config.stem}_seed{seed}"
        folder = Path("runs") / name
        if (folder / "final" / "manifest.json").is_file():
            print(f"{folder} is finished")
            continue
        words = ["--resume", str(folder)] if folder.is_dir() else [str(config), f"seed={seed}", f"name={name}", *overrides]
        done = subprocess.run([sys.executable, "-m", "agentrl", "train", *words])
        if done.returncode != 0:
            return done.returncode
    return 0


def outcomes(file: Path) -> Outcomes:
    """Read the mean success per task (`Trajectory.task_key`), without unscored episodes (null)."""
    found: dict[str, list[bool]] = defaultdict(list)
    for episode in (Trajectory.from_json(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()):
        if episode.success is not None:
            found[episode.task_key].append(episode.success)
    return {task: fmean(known) for task, known in found.items()}


def pairs_of(folder: Path) -> npt.NDArray[np.float64]:
    """Return success before and after the updates on the same tasks, [tasks, 2]."""
    before, after = (sorted((folder / "trajectories").glob(f"{name}_*.jsonl")) for name in ("before", "after"))
    if not before or not after:
        raise SystemExit(f"{folder}: no evaluation before and after the updates. Finish the run: agentrl train --resume {folder}")
    first, last = outcomes(before[0]), outcomes(after[-1])
    if not (both := sorted(first.keys() & last.keys())):
        raise SystemExit(f"{folder}: no task was scored before and after the updates. `agentrl show {folder}` names the causes")
    return np.array([[first[task], last[task]] for task in both])


def interval(runs: Sequence[npt.NDArray[np.float64]], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap (Efron, 1979) of the mean gain, over runs, then tasks within each run."""
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        drawn = [runs[index] for index in rng.integers(len(runs), size=len(runs))]
        means[number] = np.mean(
            [gain[rng.integers(len(gain), size=len(gain))].mean() for gain in (r[:, 1] - r[:, 0] for r in drawn)]
        )
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def table(folders: Sequence[Path]) -> str:
    """Format a row per run, and one over all."""
    lines = ["| run | tasks | before the updates | after them | gain | 95 % interval |", "|---|--:|--:|--:|--:|---|"]
    named = [(folder.name, [pairs_of(folder)]) for folder in dict.fromkeys(folders)]  # names may repeat: a/seed1, b/seed1
    if len(named) > 1:
        named.append((f"all {len(named)}", [pairs for _, [pairs] in named]))
    for name, found in named:
        before, after = np.mean([pairs.mean(axis=0) for pairs in found], axis=0)
        low, high = interval(found)
        tasks = sum(map(len, found))
        lines.append(f"| {name} | {tasks} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {low:+.3f} to {high:+.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("run")
    start.add_argument("config", type=Path)
    start.add_argument("--seeds", default="1,2,3")
    start.add_argument("overrides", nargs="*", metavar="a.b=c")
    commands.add_parser("table").add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        print(table(args.folders))
        return 0
    return run(args.config, [int(seed) for seed in args.seeds.split(",")], args.overrides)


if __name__ == "__main__":
    sys.exit(main())
