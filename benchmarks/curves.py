"""Run the variants, each in a separate process, and write the table and the picture. See docs/testing.md.

    python benchmarks/curves.py [--variants grpo,gae] [--seeds 0,1,2] [--jobs 2] [--out runs/curves] [--updates 30]

All variants of a seed share one warm start: a variant costs only its updates and evaluations. Results are lines of
OUT/results.jsonl; runs with a line are skipped. Exit code 1 if a curve does not meet its requirement.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "parts"))

from curves_report import FUNCTIONS, VARIANTS, about_control, episodes, picture, spec, table, unexpected, z_score

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "benchmarks" / "parts"
CONFIG = ROOT / "configs" / "quickstart.toml"
BACKEND = ["cluster.backend=inline", "engine=embedded"]
EVERY = 3
TIMEOUT_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.absolute()
    if args.one:
        return train_variant(args.out, args.one[0], int(args.one[1]), args.updates)
    names, seeds = args.variants.split(","), [int(seed) for seed in args.seeds.split(",")]
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        raise SystemExit(f"--variants: {', '.join(unknown)}: expected some of {', '.join(VARIANTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda seed: warm_start(args.out, seed), seeds))
        jobs = [(name, seed) for seed in seeds for name in names if (name, seed) not in results(args.out, args.updates)]
        for line in pool.map(lambda job: run_variant(args.out, job[0], job[1], args.updates), jobs):
            print(line, flush=True)
    found = list(results(args.out, args.updates).values())
    text = "\n".join(table(found))
    (args.out / "table.md").write_text(text + "\n")
    picture(found, args.out / "curves.png")
    print(text)
    asked = [row for row in found if row["variant"] in names and row["seed"] in seeds]
    wrong = unexpected(asked)
    print(about_control(asked))
    print("\n".join(wrong) if wrong else "every curve meets its requirement")
    return 1 if wrong else 0


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(PARTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def warm_start(out: Path, seed: int) -> None:
    """Make the initial model of all variants of a seed, once."""
    if (out / f"warm_{seed}" / "warm_start" / "config.json").is_file():
        return
    command = [
        sys.executable,
        "-m",
        "agentrl.cli.main",
        "sft",
        str(CONFIG),
        "--overwrite",
        f"name=warm_{seed}",
        f"out={out}",
        f"seed={seed}",
        *BACKEND,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"the warm start of seed {seed} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def results(out: Path, updates: int) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the newest result per variant and seed, of runs with these overrides and this length."""
    file = out / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {
        (row["variant"], row["seed"]): row
        for row in rows
        if row["error"] is None
        and row["variant"] in VARIANTS
        and row["overrides"] == VARIANTS[row["variant"]].overrides
        and row["updates_asked"] == updates
    }


def run_variant(out: Path, name: str, seed: int, updates: int) -> str:
    """Run one variant in a subprocess, append its result to the file, and return a line to print."""
    command = [sys.executable, __file__, "--out", str(out), "--updates", str(updates), "--one", name, str(seed)]
    result = out / f"{name}_{seed}" / "result.json"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    with (out / f"{name}_{seed}.log").open("w") as log:
        try:
            subprocess.run(command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.write(f"\nended after {TIMEOUT_S} s")
    if result.exists():
        row = json.loads(result.read_text())
    else:
        last = (out / f"{name}_{seed}.log").read_text().strip().splitlines()[-1:]
        row = {
            "variant": name,
            "seed": seed,
            "overrides": VARIANTS[name].overrides,
            "updates_asked": updates,
            "error": " ".join(last) or "no output",
        }
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    shown = row["error"] or f"success {row['curve'][0][2]:.2f} -> {row['curve'][-1][2]:.2f}, {row['updates']} updates"
    return f"{name} seed {seed}: {shown} ({time.monotonic() - began:.0f} s)"


def train_variant(out: Path, name: str, seed: int, updates: int) -> int:
    """Train a variant in this process and write its result.json."""
    from agentrl.config.load import config_from, read_toml
    from agentrl.run.checks import check_config
    from agentrl.run.config_file import open_folder
    from agentrl.run.driver import execute

    variant = VARIANTS[name]
    overrides = [
        f"name={name}_{seed}",
        f"out={out}",
        f"seed={seed}",
        f"steps={updates}",
        f"model.path={out / f'warm_{seed}' / 'warm_start'}",
        f"eval.every={EVERY}",
        "eval.tasks=100",
        "checkpoint.every=100000",
        "checkpoint.keep_best=0",
        "trajectories_every=100000",
        *BACKEND,
    ]
    if variant.expected == "climbs":
        overrides.append("stop_at_success=0.95")
    if variant.reward is not None:
        file = out / f"{name}_reward.json"
        file.write_text(json.dumps(spec(variant.reward, variant.coin)))
        overrides += [f"env.reward={file}", *(f"reward.python.{key}={value}" for key, value in FUNCTIONS.items())]
    table = read_toml(CONFIG)
    del table["sft"], table["model"]["init"]
    config = config_from(table, [*overrides, *variant.overrides])
    check_config(config)
    folder = open_folder(config, overwrite=True)
    code = execute(config, folder, resumed=False)
    used = resource.getrusage(resource.RUSAGE_SELF)
    rows = folder.read_metrics()
    row = {
        "variant": name,
        "seed": seed,
        "overrides": variant.overrides,
        "updates_asked": updates,
        "error": None if code == 0 else f"ended with {code}",
        "curve": curve(rows),
        "updates": sum(row["phase"] == "train" for row in rows),
        "failed_groups": max((row.get("groups/failed", 0) for row in rows), default=0),
        "ledgers": sum(row.get("rewrites", 0.0) for row in rows) / max(sum(row["phase"] == "train" for row in rows), 1),
        "z": z_score(episodes(folder.path / "trajectories")) if variant.expected in ("stays", "rises") else None,
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
    }
    (folder.path / "result.json").write_text(json.dumps(row))
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    return code


def curve(rows: list[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Return (updates, tokens sampled so far, held-out success) of each evaluation."""
    found: dict[int, tuple[int, int, float]] = {}
    tokens = 0
    for row in rows:
        if row["phase"] == "train":
            tokens += row["tokens_sampled"]
        elif row["phase"] in ("before", "eval", "after"):
            found[row["step"]] = (row["step"], tokens, row["success"])
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main())
