"""Measure resource growth in a long run: memory, descriptors, threads and files per update, with slopes and an extrapolation.

    python benchmarks/endurance.py [--updates 2000] [--episodes 50] [--backend inline] [--out DIR] [name=value ...]
    python benchmarks/endurance.py --table DIR        the table again, from recorded samples

Runs a tiny model through `agentrl train`, with checkpoints, evaluations and trajectories as in a real run, and samples it from
outside: its processes by kind (driver, kinds of Ray processes, kinds of workers), and its folder by part. Slopes are least
squares over the last half of the updates; `flat` is a slope that adds less than a tenth of the level, or less than `NOISE`, in
10,000 updates. Allocators settle within the first `WARM_UP` updates: if the last half starts earlier, the table has `too short`
for growing memory instead of `no`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.tiny_run import MODEL, shorter_is_better  # noqa: E402

SPEC = shorter_is_better(12)
CONFIG = """
steps = {updates}
engine = "embedded"
[env]
id = "key_value"
reward = "{spec}"
{model}[rollout]
groups = {groups}
group_size = 5
max_turns = 2
max_turn_tokens = 6
max_episode_tokens = 512
[optim]
lr = 1e-4
[eval]
tasks = 4
every = 100
[checkpoint]
every = 25
[health]
max_unsolvable = 1.0  # turns are too short for a call; the reward is for short outputs
[cluster]
backend = "{backend}"
"""
FAR_UPDATES = 10_000
MODULE = "agentrl.cli.main"
EVERY_S = 2.0
WARM_UP = 1000
"""Updates after which the driver's memory stays level (benchmarks/README.md: -0.08 MiB per 1,000)."""
NOISE = {"MiB": 32.0, "descriptors": 4.0, "threads": 4.0, "processes": 1.0, "files": 50.0}
"""Growth in `FAR_UPDATES` updates that counts as flat at any level."""
_TITLE = re.compile(r"ray::(\w+)|(gcs_server|raylet|dashboard|log_monitor|runtime_env|ray_keeper)|multiprocessing\.(\w+)")
Sample = dict[str, float]


def kind(process: psutil.Process, started: int) -> str:
    """Return a process's name in the table. With Ray, process `started` is the parent of the driver."""
    command = process.cmdline()
    if MODULE in command:
        return "parent" if process.pid == started and any(MODULE in child.cmdline() for child in process.children()) else "driver"
    found = _TITLE.search(" ".join(command))
    return next((part for part in found.groups() if part), "child") if found else "child"


def processes(started: int) -> Sample:
    """Count the processes of each kind, and sum their unshared memory, descriptors and threads."""
    found: Sample = defaultdict(float)
    for process in _process_tree(started):
        try:
            name = kind(process, started)
            memory, descriptors, threads = process.memory_full_info().uss / 2**20, process.num_fds(), process.num_threads()
        except psutil.Error:  # the process has just ended
            continue
        values = {"processes": 1, "MiB": memory, "descriptors": descriptors, "threads": threads}
        for what, value in values.items():
            found[f"{name}, {what}"] += value
    return found


