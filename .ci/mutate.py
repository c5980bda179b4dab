"""Mutation testing: how many small faults in the code do the tests see? (`make mutate`; docs/testing.md)

    python .ci/mutate.py [--only agentrl/trainer/algorithms ...] [--per-file 5] [--seed 0] [--jobs 2] [--budget 30]

mutmut makes the mutants, records which test calls which function, and runs those tests on each mutant, in
processes forked from one that has imported everything. Added here: a seeded sample per file, without mutants that
only change the text of an error or a log line; a budget of test seconds per mutant (mutate_plugin.py); the report.
All of it happens in a copy of the tree under build/mutate, which stays until the tree changes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from scratch import ROOT, copy_tree, environment

WORK = ROOT / "build" / "mutate"
# Tests (folders and files) that may kill a mutant of a room. Those that do not call it cost nothing.
TESTS = {
    "agentrl/trainer/algorithms": ["tests/algorithm", "tests/trainer/test_learner.py", "tests/run/test_estimator_inputs.py"],
    "agentrl/data": ["tests/data", "tests/trainer"],
    "agentrl/reward": ["tests/reward", "tests/cli/test_reward.py", "tests/rollout"],
    "agentrl/rollout": ["tests/rollout", "tests/run"],
    "agentrl/trainer": ["tests/trainer", "tests/weights", "tests/run"],
    "agentrl/data/token_ledger.py": ["tests/rollout", "tests/data"],
    "agentrl/data/trajectory.py": ["tests/rollout", "tests/data", "tests/env/test_tool_env.py", "tests/reward"],
    "agentrl/run/loop.py": ["tests/e2e/test_unlit_paths.py", "tests/run"],
}
# These call agentrl in other processes, where mutmut does not see it, and cost half a minute each.
LEFT_OUT = [
    "tests/weights/test_publish_vllm.py",
    "tests/weights/test_publish_routes.py",
    "tests/trainer/test_ranks.py",
    "tests/data/test_balance_benchmark.py",
]
STATUS = {0: "survived", 1: "killed", 3: "killed", 5: "no tests", 33: "no tests"}
QUIET = ("log", "logger", "logging", "warnings")


@dataclass(frozen=True)
class Result:
    """One mutant: its place, its change, and whether the tests saw it."""

    file: str
    line: int
    before: str
    after: str
    status: str
    name: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATH", help="a room or file of the table, or a path in one"
    )
    parser.add_argument("--per-file", type=int, default=5, help="mutants sampled per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of tests per mutant")
    args = parser.parse_args()
    rooms = rooms_of(args.only)
    folder = WORK / "-".join(Path(room).stem for room in rooms)
    tree = folder / "tree"
    if copy_tree(tree):
        configure(tree, rooms)
        for old in folder.glob("results-*.json"):
            old.unlink()
    os.chdir(tree)
    generate(args.jobs)
    chosen = [m for file in mutated(args.only or rooms) for m in sample(file, args.per_file, args.seed)]
    print(f"{len(chosen)} mutants of {len({mutant.file for mutant in chosen})} files", flush=True)
    start = time.monotonic()
    run(tree, chosen, args.jobs, args.budget)
    results = read(chosen)
    write(results, folder, args.seed, f"seed {args.seed}, {args.per_file} per file, commit {commit()}", time.monotonic() - start)
    return 0


def rooms_of(only: list[str]) -> list[str]:
    """The rooms to which the given paths belong; all rooms by default."""
    if not only:
        return list(TESTS)
    rooms = []
    for path in only:
        matching = [room for room in TESTS if path == room or path.startswith(room + "/")]
        if not matching:
            raise SystemExit(f"--only {path}: expected one of {', '.join(TESTS)}, or a path in one of them")
        rooms += matching
    return sorted(set(rooms))


def configure(tree: Path, rooms: list[str]) -> None:
    """Write mutmut's settings to the copy's pyproject.toml."""
    tests = sorted({test for room in rooms for test in TESTS[room] if (tree / test).exists()})
    tests = [test for test in tests if not any(test.startswith(other + "/") for other in tests)]
    mutate = [room if room.endswith(".py") else f"{room}/*" for room in rooms]
    lines = {
        "source_paths": ["agentrl"],
        "only_mutate": mutate,
        "also_copy": ["envs", "tools", "rewards", "configs", "docs", "benchmarks", "README.md"],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": [
            "-p",
            "mutate_plugin",
            "-p",
            "no:cacheprovider",
            "-k",
            "not killed",
            *[f"--ignore={path}" for path in LEFT_OUT],
        ],
        "process_isolation": "forkserver",
        "forkserver_warmup": "collect",
        "use_git_change_detection": False,
        "timeout_multiplier": 4.0,
        "timeout_constant": 20.0,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    with (tree / "pyproject.toml").open("a") as file:
        file.write(f"\n[tool.mutmut]\n{text}")


def generate(jobs: int) -> None:
    """Write all mutants. This uses mutmut's internals, because it has no command for this step alone."""
    from mutmut import __main__ as mutmut
    from mutmut.mutation.trampoline import set_mutant_under_test

    set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    with contextlib.redirect_stdout(io.StringIO()):
        mutmut.copy_src_dir()
        mutmut.copy_also_copy_files()
        mutmut.setup_source_paths()
        mutmut.create_mutants(jobs)


def mutated(paths: list[str]) -> list[str]:
    """List the files with mutants at or below one of the paths."""
    metas = sorted(str(path.relative_to("mutants")).removesuffix(".meta") for path in Path("mutants/agentrl").rglob("*.py.meta"))
    return [file for file in metas if any(file == path or file.startswith(path.rstrip("/") + "/") for path in paths)]


