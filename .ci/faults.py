"""Known faults, one after the other: each alone must turn its tests red. (`make faults`; docs/testing.md)

    python .ci/faults.py [-k WORD] [--jobs 2]

tests/faults.toml names them: in which file, which text becomes which, and which tests must see it. They are applied in
copies of the tree under build/faults, and the tests run in processes forked from one that has the libraries imported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from scratch import ROOT, copy_tree

LIST = ROOT / "tests" / "faults.toml"
WORK = ROOT / "build" / "faults"
LIMIT_S = 300


@dataclass(frozen=True)
class Fault:
    """`old` stands once in `file`; with `new` in its place, `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def changed(self, text: str) -> str:
        """The file with the fault in it. Raises ValueError where the list is older than the code."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: its text is {found} times in {self.file}, expected once; bring tests/faults.toml up to date")
        return text.replace(self.old, self.new)


def faults() -> list[Fault]:
    """The list. Raises ValueError for one that no longer applies, or whose tests are not there."""
    found = [Fault(**row) for row in tomllib.loads(LIST.read_text())["fault"]]
    for fault in found:
        if not (ROOT / fault.file).is_file():
            raise ValueError(f"{fault.name}: there is no file {fault.file}; bring tests/faults.toml up to date")
        fault.changed((ROOT / fault.file).read_text())
        for test in fault.tests:
            if not (ROOT / test.split("::")[0]).exists():
                raise ValueError(f"{fault.name}: there is no test {test}; bring tests/faults.toml up to date")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORD", help="only faults with this in their name")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    chosen = [fault for fault in faults() if args.k in fault.name]
    trees: Queue[Path] = Queue()
    for number in range(args.jobs):
        copy_tree(WORK / str(number))
        trees.put(WORK / str(number))
    warm()
    with ThreadPoolExecutor(args.jobs) as pool:
        clean = list(pool.map(lambda tests: (tests, tried(None, list(tests), trees)), sorted({tuple(f.tests) for f in chosen})))
        broken = [f"{' '.join(tests)}: red without a fault (exit {code})" for tests, (code, _) in clean if code != 0]
        if broken:
            print("\n".join(broken))
            return 2
        alive = 0
        for fault, (code, seconds) in zip(chosen, pool.map(lambda f: tried(f, f.tests, trees), chosen), strict=True):
            seen = code != 0
            alive += not seen
            print(f"{'seen    ' if seen else 'NOT SEEN'} {fault.name} ({seconds:.1f} s)", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} faults are seen")
    return 1 if alive else 0


def warm() -> None:
    """Import what tests need and what no fault is in."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.dont_write_bytecode = True
    for name in ("torch", "transformers", "tensordict", "hypothesis", "pytest", "torch.distributed.checkpoint"):
        __import__(name)


def tried(fault: Fault | None, tests: list[str], trees: Queue[Path]) -> tuple[int, float]:
    """pytest's exit code for the tests with a fault in the tree (or without), and the seconds it took."""
    tree = trees.get()
    began = time.monotonic()
    try:
        if fault is not None:
            (tree / fault.file).write_text(fault.changed((ROOT / fault.file).read_text()))
        return run(tree, tests), time.monotonic() - began
    finally:
        if fault is not None:
            shutil.copy2(ROOT / fault.file, tree / fault.file)
        trees.put(tree)


def run(tree: Path, tests: list[str]) -> int:
    """pytest -x in a forked process, ended with all its children where it takes too long (which counts as red)."""
    child = os.fork()
    if child == 0:
        os._exit(inside(tree, tests))
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def inside(tree: Path, tests: list[str]) -> int:
    """In the forked process: pytest on the tree's own files."""
    os.setsid()
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
