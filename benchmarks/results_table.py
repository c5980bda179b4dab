"""Print the table of docs/results.md: BFCL accuracy by category, untouched, after SFT and after GRPO, over seeds.

    agentrl eval test --config configs/results/bfcl_grpo.toml --model MODEL -n 696 --out evals/untouched     # once
    agentrl eval test --run runs/bfcl_0 --checkpoint 0 --checkpoint last -n 696                              # each seed
    python benchmarks/results_table.py runs/bfcl_* --untouched evals/untouched [--json FILE]

Name every run that was started, one per seed. The evaluations of runs/NAME are evals/NAME/start and evals/NAME/final (`--evals`).
A run without both is listed below the table. `--k 8` computes pass@8 of evaluations with `-k 8 eval.temperature=1`.

Gain: the difference of GRPO to its own SFT start on the same tasks, averaged over seeds, with a 95 % interval of a paired
bootstrap over tasks, drawn within each category. A mean row has the leaderboard's weights. The interval is for these seeds only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.env.catalog import find_env
from agentrl.env.official import pass_at_k, rate_of
from agentrl.utils.errors import ConfigError

DRAWS = 10_000
STARTS = ("start", "step_0")
"""Folder names of `agentrl eval --checkpoint 0`, the model before the updates."""

Values = dict[str, dict[str, float]]
"""pass@k by category and task id."""
Gain = tuple[float, float, float]
"""Difference and its interval: mean, low, high."""


@dataclass(frozen=True)
class Row:
    """A category or a mean of categories: accuracy per seed, gain per seed and overall. `n`: number of tasks."""

    name: str
    n: int
    untouched: float | None
    sft: list[float]
    grpo: list[float]
    gains: list[Gain]
    gain: Gain


def read_values(folder: Path, k: int = 1) -> Values:
    """Read pass@k of the scored tasks in a folder of `agentrl eval`. Raises ConfigError for no tasks, or fewer than k samples."""
    samples: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for file in sorted(folder.rglob("trajectories.jsonl")):
        for line in file.read_text().splitlines():
            episode = json.loads(line)
            if episode["success"] is not None:  # outages are excluded from means
                samples[episode["task"]["data"]["category"], episode["task"]["id"]].append(episode["success"])
    if not samples:
        raise ConfigError(f"{folder}: no scored episodes. Run `agentrl eval` with this --out.")
    found: Values = defaultdict(dict)
    for (category, task), known in samples.items():
        if len(known) < k:
            raise ConfigError(f"{folder}: {task} has {len(known)} scored samples. Evaluate with -k {k}, or lower --k.")
        found[category][task] = pass_at_k(len(known), sum(known), k)
    return dict(found)


def read_pair(evals: Path, k: int) -> tuple[Values, Values] | None:
    """Read the values before and after the updates on the common tasks; None without both evaluations. Raises ConfigError if a
    tenth of the tasks is missing in one."""
    before = next((evals / name for name in STARTS if (evals / name).is_dir()), None)
    if before is None or not (evals / "final").is_dir():
        return None
    one, other = read_values(before, k), read_values(evals / "final", k)
    count, shared = _count(one), {category: one[category].keys() & other.get(category, {}).keys() for category in one}
    if 10 * sum(map(len, shared.values())) < 9 * max(count, _count(other)):
        raise ConfigError(
            f"{evals}: start has {count} tasks, final {_count(other)}, few in common. Evaluate both with the same -n."
        )
    before_shared, after_shared = (
        {c: {task: of[c][task] for task in sorted(shared[c])} for c in of if c in shared} for of in (one, other)
    )
    return before_shared, after_shared


def _count(values: Values) -> int:
    return sum(map(len, values.values()))


def shares(table: Any, name: str) -> dict[str, float]:
    """Return the weight of each category in a mean of the leaderboard; for a single category, 1."""
    if name not in table.means:
        return {name: 1.0}
    sizes = table.over_tasks.get(name, dict.fromkeys(table.means[name], 1))
    found: dict[str, float] = defaultdict(float)
    for part in table.means[name]:
        for category, share in shares(table, part).items():
            found[category] += share * sizes[part] / sum(sizes.values())
    return dict(found)


def mean_of(values: Values, weights: Mapping[str, float]) -> float | None:
    """Return the weighted mean of the categories' accuracies; None if one was not played."""
    if not all(values.get(category) for category in weights):
        return None
    return sum(weight * statistics.fmean(values[category].values()) for category, weight in weights.items())


