"""Kill or stop processes of runs at random moments, and check their results and leftovers.

    python benchmarks/chaos.py [--points 100] [--seed 0] [--kinds inline,workers,ray] [--limit 240] [--results] [--resume]
    python benchmarks/chaos.py --point 17        only this point

A point is one tiny run. At a random moment one of its processes, the driver or any descendant, gets SIGKILL, or SIGSTOP for a
random time. A run that does not finish is resumed. It must have exactly the metrics and weights of the undisturbed run.
`GRACE_S` after a run ended or its driver was killed, it must have left nothing: no process (and so no socket), no shared memory,
no temporary file. The action of a point is a function of the seed and its number, so `--point` repeats it. `--results` writes
the results after each point; `--resume` skips the points with written results.

Ray's session folder with its logs is not counted, since Ray keeps it. Each run has separate temporary files and, as root, a
separate /dev/shm (a mount namespace), so that other programs are not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from tests.tiny_run import MODEL, shorter_is_better  # noqa: E402

GRACE_S = 10.0
RESULTS = ROOT / "benchmarks" / "proofs" / "chaos.json"
PRIVATE = "AGENTRL_CHAOS_PRIVATE"
TAG = "AGENTRL_CHAOS"
SPEC = shorter_is_better(100)
CONFIG = """
steps = 6
engine = "embedded"
[env]
id = "key_value"
reward = "{spec}"
{model}[rollout]
groups = 3
group_size = 4
max_turns = 3
max_turn_tokens = 32
max_episode_tokens = 512
[optim]
lr = 1e-3
[eval]
tasks = 4
every = 2
[checkpoint]
every = 1
keep = 2
"""
KINDS = {
    "inline": ["cluster.backend=inline"],
    # Without the cache, because with it the last digits depend on which requests share a step, and so on the workers' speed.
    "workers": ["rollout.workers=2", "engine_args={cache=false}", "cluster.max_restarts=5"],
    "ray": ["cluster.max_restarts=5"],
}
WEIGHTS = {"inline": 7, "workers": 1, "ray": 2}
NOT_COMPARED = ("time/", "engine/", "throughput/", "loop/", "rollout/worker_")


@dataclass(slots=True)
class Point:
    """A disturbance and its result."""

    number: int
    kind: str
    signal: str = ""
    victim: str = ""
    after: float = 0.0
    came: str = ""
    faults: list[str] = field(default_factory=list)


class Run:
    """A command in a separate session, forked from this process, which has imported the libraries."""

    def __init__(self, words: list[str], said: Path, temporary: Path, tag: str) -> None:
        self.tag, self.said = tag, said
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._become(words, said, temporary)
        self.process = psutil.Process(self.pid)

    def _become(self, words: list[str], said: Path, temporary: Path) -> None:
        os.setsid()
        os.environ |= {"TMPDIR": str(temporary), TAG: self.tag, "RAY_TMPDIR": str(temporary)}
        os.environ["AGENTRL_SURVEY"] = "0"  # skip the check that gold solutions fit into three turns
        tempfile.tempdir = None
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        import atexit

        from agentrl.cli.main import main

        code = 1
        try:
            code = main(words)
        except BaseException:
            import traceback

            traceback.print_exc()
        atexit._run_exitfuncs()
        os._exit(code)

    def poll(self) -> bool:
        """Return True if the command has ended, and set `code`."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < until:
            time.sleep(0.02)
        return self.poll()

    def family(self) -> list[psutil.Process]:
        """Return the driver and all of its descendants, also those in other sessions or without a parent."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return os.getsid(process.pid) == self.pid or process.environ().get(TAG) == self.tag
        except (psutil.Error, OSError):
            return False


def name_of(process: psutil.Process, driver: int) -> str:
    """Return a display name of a process."""
    if process.pid == driver:
        return "driver"
    line = " ".join(process.cmdline())
    found = [part for part in ("gcs_server", "raylet", "ray::", "log_monitor", "runtime_env", "resource_tracker") if part in line]
    return line.split()[0] if found[:1] == ["ray::"] else found[0] if found else process.name()


def find_leftovers(run: Run, temporary: Path) -> list[str]:
    """List the leftovers after `GRACE_S`; return early once there are none."""
    until = time.monotonic() + GRACE_S
    while found := [*_processes(run), *_files(temporary), *_files(Path("/dev/shm")) * bool(os.environ.get(PRIVATE))]:
        if time.monotonic() > until:
            return found
        time.sleep(0.2)
    return []


def _processes(run: Run) -> Iterator[str]:
    for process in run.family():
        try:
            yield f"process {name_of(process, run.pid)}"
        except psutil.Error:
            continue


def _files(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir() if path.name != "ray"]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Read a run's metrics without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(NOT_COMPARED)} for row in rows]


def result(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    return numbers(folder), (folder / "final" / "model.safetensors").read_bytes()


def play(out: Path, point: Point, seed: int, undisturbed: tuple[Any, float], limit: float) -> None:
    """Play a point, and store the result in it."""
    draw = random.Random(f"{seed}/{point.number}")
    expected, seconds = undisturbed
    place = out / f"p{point.number:03d}"
    temporary = place / "t"
    temporary.mkdir(parents=True)
    words = ["train", str(out / "run.toml"), f"out={place}", "name=run", *KINDS[point.kind]]
    run = Run(words, place / "said.txt", temporary, f"{os.getpid()}-{point.number}")
    point.after, stopped = draw.uniform(0.0, seconds), draw.uniform(0.2, 3.0)
    point.signal = draw.choice(["SIGKILL", "SIGKILL", "SIGSTOP"])
    if not run.wait(point.after):
        send_signal_to_one(run, point, draw, stopped)
    await_end(run, point, place, temporary, limit)
    for _ in range(3):
        if run.code == 0 or point.faults:
            break
        begun = (place / "run" / "config.toml").is_file()
        again = ["train", "--resume", str(place / "run")] if begun else [*words, "--overwrite"]
        point.came += f"{'resumed' if begun else 'begun again'} after {run.code}; "
        run = Run(again, place / "said.txt", temporary, run.tag)
        await_end(run, point, place, temporary, limit)
    if run.code != 0 and not point.faults:
        point.faults.append(f"exit code {run.code} after three resumes")
    elif not point.faults and result(place / "run") != expected:
        point.faults.append("numbers or weights differ from the undisturbed run")
    if not point.faults:
        shutil.rmtree(place)


def send_signal_to_one(run: Run, point: Point, draw: random.Random, stopped: float) -> None:
    """Send the signal to one of the run's processes; a stopped one continues after `stopped` seconds."""
    family = sorted(run.family(), key=lambda process: process.pid)
    process = draw.choice(family) if family else run.process
    try:
        point.victim = name_of(process, run.pid)
        process.send_signal(signal.Signals[point.signal])
        if point.signal == "SIGSTOP":
            time.sleep(stopped)
            process.send_signal(signal.SIGCONT)
    except psutil.Error:  # the process has just ended
        point.victim += " (already ended)"


