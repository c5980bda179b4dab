"""Benchmark book: measure every claim of claims.toml by its command, compare it with a commit, and write it to docs.

    python benchmarks/book.py run [--only publish]          benchmarks/results/NAME.json of each claim
    python benchmarks/book.py compare [--against COMMIT]    lists figures that are worse than in that commit; exit code 1 if any

`make bench` runs it. Each file is written as soon as its claim is measured, so Ctrl-C keeps the finished ones. A claim that
fails or exceeds its time limit keeps its previous file; the others continue, the failed one is named at the end, and the exit
code is 1. A claim whose peer is not installed is skipped with a message that has the install command.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
RESULTS = HERE / "results"
INTEGRATIONS = ROOT / ".integrations"
WORSE = 0.1
GRACE_S = 15.0
"""Seconds for a terminated command to end its processes (Ray), before its process group is killed."""
BUSY = 0.2
"""Share of the cores in use by other programs above which a claim starts with a warning."""
Claim = dict[str, Any]


def claims() -> list[Claim]:
    found: list[Claim] = tomllib.loads((HERE / "claims.toml").read_text())["claim"]
    return found


# -- measuring --------------------------------------------------------------------------------------


class Skipped(Exception):
    """A claim cannot be measured here; the text has the reason and the fix."""


def measured(claim: Claim) -> dict[str, Any]:
    """Run a claim's command and return its result. Raises RuntimeError if it fails or times out, Skipped without its peer."""
    if missing := [name for name in claim.get("needs", []) if version(name) is None]:
        raise Skipped(f"needs {', '.join(missing)}: {claim['install']}")
    about, start = machine(), time.perf_counter()
    if about["busy"] > BUSY:
        print(f"  note: other programs use {about['busy']:.0%} of the cores", flush=True)
    raw = output([sys.executable, *claim["command"].split()], claim["seconds"])
    return {
        "claim": claim["name"],
        "command": f"python {claim['command']}",
        "date": date.today().isoformat(),
        "commit": commit(),
        "seconds": round(time.perf_counter() - start, 1),
        "machine": about,
        "peer": re.sub(r"\{([\w-]+)\}", lambda found: version(found[1]) or "not installed", claim["peer"]),
        "figures": dict(figures(claim, raw)),
    }


