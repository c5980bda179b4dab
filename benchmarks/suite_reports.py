"""Write the reports of `agentrl env check` and `agentrl reward lint` on each suite to benchmarks/suite_reports.md.

    python benchmarks/suite_reports.py bfcl.source=PATH tau2.source=PATH toolsandbox.source=PATH toolsandbox.python=PATH ...

SUITE.PARAMETER=VALUE sets a parameter of a suite. An unnamed suite keeps its part of the page, with its date. Exit code 1 if a
command did not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("suite_reports.md")
SUITES = ("appworld", "bfcl", "tau2", "toolsandbox")
SIGNS = {True: "ok", False: "FAIL", None: "-"}
LONGEST = 300


def agentrl(words: list[str]) -> dict[str, Any]:
    """Return the JSON output of a command. Raises RuntimeError with its last output if there is none."""
    done = subprocess.run([sys.executable, "-m", "agentrl.cli.main", *words], capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"agentrl {' '.join(words)}: {(done.stderr or done.stdout).strip()[-500:]}") from None
    return found


def part(suite: str, params: dict[str, str], tasks: int, fuzz: int) -> str:
    """Return a suite's part of the page."""
    shown = [f"{name}={value}" for name, value in params.items() if name not in ("source", "python")]
    check = ["env", "check", suite, *(f"{name}={value}" for name, value in params.items())]
    check += ["--tasks", str(tasks), "--fuzz", str(fuzz), "--json"]
    lint = ["reward", "lint", suite, "--env", suite, "--tasks", str(tasks), "--json"]
    lint += [word for name, value in params.items() for word in ("--param", f"{name}={value}")]
    began = time.monotonic()
    (checks,) = agentrl(check)["environments"].values()
    findings = agentrl(lint)["findings"]
    seconds = time.monotonic() - began
    rows = [f"| {one['check']} | {SIGNS[one['ok']]} | {cell(one['evidence'])} |" for one in checks]
    linted = [f"| {one['level']}: {one['code']} | {one['at']} | {cell(one['message'])} |" for one in findings]
    with_params = f" {' '.join(shown)}" if shown else ""
    return "\n".join([
        f"## {suite}", "",
        f"`agentrl env check {suite}{with_params} --tasks {tasks} --fuzz {fuzz}` and `agentrl reward lint {suite} --env {suite} "
        f"--tasks {tasks}`, {date.today()}, {seconds:.0f} s.", "",
        "| check | | evidence |", "|---|---|---|", *rows, "",
        *(["| lint | place | |", "|---|---|---|", *linted] if linted else ["Lint: no finding."]), "",
    ])  # fmt: skip


def cell(text: str) -> str:
    """Format a text as a table cell, truncated if it is long."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else line[:LONGEST] + " ..."


def parts_of(page: str) -> dict[str, str]:
    """Return the parts of a page by suite."""
    return {text.split("\n", 1)[0].strip(): f"## {text}" for text in page.split("\n## ")[1:]}


def main() -> int:
    """Write the page. Returns 1 if a command did not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="SUITE.PARAMETER=VALUE")
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--fuzz", type=int, default=100)
    args = parser.parse_args()
    params: dict[str, dict[str, str]] = {}
    for word in args.words:
        name, _, value = word.partition("=")
        suite, _, parameter = name.partition(".")
        if suite not in SUITES or not parameter or not value:
            parser.error(f"{word!r}: expected SUITE.PARAMETER=VALUE, SUITE one of {', '.join(SUITES)}")
        params.setdefault(suite, {})[parameter] = value
    found = parts_of(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    failed = 0
    for suite, own in params.items():
        try:
            found[suite] = part(suite, own, args.tasks, args.fuzz)
        except RuntimeError as problem:
            print(problem, file=sys.stderr)
            failed += 1
    head = '# Checks of the benchmark suites\n\nWritten by `python benchmarks/suite_reports.py`. "FAIL" is a finding.\n'
    PAGE.write_text(head + "".join(f"\n{found[suite].strip()}\n" for suite in SUITES if suite in found), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
