"""A run of `agentrl test` from its options to its report and exit code."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.contrib.gpu_tests.scheduler import CardPool, Scheduler, choose_cards, on_cards, read_cards
from agentrl.contrib.gpu_tests.session import NOT_PASSED, OUTCOMES, VISIBLE, FileResult, FileSession, collect
from agentrl.run.display import clock
from agentrl.utils.errors import ResourceError, UserError, did_you_mean
from agentrl.utils.files import atomic_write
from agentrl.utils.processor import usable_cpus
from agentrl.utils.terminal import say


async def run_tests(options: argparse.Namespace) -> int:
    """Run test files on cards and slots, and return the exit code. Raises UserError for invalid options."""
    began, out = time.monotonic(), options.out
    stream = sys.stderr if options.json else sys.stdout

    def line(text: str) -> None:
        say(f"[{clock(time.monotonic() - began)}] {text}", file=stream, flush=True)

    def ended(result: FileResult) -> None:
        took = f", {clock(result.seconds)}" if result.seconds is not None else ""
        problem = f": {result.problem}" if result.problem is not None else ""
        line(f"{verdict(result):<7} {result.file}: {count_text(result.counts)}{took}{problem}")

    words = options.tests or ["tests"]
    for word in words:
        path = Path(word.partition("::")[0])
        if not path.exists():
            near = [str(other) for other in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(
                f"{path}: there is no such file or folder; {did_you_mean(str(path), near, 'name test files or folders')}"
            )
    with locked(out):
        jobs, results = await collect(words, options.passed_on, out, options.timeout)
        if not jobs and not results:
            raise UserError(f"no test in {', '.join(words)}")
        for result in results:
            ended(result)
        visible = os.environ.get(VISIBLE)
        try:
            there = read_cards() if any(job.gpus for job in jobs) or options.cards is not None else []
            chosen = choose_cards(there, options.cards, visible)
            missing = f"{VISIBLE}={visible} hides all" if there and not chosen else ""
        except ResourceError as error:
            if options.cards is not None:
                raise
            chosen, missing = [], str(error)
        pool = CardPool(chosen, options.in_use_mib, missing)
        scheduler = Scheduler(
            jobs, pool, lambda job, cards: FileSession(job, cards, out, options.passed_on),
            slots=options.slots or max(usable_cpus() // 2, 1), wait=options.wait, say=line, ended=ended,
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # Ctrl-C, and the end of a terminal or CI job
            asyncio.get_running_loop().add_signal_handler(number, scheduler.stop)
        results += await scheduler.run()
        code = exit_code(results, scheduler.interrupted)
        summary = as_json(results, time.monotonic() - began, code)
        atomic_write(out / "results.json", json.dumps(summary, indent=1))
        say(json.dumps(summary) if options.json else report(results, summary["seconds"]), flush=True)
    return code


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of logs and records. Raises UserError if another run uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another `agentrl test` uses {folder}: wait for it, or give this one its own with --out") from None
        yield


def exit_code(results: Sequence[FileResult], interrupted: bool) -> int:
    """Return 0 if every requested test ran and none failed, 130 if interrupted, else 1 (also without any test)."""
    if interrupted:
        return 130
    whole = all(not result.failed and not result.counts["not run"] for result in results)
    return 0 if whole and any(result.cases for result in results) else 1


# The report


def verdict(result: FileResult) -> str:
    """Return a file's result in one word."""
    if result.failed and result.seconds is not None:
        return "FAILED"
    if result.counts["interrupted"] or (result.counts["not run"] and result.seconds is not None):
        return "stopped"
    if result.problem is not None or result.counts["not run"]:
        return "not run"
    return "passed" if result.counts["passed"] or result.counts["xpassed"] else "skipped" if result.cases else "empty"


def report(results: Sequence[FileResult], seconds: float) -> str:
    """Return the final report: each test that did not pass, with the reason; problems of files; totals."""
    worth = [one for one in results if one.problem is not None or any(case.outcome in NOT_PASSED for case in one.cases)]
    lines = ["", "== did not pass =="] if worth else [""]
    for result in sorted(worth, key=lambda one: one.file):
        log = f"  ({result.log})" if result.log else ""
        lines.append(f"{result.file}{on_cards(result.cards)}: {count_text(result.counts)}{log}")
        lines += [f"    {result.problem}"] if result.problem is not None else []
        for case in result.cases:
            if case.outcome in NOT_PASSED:
                where = f" in {case.phase}" if case.phase in ("setup", "teardown") else ""
                known = case.reason and case.reason in (result.problem or "")  # already in the line above
                lines.append(f"    {case.outcome}{where}  {case.name}{'' if known else f': {case.reason}'}")
    files = f"{len(results)} file{'s' if len(results) != 1 else ''}"
    lines.append(f"== {files} in {clock(seconds)}: {count_text(_totals(results))} ==")
    return "\n".join(lines)


def as_json(results: Sequence[FileResult], seconds: float, code: int) -> dict[str, Any]:
    """Return the report as JSON data."""
    files = [
        {
            "file": result.file, "verdict": verdict(result).lower(), "gpus": result.gpus, "cards": list(result.cards),
            "seconds": result.seconds, "problem": result.problem, "log": result.log,
            "tests": [
                {"name": case.name, "outcome": case.outcome, "seconds": case.seconds, "reason": case.reason}
                for case in result.cases
            ],
        }
        for result in sorted(results, key=lambda one: one.file)
    ]  # fmt: skip
    return {"exit_code": code, "seconds": seconds, "counts": _totals(results), "files": files}


def count_text(counts: dict[str, int]) -> str:
    """Format the counts of outcomes, for example "3 passed, 1 failed"."""
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome)) or "no tests"


def _totals(results: Sequence[FileResult]) -> dict[str, int]:
    return dict(sum((result.counts for result in results), Counter[str]()))
