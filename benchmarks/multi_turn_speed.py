"""Measure scores of multi-turn episodes per second on one core, by replay (rewards/bfcl_multi_turn.json).

    python benchmarks/multi_turn_speed.py [--before REF] [--seconds 3] [--tasks 100] [--group 8]

The episodes use a small handmade file system, with 5.5 calls and four rounds each, as in BFCL's multi-turn tasks; half of them
are wrong at the end. Measures groups (whose episodes share the gold of a task) and single episodes, for each of which the gold is
replayed. `--before REF`: also the code of another commit, in the same run. The peer is BFCL's multi-turn checker on the gold of
BFCL's tasks, if the package is installed or AGENTRL_BFCL_SOURCE names its folder. Processor time, best of three, alternating.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
CATEGORY = "multi_turn_base"


def rate(work: Callable[[], int], seconds: float) -> float:
    """Return scores per processor second, best of three; `work` returns its number of scores."""
    best = 0.0
    gc.collect()
    gc.freeze()  # exclude the test data from garbage collection
    for _ in range(3):
        count, start = 0, time.process_time()
        while time.process_time() - start < seconds / 3:
            count += work()
        best = max(best, count / (time.process_time() - start))
    return best


def measure_agentrl(tasks: int, group: int, seconds: float) -> dict[str, float]:
    """Measure scores per second of groups and single episodes with the imported code. Raises for a wrong score."""
    from agentrl.data.trajectory import Trajectory
    from agentrl.reward import Context, compile_spec

    sys.path.insert(0, str(ROOT / "benchmarks" / "parts"))
    from filing import Filing, make_task, play

    def read_again(record: Trajectory) -> Trajectory:
        # As if read from a file: equal values must be different objects, or comparing them would be too cheap.
        return Trajectory.from_json(json.loads(json.dumps(record.to_json())))

    spec = json.loads((ROOT / "rewards" / "bfcl_multi_turn.json").read_text())
    members = [[read_again(play(make_task(seed), m % 2 == 1)) for m in range(group)] for seed in range(tasks)]

    def score(groups: list[list[Trajectory]]) -> int:
        # A new context each time, so that no round uses a cache of the previous one.
        scorer = compile_spec(spec, context=Context(replay_env=lambda task: Filing(scorer=None)))
        values = [scorer.score(member).value for some in groups for member in some]
        assert values == [1.0 - m % 2 for some in groups for m in range(len(some))], values
        return len(values)

    singles = [[some[0]] for some in members]
    calls = sum(len(turn.message.tool_calls) for some in singles for turn in some[0].turns) / len(singles)
    return {
        "groups": rate(lambda: score(members), seconds),
        "singles": rate(lambda: score(singles), seconds),
        "calls": calls,
    }


def before(ref: str, arguments: list[str]) -> dict[str, Any]:
    """Run `measure_agentrl` with the code of a commit in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        tar = subprocess.run(["git", "-C", str(ROOT), "archive", ref, "agentrl"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=tar, check=True)
        environment = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, __file__, "--only-ours", *arguments]
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def measure_bfcl(tasks: int, seconds: float) -> float | str:
    """Measure BFCL's checker on the gold of its tasks: scores per second, or the reason why there are none."""
    if source := os.environ.get("AGENTRL_BFCL_SOURCE"):
        sys.path.insert(0, source)
    if importlib.util.find_spec("bfcl_eval") is None:
        return "bfcl_eval is not installed here and AGENTRL_BFCL_SOURCE names no folder that has it"
    # The package's only heavy import, which the checker does not need.
    stub: Any = types.ModuleType("bfcl_eval.constants.model_config")
    stub.MODEL_CONFIG_MAPPING = {}
    sys.modules["bfcl_eval.constants.model_config"] = stub
    try:
        multi_turn_checker, multi_turn_utils = (
            importlib.import_module(f"bfcl_eval.eval_checker.multi_turn_eval.{name}")
            for name in ("multi_turn_checker", "multi_turn_utils")
        )
    except ImportError as missing:
        return f"bfcl_eval cannot be imported: {missing}"
    data = Path(str(multi_turn_utils.__file__)).resolve().parents[2] / "data"

    def rows(file: Path) -> list[Any]:
        return [json.loads(line) for line in file.read_text().splitlines()][:tasks]

    entries = rows(data / f"BFCL_v4_{CATEGORY}.json")
    golds = [row["ground_truth"] for row in rows(data / "possible_answer" / f"BFCL_v4_{CATEGORY}.json")]
    made = [[[[call] for call in calls] for calls in gold] for gold in golds]
    state = vars(multi_turn_utils)

    def check() -> int:
        for entry, gold, answer in zip(entries, golds, made, strict=True):
            # The module keeps its instances; a second check would continue with the state of the first.
            for name in [name for name in state if name.endswith("_instance")]:
                del state[name]
            verdict = multi_turn_checker.multi_turn_checker(answer, gold, entry, CATEGORY, "peer")
            assert verdict["valid"], verdict
        return len(entries)

    return rate(check, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="processor seconds per figure")
    parser.add_argument("--tasks", type=int, default=100, help="number of tasks")
    parser.add_argument("--group", type=int, default=8, help="episodes per task")
    parser.add_argument("--before", metavar="REF", help="a commit to compare with")
    parser.add_argument("--only-ours", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    found: dict[str, Any] = {"benchmark": "multi_turn_speed", **measure_agentrl(args.tasks, args.group, args.seconds)}
    if args.only_ours:
        print(json.dumps(found))
        return
    print(f"{found['groups']:>8.0f} scores/s, groups of {args.group}; {found['singles']:.0f} single episodes/s", file=sys.stderr)
    if args.before:
        sizes = ["--seconds", str(args.seconds), "--tasks", str(args.tasks), "--group", str(args.group)]
        found["before"] = old = before(args.before, sizes)
        print(f"{old['groups']:>8.0f} scores/s, {old['singles']:.0f} single episodes/s at {args.before}", file=sys.stderr)
        found["ratio"] = {name: round(found[name] / old[name], 2) for name in ("groups", "singles")}
    found["peer"] = theirs = measure_bfcl(args.tasks, args.seconds)
    print(f"bfcl_eval's own checker: {theirs if isinstance(theirs, str) else format(theirs, '.0f')}", file=sys.stderr)
    if not isinstance(theirs, str):
        found["over_peer"] = {name: round(found[name] / theirs, 2) for name in ("groups", "singles")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