def output(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the JSON object in a command's last line, and print earlier lines as they arrive. Raises RuntimeError with the end
    of its stderr if it fails, or takes longer than `seconds`; then all of its processes are ended."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        # A separate session, so that all of its processes can be ended, and Ctrl-C reaches it only through this process.
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            last: list[str] = []
            assert process.stdout is not None
            reader = threading.Thread(target=_show, args=(process.stdout, last), daemon=True)
            reader.start()
            code = process.wait(seconds)
        except subprocess.TimeoutExpired as problem:
            raise RuntimeError(f"not done within {seconds} s") from problem
        finally:
            _end(process)
        reader.join(GRACE_S)
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if code:
        raise RuntimeError(f"exit code {code}: {said[-1] if said else 'it wrote no error'}")
    try:
        raw: dict[str, Any] = json.loads(last[0] if last else "")
    except json.JSONDecodeError as problem:
        raise RuntimeError("its last line is no JSON object") from problem
    return raw


def _show(lines: IO[str], last: list[str]) -> None:
    """Print each line once another one follows; store the last one in `last`."""
    for line in lines:
        if last:
            print(f"  | {last[0][:150]}", flush=True)
        last[:] = [line.rstrip()]


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and the rest of its process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def version(package: str) -> str | None:
    """Return a package's version here or in `.integrations/PACKAGE` (see .ci/integrations.py); None if not installed."""
    places = [[str(folder)] for folder in INTEGRATIONS.glob(f"{package}/lib/python*/site-packages")]
    found = [each.version for place in [sys.path, *places] for each in importlib.metadata.distributions(name=package, path=place)]
    return found[0] if found else None


def figures(claim: Claim, raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label, and value, better direction and aim, from a command's JSON object. Raises RuntimeError for a missing path, or
    one without a number."""
    for figure in claim["figures"]:
        try:
            value = _value_at(raw, figure["at"])
        except KeyError as problem:
            raise RuntimeError(f"its output has no {figure['at']!r}") from problem
        rest = {key: figure[key] for key in ("better", "aim", "tolerance") if key in figure}
        several = value.items() if figure["label"] == "*" else [(figure["label"], value)]
        for label, number in several:
            if number is None:
                raise RuntimeError(f"its output has no number for {label!r}")
            yield label, {"value": round(float(number), 4), **rest}


def _value_at(raw: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path. A key may contain dots: the longest matching key is taken."""
    keys = path.split(".")
    for stop in range(len(keys), 0, -1):
        head = ".".join(keys[:stop])
        if head in raw:
            return raw[head] if stop == len(keys) else _value_at(raw[head], ".".join(keys[stop:]))
    raise KeyError(path)


def machine() -> dict[str, Any]:
    """Describe the machine: processors, memory, versions, and its load before the command starts: the load average, which
    earlier claims also raise, and the share of the cores in use now, while this process only waits."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    before = _ticks()
    time.sleep(0.5)
    used, total = (now - then for now, then in zip(_ticks(), before, strict=True))
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "busy": round(used / max(total, 1), 2),
        "python": platform.python_version(),
    }


def _ticks() -> tuple[int, int]:
    """Return the clock ticks of all cores since boot: in use, and in total."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    times = [int(number) for number in line.split()[1:9]]
    return sum(times) - times[3] - times[4], sum(times)  # except idle and waiting for a disk


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def run(only: Sequence[str]) -> int:
    """Measure the claims and write the files. Returns 1 if a claim could not be measured, 130 after Ctrl-C."""
    todo = [claim for claim in claims() if not only or claim["name"] in only]
    if unknown := set(only) - {claim["name"] for claim in todo}:
        print(f"no claim {', '.join(sorted(unknown))}; there are {', '.join(claim['name'] for claim in claims())}")
        return 2
    RESULTS.mkdir(exist_ok=True)
    notes: dict[str, str] = {}
    try:
        _measure_claims(todo, notes)
        code = 1 if any(note.startswith("not measured") for note in notes.values()) else 0
    except KeyboardInterrupt:
        print("\nstopped: the results of measured claims are written")
        code = 130
    print("\n".join(f"{name}: {note}" for name, note in notes.items()))
    return code


def _measure_claims(todo: Sequence[Claim], notes: dict[str, str]) -> None:
    """Measure one claim after the other; `notes` gets the reasons of unmeasured ones."""
    start, before = time.perf_counter(), results()
    left = [before[c["name"]]["seconds"] if c["name"] in before else c["seconds"] for c in todo]  # as long as last time
    for at, claim in enumerate(todo):
        gone, rest = time.perf_counter() - start, sum(left[at:])
        print(f"[{at + 1}/{len(todo)}] {claim['name']}: python {claim['command']}")
        print(f"  {_clock(gone)} elapsed, about {_clock(rest)} left; limit of this claim {_clock(claim['seconds'])}", flush=True)
        try:
            found = measured(claim)
        except (RuntimeError, Skipped) as problem:
            notes[claim["name"]] = f"{'skipped' if isinstance(problem, Skipped) else 'not measured'}: {problem}"
            print(f"  {notes[claim['name']]}", flush=True)
            continue
        (RESULTS / f"{claim['name']}.json").write_text(json.dumps(found, indent=1) + "\n")
        for label, figure in found["figures"].items():
            print(f"  {label:<70} {shown(figure['value']):>10}  {verdict(figure)}", flush=True)
    print(f"{_clock(time.perf_counter() - start)} in total")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# -- comparing --------------------------------------------------------------------------------------


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """List the figures of a claim that got worse by more than their tolerance, or are missing."""
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


def committed(name: str, at: str) -> dict[str, Any] | None:
    """Read a claim's result in a commit; None if there is none."""
    place = f"{at}:benchmarks/results/{name}.json"
    done = subprocess.run(["git", "show", place], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode else json.loads(done.stdout)


def compare(at: str) -> int:
    """Print the figures that got worse since a commit; return 1 if there are any."""
    lines, compared = [], 0
    for name, now in results().items():
        before = committed(name, at)
        if before is None:
            print(f"{name}: not measured in {at}")
            continue
        compared += 1
        if _machine_name(now) != _machine_name(before):
            print(f"{name}: note: measured on another machine ({_machine_name(before)}; now {_machine_name(now)})")
        lines += worse(now, before)
    print("\n".join(lines) or f"of {compared} claims nothing got worse by {WORSE:.0%}")
    return 1 if lines else 0


def _machine_name(result: dict[str, Any]) -> str:
    return f"{result['machine']['cores']} cores, {result['machine']['processor']}"


# -- writing ----------------------------------------------------------------------------------------


def results() -> dict[str, dict[str, Any]]:
    """Read the results by claim, in the order of claims.toml."""
    found = {}
    for claim in claims():
        if (file := RESULTS / f"{claim['name']}.json").is_file():
            found[claim["name"]] = json.loads(file.read_text())
    return found


def page() -> str:
    """Return the text of the book."""
    text = [
        "# Benchmark book\n",
        "<!-- written by `make bench` from benchmarks/results -->\n",
        "One table per claim, measured by the command above it (`make bench` runs them all, in less than 20 minutes;",
        "`python benchmarks/book.py compare` lists figures that got worse by 10 %). Ratios are of one run. A high load average,",
        "or cores in use before the command began, mean that other programs disturbed it. All figures are on the page of",
        "[benchmarks](../benchmarks/README.md).",
    ]
    found = results()
    for claim in claims():
        text.append(_table(claim["title"], found[claim["name"]]) if claim["name"] in found else _missing(claim))
    return "\n".join(text) + "\n"


def _missing(claim: Claim) -> str:
    needs = f" It needs {', '.join(claim['needs'])}: `{claim['install']}`." if claim.get("needs") else ""
    return f"\n## {claim['title']}\n\n    python {claim['command']}\n\nNot measured yet.{needs}"


def _table(title: str, result: dict[str, Any]) -> str:
    about = result["machine"]
    peer = f", peer: {result['peer']}" if result["peer"] else ""
    where = f"{about['cores']} cores ({about['processor']}), {about['memory_gib']} GiB, Python {about['python']}"
    busy = f"load average {about['load']}, {about['busy']:.0%} of the cores in use before"
    lines = [
        f"\n## {title}\n",
        f"    {result['command']}\n",
        f"{result['date']}, commit {result['commit']}, {where}, {busy}{peer}\n",
        "| figure | value | aim | |",
        "|---|---|---|---|",
    ]
    for label, figure in result["figures"].items():
        sign = "at least" if figure["better"] == "higher" else "at most"
        aim = f"{sign} {shown(figure['aim'])}" if "aim" in figure else ""
        lines.append(f"| {label} | {shown(figure['value'])} | {aim} | {verdict(figure)} |")
    return "\n".join(lines)


def shown(value: float) -> str:
    """Format a number with its significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def verdict(figure: dict[str, Any]) -> str:
    if "aim" not in figure:
        return ""
    ahead = figure["value"] - figure["aim"]
    return "met" if (ahead >= 0 if figure["better"] == "higher" else ahead <= 0) else "**missed**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "compare"))
    parser.add_argument("--only", action="append", default=[], metavar="CLAIM")
    parser.add_argument("--against", default="HEAD", metavar="COMMIT")
    args = parser.parse_args()
    return run(args.only) if args.what == "run" else compare(args.against)


if __name__ == "__main__":
    sys.exit(main())
