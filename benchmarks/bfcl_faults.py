"""Count first faults of BFCL runs before and after their updates, and successes by category over all of them.

    python benchmarks/bfcl_faults.py runs/bfcl_mixed_seed* [--after eval_000040] [--untouched evals/NAME/trajectories/FILE.jsonl]

Tasks that either evaluation did not score are left out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.contrib.toolkit.bfcl_calls import value_fits
from agentrl.utils.search_path import load_module

interval = load_module(Path(__file__).parent / "seeds.py").interval
Outcomes = Mapping[str, Mapping[str, tuple[bool, bool]]]
"""Success of each task before and after the updates, by category."""

LANGUAGES = {"simple_java": "java", "simple_javascript": "javascript"}


def first_fault(row: Mapping[str, Any]) -> str:
    """Name the first fault of a failed episode: the calls as a whole, then names, then arguments."""
    data, gold = row["task"]["data"], row["task"]["gold"].get("calls", [])
    made = [call for message in row["messages"] if message["role"] == "assistant" for call in message["tool_calls"]]
    if "irrelevance" in data["category"]:
        return "a call where none fits" if made else "no answer"
    if not made:
        return "no call"
    if any(call["error"] for call in made):
        return "malformed call"
    if len(made) != len(gold):
        return "too few calls" if len(made) < len(gold) else "too many calls"
    left = [next(iter(call.items())) for call in gold]
    schemas = {function["name"]: function["parameters"] for function in data["functions"]}
    for call in made:
        same = [(name, arguments) for name, arguments in left if name == call["name"]]
        if not same:
            return "wrong function"
        faults = [
            argument_fault(call["arguments"], arguments, schemas[name], LANGUAGES.get(data["category"], "python"))
            for name, arguments in same
        ]
        if None not in faults:
            return str(faults[0])
        left.remove(same[faults.index(None)])
    return "other"


def argument_fault(
    made: Mapping[str, Any], gold: Mapping[str, Any], schema: Mapping[str, Any], language: str = "python"
) -> str | None:
    """Name the first fault of a call's arguments by the leaderboard's rules; None without one."""
    declared = schema.get("properties", {})
    if any(key not in gold or key not in declared for key in made):
        return "invented argument"
    if any(key not in made and ("" not in allowed or key in schema.get("required", ())) for key, allowed in gold.items()):
        return "missing argument"
    for key, value in made.items():
        if not value_fits(value, gold[key], declared[key], language=language):
            likely = {type(option) for option in gold[key] if option != ""}
            alike = type(value) in likely or (isinstance(value, int) and float in likely) or language != "python"
            return "wrong value" if alike else "wrong type"
    return None


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    """Read the scored episodes of an evaluation, by task."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["task"]["id"]: row for row in rows if row["success"] is not None}


def table(runs: Sequence[Outcomes], untouched: Mapping[str, Any]) -> str:
    """Format a row per category over all runs: means, and the gain with its interval over runs and tasks."""
    lines = ["| category | tasks | untouched | before | after | gain | 95 % interval |", "|---|--:|--:|--:|--:|--:|---|"]
    categories = sorted(set.intersection(*(set(run) for run in runs)))
    for name, chosen in [*((each, [each]) for each in categories), ("all", categories)]:
        pairs = [np.array([pair for category in chosen for pair in run[category].values()], float) for run in runs]
        before, after = np.mean([run.mean(axis=0) for run in pairs], axis=0)
        low, high = interval(pairs)
        known = [untouched[task]["success"] for category in chosen for task in runs[0][category] if task in untouched]
        first = f"{np.mean(known):.3f}" if known else ""
        gain = f"{after - before:+.3f} | {low:+.3f} to {high:+.3f}"
        lines.append(f"| {name} | {len(pairs[0])} | {first} | {before:.3f} | {after:.3f} | {gain} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--after", default="after_*", help="evaluation after the updates (default: after_*)")
    parser.add_argument("--untouched", type=Path, help="evaluation of the untouched model: a file of its trajectories")
    parser.add_argument("--keep", type=Path, help="write successes per task to KEEP/RUN/outcomes.json")
    args = parser.parse_args()
    joined: list[Outcomes] = []
    for run in args.runs:
        first, last = (rows_of(max((run / "trajectories").glob(f"{name}.jsonl"))) for name in ("before_*", args.after))
        outcomes: defaultdict[str, dict[str, tuple[bool, bool]]] = defaultdict(dict)
        faults: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for task in sorted(first.keys() & last.keys()):
            pair = first[task], last[task]
            outcomes[first[task]["task"]["data"]["category"]][task] = (pair[0]["success"], pair[1]["success"])
            for row, count in zip(pair, faults, strict=True):
                count["success" if row["success"] else first_fault(row)] += 1
        joined.append(outcomes)
        if args.keep:
            (args.keep / run.name / "outcomes.json").write_text(json.dumps(outcomes, indent=0) + "\n", encoding="utf-8")
        print(f"\n{run.name}\n\n| first fault | before | after |\n|---|--:|--:|")
        for fault in sorted(faults[0].keys() | faults[1].keys(), key=lambda name: -faults[0][name]):
            print(f"| {fault} | {faults[0][fault]} | {faults[1][fault]} |")
    print(f"\n{table(joined, rows_of(args.untouched) if args.untouched else {})}")


if __name__ == "__main__":
    main()
