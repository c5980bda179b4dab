"""Try 100,000 inputs over all targets, each with a limit of time and memory. Failing inputs go into the corpus.

python -m tests.hostile.fuzz [--inputs 100000] [--only calls:] [--seed 0] [--jobs 2] [--out FILE]
python -m tests.hostile.fuzz --again tests/hostile/corpus/NAME.json
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import FlakyFailure

from tests.hostile.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SECONDS = 5.0
"""Of the processor, for one input."""
MEMORY = 1 << 30
"""Bytes that the inputs of one target may take, beyond what the program has at its start."""


class TooSlowError(BaseException):
    """No `Exception`, which what is tried might catch."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooSlowError in the block after `seconds` of the processor (a machine may do other things too), or ten times as many
    in all, once Python code runs again."""

    def late(*args: object) -> None:
        raise TooSlowError(f"longer than {seconds:g} s")

    timers = [(signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds)]
    before = [signal.signal(number, late) for number, _, _ in timers]
    try:
        for _, timer, most in timers:
            signal.setitimer(timer, most)
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def text_of(entry: Mapping[str, Any]) -> str:
    """The input of a corpus entry: `text`, or `shape` (before, again, after) of so many `characters`."""
    if "text" in entry:
        return str(entry["text"])
    before, again, after = entry["shape"]
    return before + again * ((entry["characters"] - len(before) - len(after)) // len(again)) + after


def keep(target: str, text: str, did: str, folder: Path = CORPUS) -> Path:
    """Save an input to the corpus."""
    name = f"{target.replace(':', '-')}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}.json"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"target": target, "did": did, "text": text}, indent=1) + "\n", encoding="utf-8")
    return folder / name


def fuzz_here(name: str, inputs: int, seed: int, current: Path | None = None, folder: Path = CORPUS) -> dict[str, Any]:
    """Try inputs of one target in this process: how many, the longest in seconds, and the file of the first that failed."""
    target = TARGETS[name]
    done: dict[str, Any] = {"target": name, "inputs": 0, "longest_s": 0.0, "failed": None, "why": ""}
    failing: list[tuple[str, str]] = []

    @seeded(seed)
    @settings(
        max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @given(target.texts)
    def each(text: str) -> None:
        if current is not None:
            current.write_bytes(text.encode("utf-8", "surrogatepass"))
        began = time.perf_counter()
        try:
            with limited(SECONDS):
                target.read(text)
        except (Exception, TooSlowError) as problem:
            failing.append((text, f"{type(problem).__name__}: {problem}"[:300]))
            raise AssertionError(name) from problem
        finally:
            done["inputs"] += 1
            done["longest_s"] = max(done["longest_s"], time.perf_counter() - began)

    try:
        each()
    except (AssertionError, FlakyFailure):  # what fails by its time does not fail each time
        text, done["why"] = min(failing, key=lambda one: len(one[0]))
        done["failed"] = str(keep(name, text, done["why"], folder))
    return done


class _Apart:
    """One target in a process of its own, which is ended if an input holds it up."""

    def __init__(self, name: str, inputs: int, seed: int, folder: Path) -> None:
        self.name, self._began = name, time.monotonic()
        self._current, self._found = folder / f"{name}.input", folder / f"{name}.json"
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(inputs, seed))
        self._process.start()

    def _run(self, inputs: int, seed: int) -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = fuzz_here(self.name, inputs, seed, self._current)
        found["memory_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        self._found.write_text(json.dumps(found))

    def found(self) -> dict[str, Any] | None:
        """What came out; None while it goes on."""
        why = ""
        if self._process.is_alive():
            if not self._current.exists() or time.time() - self._current.stat().st_mtime < 6 * SECONDS:
                return None
            self._process.kill()
            why = f"killed: one input took longer than {6 * SECONDS:g} s and could not be interrupted"
        self._process.join()
        spent = {"seconds": time.monotonic() - self._began}
        if self._found.exists() and not why:
            return json.loads(self._found.read_text()) | spent
        why = why or f"the process ended with {self._process.exitcode}"
        last = self._current.read_bytes().decode("utf-8", "surrogatepass") if self._current.exists() else ""
        row = {"target": self.name, "inputs": 0, "longest_s": 0.0, "memory_mb": 0, "why": why}
        return row | {"failed": str(keep(self.name, last, why))} | spent


def _line(row: Mapping[str, Any]) -> str:
    return f"{row['target']:24} {row['inputs']:8} {row['seconds']:8.1f} {row['longest_s']:10.3f} {row['memory_mb']:8}"


def _all(shares: Mapping[str, int], seed: int, jobs: int) -> list[dict[str, Any]]:
    """Every target, `jobs` of them at the same time."""
    found: list[dict[str, Any]] = []
    rest, going = list(shares.items()), []
    with tempfile.TemporaryDirectory() as folder:
        while rest or going:
            while rest and len(going) < jobs:
                going.append(_Apart(*rest.pop(0), seed, Path(folder)))
            time.sleep(0.05)
            for one in list(going):
                if (row := one.found()) is not None:
                    going.remove(one)
                    found.append(row)
                    print(_line(row), flush=True)
    return found


def again(file: Path) -> int:
    """Try one entry of the corpus."""
    entry = json.loads(file.read_text(encoding="utf-8"))
    began = time.perf_counter()
    with limited(6 * SECONDS):
        TARGETS[entry["target"]].read(text_of(entry))
    print(f"{file.name}: {entry['target']} takes it, in {time.perf_counter() - began:.3f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--only", default="", help="targets whose name begins so")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at the same time")
    parser.add_argument("--out", type=Path, help="keep the result there, as JSON")
    parser.add_argument("--again", type=Path)
    args = parser.parse_args()
    if args.again:
        return again(args.again)
    names = [name for name in TARGETS if name.startswith(args.only)]
    whole = sum(TARGETS[name].inputs for name in names)
    shares = {name: max(1, -(-args.inputs * TARGETS[name].inputs // whole)) for name in names}
    began = time.monotonic()
    print(f"{'target':24} {'inputs':>8} {'seconds':>8} {'longest s':>10} {'MB more':>8}")
    found = _all(shares, args.seed, args.jobs)
    failed = [row for row in found if row["failed"]]
    for row in failed:
        print(f"FAILED {row['target']}: {row['why']}\n  again: python -m tests.hostile.fuzz --again {row['failed']}")
    total = sum(row["inputs"] for row in found)
    said = f"{total} inputs, {len(found)} targets, {len(failed)} failed, {time.monotonic() - began:.0f} s"
    print(said)
    if args.out is not None:
        told = {"command": " ".join(["python -m tests.hostile.fuzz", *sys.argv[1:]]), "seed": args.seed, "result": said}
        told |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "bounds": {"seconds": SECONDS, "memory_mb": MEMORY >> 20}}
        args.out.write_text(json.dumps({**told, "targets": found}, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