def await_end(run: Run, point: Point, place: Path, temporary: Path, limit: float) -> None:
    """Wait for the end of a command, and record its leftovers."""
    if not run.wait(limit):
        point.faults.append(f"it did not end within {limit:g} s")
    elif "Traceback" in (said := (place / "said.txt").read_text()):
        point.faults.append("a traceback: " + said.strip().splitlines()[-1][:200])
    found = find_leftovers(run, temporary) if not point.faults else []
    point.faults += [f"left behind: {', '.join(found[:6])}"] if found else []
    for process in run.family():
        process.kill()


def undisturbed_run(out: Path, kind: str, limit: float) -> tuple[Any, float]:
    """Run without disturbance, and return result and seconds."""
    began, place = time.monotonic(), out / f"w_{kind}"
    (place / "t").mkdir(parents=True)
    run = Run(
        ["train", str(out / "run.toml"), f"out={place}", "name=run", *KINDS[kind]],
        place / "said.txt",
        place / "t",
        f"{os.getpid()}-{kind}",
    )
    if not run.wait(limit) or run.code != 0:
        raise SystemExit((place / "said.txt").read_text())
    seconds = time.monotonic() - began
    if found := find_leftovers(run, place / "t"):
        print(f"the undisturbed {kind} run left behind: {', '.join(found)}")
    return result(place / "run"), seconds


def import_first() -> None:
    """Import a run's libraries once for all forked runs."""
    import transformers  # noqa: F401
    from torch.utils.tensorboard.writer import SummaryWriter  # noqa: F401

    import agentrl.run.driver  # noqa: F401