def gain_of(differences: Mapping[str, Sequence[float]], weights: Mapping[str, float], draws: int = DRAWS) -> Gain:
    """Return the weighted mean of paired differences, with a 95 % percentile interval of a bootstrap within categories. If all
    differences are equal, so that all draws are, the interval follows the rule of three."""
    every = [value for category in weights for value in differences[category]]
    if len(set(every)) == 1 and (found := rate_of(every, -1.0)) is not None:
        return found["mean"], found["low"], found["high"]
    rng = np.random.default_rng(0)
    mean, drawn = 0.0, np.zeros(draws)
    for category, weight in weights.items():
        values = np.asarray(differences[category])
        mean += weight * float(values.mean())
        drawn += weight * values[rng.integers(0, len(values), (draws, len(values)))].mean(axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return mean, float(low), float(high)


def make_rows(table: Any, untouched: Values | None, seeds: Sequence[tuple[Values, Values]]) -> list[Row]:
    """Make a row per category that all seeds played, and per mean of the leaderboard over such categories."""
    first = seeds[0][0]
    common = {c: sorted(set.intersection(*(set(before.get(c, {})) for before, _ in seeds))) for c in first}
    played = [category for category in first if common[category]]
    rows = []
    for name in (*played, *table.means):
        weights = shares(table, name)
        if not all(category in played for category in weights):
            continue
        own = [{c: [after[c][t] - before[c][t] for t in before[c]] for c in weights} for before, after in seeds]
        pooled = {
            c: [statistics.fmean(after[c][t] - before[c][t] for before, after in seeds) for t in common[c]] for c in weights
        }
        rows.append(
            Row(
                name,
                sum(len(common[category]) for category in weights),
                None if untouched is None else mean_of(untouched, weights),
                [mean_of(before, weights) or 0.0 for before, _ in seeds],
                [mean_of(after, weights) or 0.0 for _, after in seeds],
                [gain_of(one, weights) for one in own],
                gain_of(pooled, weights),
            )
        )
    return rows


def markdown(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Format two tables: accuracies with the mean gain, and the gain of each seed."""
    many = f", mean of {len(names)} seeds (each)" if len(names) > 1 else ""
    lines = [f"| category | n | untouched | SFT{many} | SFT + GRPO{many} | gain of GRPO, 95 % |", "|---|---|---|---|---|---|"]
    for row in rows:
        untouched = "-" if row.untouched is None else f"{row.untouched:.3f}"
        lines.append(f"| {row.name} | {row.n} | {untouched} | {_seeds(row.sft)} | {_seeds(row.grpo)} | {_gain(row.gain)} |")
    if len(names) > 1:
        lines += ["", f"| gain of GRPO, 95 % | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        lines += [f"| {row.name} | {' | '.join(map(_gain, row.gains))} |" for row in rows]
    return "\n".join(lines)


def _seeds(values: Sequence[float]) -> str:
    each = f" ({', '.join(f'{value:.3f}' for value in values)})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{each}"


def _gain(gain: Gain) -> str:
    mean, low, high = gain
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"


def main() -> int:
    """Print the table. Returns 1 if no run has both evaluations, 2 for an evaluation that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of all runs that were started")
    parser.add_argument("--untouched", type=Path, help="the evaluation of the model before any training")
    parser.add_argument("--evals", type=Path, default=Path("evals"), help="folder of the runs' evaluations (default evals)")
    parser.add_argument("--k", type=int, default=1, help="pass@k (default 1)")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    args = parser.parse_args()
    try:
        if missing := [str(run) for run in args.runs if not run.is_dir()]:
            raise ConfigError(f"runs: there is no {', '.join(missing)}. Name the folders of the runs.")
        pairs = {run.name: read_pair(args.evals / run.name, args.k) for run in args.runs}
        untouched = None if args.untouched is None else read_values(args.untouched, args.k)
    except ConfigError as problem:
        print(f"results_table: {problem}", file=sys.stderr)
        return 2
    done = {name: pair for name, pair in pairs.items() if pair is not None}
    table: Any = vars(sys.modules[find_env("bfcl").load().__module__])["TABLE"]
    rows = make_rows(table, untouched, list(done.values())) if done else []
    if done:
        print(markdown(rows, list(done)))
    for name in pairs.keys() - done.keys():
        print(f"\n{name}: started, without an evaluation of start and final in {args.evals / name}; in no mean.")
    if args.json is not None:
        found = {
            "k": args.k,
            "seeds": list(done),
            "without": sorted(pairs.keys() - done.keys()),
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
