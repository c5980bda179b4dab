"""The benchmark book: every claim of claims.toml measured by its command, compared with what was committed, and written to docs.

    python benchmarks/book.py run [--only publish]     benchmarks/results/NAME.json of each claim
    python benchmarks/book.py compare                  names every figure that is worse than the committed one; exit code 1 then
    python benchmarks/book.py write                    docs/benchmark_book.md from the files

`make bench` runs and writes, `make bench-compare` compares. A claim that fails or passes its limit keeps the file that it
had, and is named at the end; exit code 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
RESULTS = HERE / "results"
PAGE = ROOT / "docs" / "benchmark_book.md"
WORSE = 0.1


def claims() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((HERE / "claims.toml").read_text())["claim"]
    return found


# -- measuring --------------------------------------------------------------------------------------


def measured(claim: dict[str, Any]) -> dict[str, Any]:
    """The result of a claim's command. Raises RuntimeError if it fails or takes longer than it may."""
    command = [sys.executable, *claim["command"].split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    load, start = os.getloadavg()[0], time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=claim["seconds"], check=False)
    except subprocess.TimeoutExpired as problem:
        raise RuntimeError(f"not done within {claim['seconds']} s") from problem
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
    raw = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        "claim": claim["name"],
        "command": f"python {claim['command']}",
        "date": date.today().isoformat(),
        "commit": commit(),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": machine(load),
        "peer": claim["peer"],
        "figures": dict(figures(claim, raw)),
    }


def figures(claim: dict[str, Any], raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Label -> value, which way is better and the aim, of a command's JSON object. Raises RuntimeError for a path it lacks."""
    for figure in claim["figures"]:
        try:
            value = _at(raw, figure["at"])
        except KeyError as problem:
            raise RuntimeError(f"its output has no {figure['at']!r}") from problem
        rest = {key: figure[key] for key in ("better", "aim", "tolerance") if key in figure}
        several = value.items() if figure["label"] == "*" else [(figure["label"], value)]
        for label, number in several:
            yield label, {"value": round(float(number), 4), **rest}


def _at(raw: dict[str, Any], path: str) -> Any:
    """The value at a dotted path. A key may have dots itself: the longest one that is there is taken."""
    keys = path.split(".")
    for stop in range(len(keys), 0, -1):
        head = ".".join(keys[:stop])
        if head in raw:
            return raw[head] if stop == len(keys) else _at(raw[head], ".".join(keys[stop:]))
    raise KeyError(path)


def machine(load: float) -> dict[str, Any]:
    """What the figures depend on: processors, memory, versions, and how busy the machine was when the command began."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "load": round(load, 1),
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def run(only: list[str]) -> int:
    """Measure and write the files; 1 if a claim could not be measured."""
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for claim in claims():
        if only and claim["name"] not in only:
            continue
        print(f"{claim['name']}: python {claim['command']}", flush=True)
        try:
            found = measured(claim)
        except RuntimeError as problem:
            failed.append(claim["name"])
            print(f"  not measured: {problem}", flush=True)
            continue
        (RESULTS / f"{claim['name']}.json").write_text(json.dumps(found, indent=1) + "\n")
        for label, figure in found["figures"].items():
            print(f"  {label:<70} {shown(figure['value']):>10}  {verdict(figure)}", flush=True)
    if failed:
        print(f"not measured: {', '.join(failed)}")
    return 1 if failed else 0


# -- comparing --------------------------------------------------------------------------------------


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """The figures of a claim that got worse by more than they may, or are gone, a line each."""
    lines = []
    for label, old in before["figures"].items():
        new = now["figures"].get(label)
        if new is None:
            lines.append(f"{now['claim']}: {label}: no longer measured")
            continue
        was, found = old["value"], new["value"]
        change = (was - found if new["better"] == "higher" else found - was) / abs(was) if was else float(found > 0)
        if change > new.get("tolerance", WORSE):
            lines.append(f"{now['claim']}: {label}: {shown(was)} -> {shown(found)}, {100 * change:.0f} % worse")
    return lines


def committed(name: str) -> dict[str, Any] | None:
    """A claim's result at HEAD; None if there is none."""
    place = f"HEAD:benchmarks/results/{name}.json"
    done = subprocess.run(["git", "show", place], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else json.loads(done.stdout)


def compare() -> int:
    """Name what got worse between HEAD and the files; 1 if anything did."""
    lines = []
    for name, now in results().items():
        before = committed(name)
        lines += [] if before is None else worse(now, before)
    print("\n".join(lines) or "nothing got worse by 10 %")
    return 1 if lines else 0


# -- writing ----------------------------------------------------------------------------------------


def results() -> dict[str, dict[str, Any]]:
    """The files by claim, in the order of claims.toml."""
    found = {}
    for claim in claims():
        if (file := RESULTS / f"{claim['name']}.json").is_file():
            found[claim["name"]] = json.loads(file.read_text())
    return found


def page() -> str:
    """The text of the book."""
    text = [
        "# Benchmark book\n",
        "<!-- written by `make bench` from benchmarks/results -->\n",
        "One table per claim, measured by the command above it (`make bench` runs them all; `make bench-compare` names what got",
        "worse by 10 %). Ratios are of one run. A high load average means that other work disturbed it. Figures that are not a",
        "claim yet, and how each was found, are in the [list of all measurements](../benchmarks/README.md).",
    ]
    found = results()
    for claim in claims():
        if claim["name"] in found:
            text.append(_table(claim["title"], found[claim["name"]]))
    return "\n".join(text) + "\n"


def _table(title: str, result: dict[str, Any]) -> str:
    about = result["machine"]
    peer = f", peer: {result['peer']}" if result["peer"] else ""
    where = f"{about['cores']} cores ({about['processor']}), {about['memory_gib']} GiB, Python {about['python']}"
    lines = [
        f"\n## {title}\n",
        f"    {result['command']}\n",
        f"{result['date']}, commit {result['commit']}, {where}, load average {about['load']}{peer}\n",
        "| figure | value | aim | |",
        "|---|---|---|---|",
    ]
    for label, figure in result["figures"].items():
        sign = "at least" if figure["better"] == "higher" else "at most"
        aim = f"{sign} {shown(figure['aim'])}" if "aim" in figure else ""
        lines.append(f"| {label} | {shown(figure['value'])} | {aim} | {verdict(figure)} |")
    return "\n".join(lines)


def shown(value: float) -> str:
    """A number with what matters of it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(figure: dict[str, Any]) -> str:
    if "aim" not in figure:
        return ""
    ahead = figure["value"] - figure["aim"]
    return "met" if (ahead >= 0 if figure["better"] == "higher" else ahead <= 0) else "**missed**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "compare", "write"))
    parser.add_argument("--only", action="append", default=[], metavar="CLAIM")
    args = parser.parse_args()
    if args.what == "run":
        return run(args.only)
    if args.what == "compare":
        return compare()
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
