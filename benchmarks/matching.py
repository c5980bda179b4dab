"""Measure scoring by matching calls: trajectories of 20 calls per second on one core, and the assignment of 200 calls.

    python benchmarks/matching.py [--seconds 2.0] [--against REVISION]

The call-matching profiles of the shelf score the episodes of benchmarks/reward_speed.py (half of them correct, in the others
calls are reordered, wrong or missing); `assignment_ms` is one episode of 200 calls of one function with 3 to 8 arguments, scored
with partial credit. With --against, that revision of the repository is measured too, alternating with this one, and the ratios
are printed, since figures of two runs are not comparable on a shared machine. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ("exact_calls", "bfcl_ast", "bfcl_ast_parity", "toolrl", "toolrl_parity")
AIM, AIM_MS = 10_000.0, 20.0
ROUNDS = 5


def measure(seconds: float) -> dict[str, float]:
    """Measure each profile's trajectories per processor second (best of short rounds), and an assignment's milliseconds."""
    from reward_speed import SHELF, assignment_seconds, episodes  # type: ignore[import-not-found]

    from agentrl.reward import Context, compile_spec

    found = {}
    for name in PROFILES:
        scorer = compile_spec(SHELF / f"{name}.json", context=Context())
        trajectories = episodes(20, 50, "bfcl" if name.startswith("bfcl") else "literal")
        best, end = float("inf"), time.process_time() + seconds / len(PROFILES)
        while time.process_time() < end:
            start = time.process_time()
            for trajectory in trajectories:
                scorer.score(trajectory)
            best = min(best, (time.process_time() - start) / len(trajectories))
        found[name] = 1 / best
    return {**found, "assignment_ms": 1000 * assignment_seconds(200)}


def measure_in_subprocess(root: Path, seconds: float) -> dict[str, float]:
    """Run `measure` in a separate process on the code in `root`."""
    here = str(Path(__file__).resolve())
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "benchmarks")]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, here, "--once", str(seconds)], cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    read: dict[str, float] = json.loads(done.stdout)
    return read


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: (min if name.endswith("_ms") else max)(row[name] for row in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="processor seconds of each of five rounds")
    parser.add_argument("--against", metavar="REVISION", help="measure that revision too")
    parser.add_argument("--once", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once is not None:
        print(json.dumps(measure(args.once)))
        return
    with tempfile.TemporaryDirectory() as folder:
        roots = [ROOT]
        if args.against:
            archive = subprocess.run(["git", "archive", args.against], cwd=ROOT, check=True, capture_output=True).stdout
            subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
            roots.append(Path(folder))
        rounds = [[measure_in_subprocess(root, args.seconds) for root in roots] for _ in range(ROUNDS)]
    now, *before = (best(list(rows)) for rows in zip(*rounds, strict=True))
    for name, value in now.items():
        aim = value / AIM if name != "assignment_ms" else AIM_MS / value
        was = f"   before {before[0][name]:>8.1f}, ratio {now[name] / before[0][name]:.2f}" if before else ""
        print(f"{name:<16}{value:>10.1f}   of the aim {aim:.2f}{was}", file=sys.stderr)
    ratios = {name: round(now[name] / before[0][name], 3) for name in now} if before else {}
    print(json.dumps({"benchmark": "matching", "now": now, "before": before[0] if before else None, "ratios": ratios}))


if __name__ == "__main__":
    main()