def sample(file: str, count: int, seed: int) -> list[Result]:
    """Draw `count` mutants of a file that change more than a message, a function of seed and file."""
    names = sorted(json.loads(Path(f"mutants/{file}.meta").read_text())["exit_code_by_key"])
    random.Random(f"{seed} {file}").shuffle(names)
    chosen: list[Result] = []
    for name in names:
        if len(chosen) == count:
            break
        change = change_of(file, name)
        if change is not None:
            chosen.append(Result(file, *change, status="", name=name))
    return sorted(chosen, key=lambda mutant: mutant.line)


def change_of(file: str, name: str) -> tuple[int, str, str] | None:
    """Return (line, before, after) of a mutant; None if it only changes a message."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    rows = get_diff_for_mutant(name, path=file).splitlines()
    before = [row[1:] for row in rows if row.startswith("-") and not row.startswith("---")]
    after = [row[1:] for row in rows if row.startswith("+") and not row.startswith("+++")]
    source = Path(file).read_text()
    head = next(row for row in rows if row.startswith("@@"))
    function = re.sub(r".*x(?:ǁ\w+ǁ|_)(\w+)__mutmut_\d+$", r"\1", name)
    line = line_of(source, function, before, head)
    if line is None or says_only(source, line):
        return None
    return line, " ".join(map(str.strip, before)), " ".join(map(str.strip, after))


def line_of(source: str, function: str, before: list[str], head: str) -> int | None:
    """Return the line number of the first changed line, which is in a function named `function`."""
    # mutmut's diff counts from the function's start, and a file may have several functions of that name.
    wanted = next((row.strip() for row in before if row.strip()), None)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            matching = [number for number in inside if lines[number - 1].strip() == wanted]
            if matching:
                near = node.lineno + int(re.findall(r"\d+", head)[0]) + 2
                return min(matching, key=lambda number: abs(number - near))
    return None


def says_only(source: str, line: int) -> bool:
    """Return True if a line belongs to a raise, a log call or the message of an assert."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, ast.Raise | ast.Assert):
            return True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called.split(".")[0] in QUIET or called.endswith((".say", "._say")):
                return True
    return False


def run(tree: Path, chosen: list[Result], jobs: int, budget: float) -> None:
    """Run mutmut on the chosen mutants."""
    env = environment(tree / "mutants", ROOT / ".ci") | {
        "AGENTRL_SLOW": "1",
        "MUTATE_BUDGET": str(budget),
        "MUTATE_COSTS": str(tree / "test-costs.json"),
    }
    env.pop("MUTANT_UNDER_TEST", None)  # else the plugin would treat the run as one of a mutant
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(jobs), *[mutant.name for mutant in chosen]]
    with (tree / "mutmut.log").open("w") as log:
        code = subprocess.run(command, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT).returncode
    if code != 0:
        last = [row for row in re.split(r"[\r\n]+", (tree / "mutmut.log").read_text()) if row.strip()][-30:]
        raise SystemExit("\n".join([*last, f"mutmut ended with {code}; its whole output is in {tree / 'mutmut.log'}"]))


def read(chosen: list[Result]) -> list[Result]:
    """The mutants with their status."""
    codes = {file: json.loads(Path(f"mutants/{file}.meta").read_text())["exit_code_by_key"] for file in {m.file for m in chosen}}
    results = []
    for mutant in chosen:
        code = codes[mutant.file][mutant.name]
        status = "not run" if code is None else STATUS.get(code, "timeout")
        results.append(Result(**{**asdict(mutant), "status": status}))
    return results


Counts = tuple[int, int, int, int]
"""Mutants of a file: all, killed (including timeouts), survived, called by no test."""


def counted(results: list[Result]) -> dict[str, Counts]:
    """Counts by file."""
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        by_file[result.file][result.status] += 1
    return {
        file: (sum(count.values()), count["killed"] + count["timeout"], count["survived"], count["no tests"])
        for file, count in by_file.items()
    }


def table(rows: dict[str, tuple[Counts, str]]) -> list[str]:
    """A markdown table: per file its counts, its score, and the commit at which they were measured."""
    text = ["| file | mutants | killed | survived | no test calls it | score | at |", "|---|---|---|---|---|---|---|"]
    total = tuple(sum(counts[column] for counts, _ in rows.values()) for column in range(4))
    for file, (counts, at) in [*sorted(rows.items()), ("all", (total, ""))]:
        cells = [file, *map(str, counts), f"{counts[1] / max(counts[0], 1):.0%}", at]
        text.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return text


def write(results: list[Result], folder: Path, seed: int, sampled: str, seconds: float) -> None:
    """Write survivors.md and the seed's results next to the copy, and print the table."""
    alive = [result for result in results if result.status in ("survived", "no tests", "not run")]
    costs = json.loads((folder / "tree" / "test-costs.json").read_text())
    text = [f"# Mutants that no test sees ({sampled})", ""]
    text += [f"Red without a mutant, so not used: {test}\n" for test, cost in costs.items() if cost is None]
    for result in alive:
        text += [
            f"- {result.file}:{result.line} ({result.status})",
            "",
            textwrap.indent("\n".join(difflib.ndiff([result.before], [result.after])), "      "),
            "",
        ]
    (folder / "survivors.md").write_text("\n".join(text) + "\n")
    kept = {"sampled": sampled, "at": commit(), "results": [asdict(result) for result in results]}
    (folder / f"results-{seed}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(table({file: (counts, commit()) for file, counts in counted(results).items()})))
    print(
        f"{len(alive)} of {len(results)} survived: {folder / 'survivors.md'}; "
        f"{seconds:.0f} s, {seconds / max(len(results), 1):.2f} s per mutant"
    )


def commit() -> str:
    """The commit of the tree, abbreviated."""
    done = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "no commit"


if __name__ == "__main__":
    sys.exit(main())