def _process_tree(started: int) -> Iterator[psutil.Process]:
    try:
        parent = psutil.Process(started)
        yield from [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return


def on_disk(folder: Path, temporary: Path) -> Sample:
    """Return files and MiB of each part of the run's folder, of the temporary folder and of shared memory."""
    files, size = Counter[str](), Counter[str]()
    places = [(path, path.name) for path in folder.iterdir()] if folder.is_dir() else []
    for place, name in [*places, (temporary, "temporary folder"), (Path("/dev/shm"), "/dev/shm")]:
        for at, _, names in os.walk(place) if place.is_dir() else [(str(place.parent), [], [place.name])]:
            for file in names:
                try:
                    size[name] += os.lstat(Path(at, file)).st_size
                except OSError:
                    continue
                files[name] += 1
    of = {f"{name}, files": float(count) for name, count in files.items()}
    return of | {f"{name}, MiB": count / 2**20 for name, count in size.items()}


def updates(folder: Path) -> int:
    """Return the number of recorded updates, by the end of the run's metrics."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, 2) - 65536, 0))
            steps = re.findall(rb'"step": (\d+), "phase": "train"', file.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def run_and_sample(out: Path, arguments: argparse.Namespace) -> int:
    """Run to the end, write samples to `samples.jsonl`, and return the run's exit code."""
    temporary, folder = out / "tmp", out / "run"
    temporary.mkdir(parents=True, exist_ok=True)
    (out / "spec.json").write_text(json.dumps(SPEC))
    text = CONFIG.format(
        model=MODEL, updates=arguments.updates, groups=arguments.episodes // 5, spec=out / "spec.json", backend=arguments.backend
    )
    (out / "run.toml").write_text(text)
    command = [sys.executable, "-m", MODULE, "train", str(out / "run.toml"), f"out={out}", "name=run", "--overwrite"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    began, seen = time.monotonic(), -1
    with (out / "said.txt").open("w") as said, (out / "samples.jsonl").open("w") as samples:
        run = subprocess.Popen([*command, *arguments.overrides], stdout=said, stderr=said, env=env, cwd=out)
        while run.poll() is None:
            time.sleep(EVERY_S)
            if seen < (step := updates(folder)) < arguments.updates:  # the end of a run writes files that no step writes
                sample = {"update": step, "seconds": time.monotonic() - began, **processes(run.pid), **on_disk(folder, temporary)}
                samples.write(json.dumps(sample) + "\n")
                samples.flush()
                seen = step
    return run.returncode


def slopes(samples: list[Sample]) -> list[tuple[str, float, float, float, float]]:
    """Return (name, value at half of the updates, at the end, slope per 1,000 updates, level at `FAR_UPDATES`) of each series."""
    later = [sample for sample in samples if sample["update"] >= samples[-1]["update"] / 2]
    x = np.array([sample["update"] for sample in later])
    rows = []
    for key in sorted({key for sample in later for key in sample} - {"update", "seconds"}):
        y = np.array([sample.get(key, 0.0) for sample in later])
        slope, start = np.polyfit(x, y, 1) if len(x) > 1 else (0.0, y[0])
        rows.append(
            (key, float(start + slope * x[0]), float(start + slope * x[-1]), slope * 1000, float(start + slope * FAR_UPDATES))
        )
    return rows


def is_flat(key: str, level: float, slope: float) -> bool:
    """Return True if 10,000 updates add next to nothing."""
    return slope * FAR_UPDATES / 1000 <= max(NOISE[key.rpartition(", ")[2]], 0.1 * level)


def table(samples: list[Sample], episodes: int) -> str:
    """Format the slopes as Markdown."""
    last = samples[-1]
    lines = [
        f"{last['update']:,.0f} updates, {last['update'] * episodes:,.0f} episodes, {last['seconds'] / 60:.0f} minutes, "
        f"{len(samples)} samples",
        "",
        f"| what | at half | at the end | per 1,000 updates | at {FAR_UPDATES:,} | flat |",
        "|---|---|---|---|---|---|",
    ]
    for key, first, end, slope, later in slopes(samples):
        early = last["update"] / 2 < WARM_UP and key.endswith(", MiB") and key.removesuffix(", MiB") + ", threads" in last
        flat = "yes" if is_flat(key, (first + end) / 2, slope) else "too short" if early else "**no**"
        lines.append(f"| {key} | {first:.1f} | {end:.1f} | {slope:+.2f} | {later:.1f} | {flat} |")
    return "\n".join(lines)


def main() -> int:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=50, help="episodes per update, a multiple of 5")
    parser.add_argument("--backend", default="inline")
    parser.add_argument("--out", type=Path, help="folder of the run and its samples")
    parser.add_argument("--table", type=Path, metavar="DIR", help="print the table of recorded samples, without a run")
    parser.add_argument("overrides", nargs="*", help="overrides of the run's config")
    arguments = parser.parse_args()
    out = (arguments.table or arguments.out or Path(tempfile.mkdtemp(prefix="agentrl-endurance-"))).absolute()
    code = 0 if arguments.table else run_and_sample(out, arguments)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    if code or not samples:
        print((out / "said.txt").read_text()[-4000:])
        return code or 1
    print(table(samples, arguments.episodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