def in_private_mounts() -> None:
    """Mount a separate, empty /dev/shm, if root."""
    if os.environ.get(PRIVATE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    mount = 'mount -t tmpfs -o size=2g none /dev/shm && exec "$0" "$@"'
    probe = subprocess.run(["unshare", "-m", "sh", "-c", "mount -t tmpfs none /dev/shm"], capture_output=True)
    if probe.returncode == 0:
        os.environ[PRIVATE] = "1"
        os.execvp("unshare", ["unshare", "-m", "sh", "-c", mount, sys.executable, *sys.argv])


def main() -> int:
    """Play the points; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--point", type=int, help="play only this point")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of runs")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a run counts as hanging")
    parser.add_argument("--results", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}, after each point")
    parser.add_argument("--resume", action="store_true", help="skip points with written results; implies --results")
    arguments = parser.parse_args()
    in_private_mounts()
    import_first()
    book = Book.read(arguments.seed) if arguments.resume else Book(arguments.seed)
    wanted = [arguments.point] if arguments.point is not None else list(range(arguments.points))
    play_points(arguments, [number for number in wanted if number not in {point.number for point in book.points}], book)
    print(*summary_lines(book.points), sep="\n")
    return 1 if any(point.faults for point in book.points) else 0


def play_points(arguments: argparse.Namespace, wanted: list[int], book: Book) -> None:
    """Play the points one after the other, and add their results to the book."""
    kinds = arguments.kinds.split(",")
    out = Path(tempfile.mkdtemp(prefix="agc-"))
    (out / "spec.json").write_text(json.dumps(SPEC))
    (out / "run.toml").write_text(CONFIG.format(spec=out / "spec.json", model=MODEL))
    print(f"seed {arguments.seed}; folders of points with a fault stay in {out}", flush=True)
    whole: dict[str, tuple[Any, float]] = {}
    for number in wanted:
        kind = random.Random(f"{arguments.seed}/{number}/kind").choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if kind not in whole:
            whole[kind] = undisturbed_run(out, kind, arguments.limit)
        point = Point(number, kind)
        play(out, point, arguments.seed, whole[kind], arguments.limit)
        what = f"{point.signal} of {point.victim} after {point.after:.2f} s" if point.victim else "ended before the signal"
        print(f"point {number:3d}  {kind:8} {what}: {point.came}{'; '.join(point.faults) or 'equal'}", flush=True)
        book.add(point)
        if arguments.results or arguments.resume:
            book.write()


@dataclass(slots=True)
class Book:
    """Results of a seed's points, for `benchmarks/proofs`."""

    seed: int
    points: list[Point] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, seed: int) -> Book:
        """Read the written results; none of another seed."""
        table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if table.get("seed") != seed:
            return cls(seed)
        load = table["machine"]["load_average"]
        return cls(seed, [Point(**row) for row in table["points"]], [load["min"], load["max"]])

    def add(self, point: Point) -> None:
        """Add a finished point, with the load of the machine."""
        self.points.append(point)
        self.loads.append(os.getloadavg()[1])

    def write(self) -> None:
        """Write the results, replacing the file."""
        table = {
            "command": " ".join(["python", "benchmarks/chaos.py", *sys.argv[1:]]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": {"cores": os.cpu_count(), "load_average": {"min": min(self.loads), "max": max(self.loads)}},
            "seed": self.seed,
            "said": summary_lines(self.points),
            "points": [asdict(point) for point in self.points],
        }
        part = RESULTS.with_suffix(".part")
        part.write_text(json.dumps(table, indent=1) + "\n")
        part.replace(RESULTS)


def summary_lines(points: list[Point]) -> list[str]:
    """Return the summary lines."""
    bad = [point for point in points if point.faults]
    struck = Counter(f"{point.kind} {point.victim}" for point in points if point.victim)
    resumed = sum(bool(point.came) for point in points)
    equal = len(points) - len(bad)
    return [
        "struck: " + ", ".join(f"{name} {count}" for name, count in struck.most_common()),
        f"{len(points)} points, {struck.total()} struck, {resumed} resumed, {equal} equal and clean, {len(bad)} faults",
    ]


if __name__ == "__main__":
    sys.exit(main())
