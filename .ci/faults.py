"""Apply known faults one at a time: each must make its tests fail. (`make faults`; docs/testing.md)

    python .ci/faults.py [-k REGEX] [--jobs 2]

tests/faults.toml lists them: the file, the text to replace, its replacement, and the tests that must fail. They are applied
in copies of the tree under build/faults, and the tests run in processes forked from one that has imported the libraries.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from scratch import ROOT, copy_tree

LIST = ROOT / "tests" / "faults.toml"
WORK = ROOT / "build" / "faults"
LIMIT_S = 300
LATE = 124
UPDATE = "bring tests/faults.toml up to date"


@dataclass(frozen=True)
class Fault:
    """`old` occurs once in `file`; with `new` in its place, `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def changed(self, text: str) -> str:
        """Return the file's text with the fault. Raises ValueError if the list is older than the code."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its text is {count} times in {self.file}, expected once; {UPDATE}")
        return text.replace(self.old, self.new)


def faults() -> list[Fault]:
    """Read the list. Raises ValueError for a fault that no longer applies, or whose tests do not exist."""
    listed = [Fault(**{**row, "tests": tuple(row["tests"])}) for row in tomllib.loads(LIST.read_text())["fault"]]
    for fault in listed:
        if not (ROOT / fault.file).is_file():
            raise ValueError(f"{fault.name}: there is no file {fault.file}; {UPDATE}")
        fault.changed((ROOT / fault.file).read_text())
        for test in fault.tests:
            if not (ROOT / test.split("::")[0]).exists():
                raise ValueError(f"{fault.name}: there is no test {test}; {UPDATE}")
    return listed


@dataclass
class Trial:
    """A run of tests on a tree, with a fault or without."""

    fault: Fault | None
    tests: tuple[str, ...]
    code: int = -1
    started: float = 0.0
    original: str = ""

    def apply(self, tree: Path) -> None:
        """Put the fault into the tree."""
        if self.fault is not None:
            self.original = (tree / self.fault.file).read_text()
            (tree / self.fault.file).write_text(self.fault.changed(self.original))

    def end(self, code: int, tree: Path) -> None:
        """Remove the fault from the tree, and report."""
        self.code = code
        if self.fault is not None:
            (tree / self.fault.file).write_text(self.original)
            seen = "seen    " if code else "NOT SEEN"
            print(f"{seen} {self.fault.name} ({time.monotonic() - self.started:.1f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="REGEX", help="only faults with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [fault for fault in faults() if re.search(args.k, fault.name)]
    trees = [WORK / str(number) for number in range(args.jobs)]
    for tree in trees:
        copy_tree(tree)
    warm()
    clean = [Trial(None, tests) for tests in sorted({fault.tests for fault in chosen})]
    run(clean, trees)
    # First without faults: a test that always fails would detect every fault.
    red = [f"{' '.join(trial.tests)}: red without a fault (exit {trial.code})" for trial in clean if trial.code]
    if red:
        print("\n".join(red))
        return 2
    trials = [Trial(fault, fault.tests) for fault in chosen]
    run(trials, trees)
    unseen = [trial.fault.name for trial in trials if trial.fault is not None and trial.code == 0]
    print("\n".join([f"{len(trials) - len(unseen)} of {len(trials)} faults are seen", *(f"NOT SEEN {name}" for name in unseen)]))
    return 1 if unseen else 0


def warm() -> None:
    """Import libraries that tests need, but not agentrl, which the forked processes must import from their tree."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["AGENTRL_SLOW"] = "1"
    sys.dont_write_bytecode = True
    for name in ("torch", "transformers", "tensordict", "hypothesis", "pytest", "torch.distributed.checkpoint"):
        __import__(name)


def run(trials: list[Trial], trees: list[Path]) -> None:
    """Run pytest -x for each trial in forked processes, one per tree at a time. A trial that takes too long is killed with all
    of its children, and counts as failed."""
    # One trial per tree at a time, since its fault is in the tree's files.
    waiting, running, free = list(reversed(trials)), dict[int, tuple[Trial, Path]](), list(trees)
    try:
        while waiting or running:
            while waiting and free:
                trial, tree = waiting.pop(), free.pop()
                running[fork_trial(trial, tree)] = trial, tree
            time.sleep(0.05)
            for child, (trial, tree) in list(running.items()):
                code = poll(child, trial)
                if code is not None:
                    del running[child]
                    trial.end(code, tree)
                    free.append(tree)
    finally:
        for child in running:
            os.killpg(child, signal.SIGKILL)


def fork_trial(trial: Trial, tree: Path) -> int:
    """Fork a process that runs a trial; returns its id."""
    trial.apply(tree)
    trial.started = time.monotonic()
    child = os.fork()
    if child == 0:
        os._exit(run_pytest(tree, trial.tests))
    return child


def poll(child: int, trial: Trial) -> int | None:
    """Return the exit code of a process, LATE if it had to be killed, None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status)
    if time.monotonic() - trial.started < LIMIT_S:
        return None
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return LATE


def run_pytest(tree: Path, tests: tuple[str, ...]) -> int:
    """Run pytest on the files of the tree, in the forked process."""
    os.setsid()  # its own group, so that the processes that tests start can be killed with it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job ignores it
    sys.modules["__main__"] = ModuleType("__main__")  # else processes spawned by tests run this file, without `scratch`
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / ".ci"))]
    with (tree / "pytest.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        import pytest

        return int(pytest.main(["-x", "-q", "--tb=line", "-p", "no:cacheprovider", *tests]))


if __name__ == "__main__":
    sys.exit(main())
