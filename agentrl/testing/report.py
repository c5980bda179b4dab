"""What a run says: lines while it goes on, the report at its end, the same as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.testing.packing import time_left
from agentrl.testing.scheduler import Running, Scheduler, totals, waits
from agentrl.testing.verdict import OUTCOMES, Case, FileResult

HEARTBEAT_S = 30.0
"""Seconds between two lines that say what runs."""
_LISTED = ("failed", "interrupted", "not run")


class Lines:
    """Writes a line per start and end, and a heartbeat. `write` gets each line; `began`: the start, on the run's clock."""

    def __init__(self, write: Callable[[str], None], began: float, every: float = HEARTBEAT_S) -> None:
        self._write, self._began, self._every = write, began, every
        self._last = began
        self._now = began

    def _line(self, now: float, text: str) -> None:
        self._write(f"[{clock(now - self._began)}] {text}")

    def say(self, line: str) -> None:
        """A message of the scheduler or of the cards."""
        self._line(self._now, line)

    def started(self, session: Running, now: float) -> None:
        """A file begins."""
        self._line(now, f"start   {session.job.file}{_on(session.cards)}")

    def ended(self, result: FileResult, now: float) -> None:
        """A file has its result."""
        took = f", {clock(result.seconds)}" if result.seconds is not None else ""
        self._line(now, f"{verdict(result):<7} {result.file}: {counted(result.counts)}{took}")
        if result.problem is not None:
            self._line(now, f"        {result.problem}")

    def beat(self, scheduler: Scheduler, now: float) -> None:
        """Every `every` seconds: what runs, since when and on which cards, what waits, how long it will take."""
        self._now = now
        if now - self._last >= self._every:
            self._last = now
            self._line(now, heartbeat(scheduler, now))


def heartbeat(scheduler: Scheduler, now: float) -> str:
    """One line on the state of a run."""
    running = [
        f"{name}{_on(session.cards)} for {clock(now - session.began)}{_current(session)}"
        for name, session in scheduler.running.items()
    ]
    waiting = list(scheduler.waiting.values())
    parts = [f"running: {', '.join(running) or 'nothing'}"]
    if waiting:
        cards = sum(job.gpus > 0 for job in waiting)
        kinds = [f"{count} for {what}" for count, what in ((cards, "cards"), (len(waiting) - cards, "a slot")) if count]
        parts.append(f"waiting: {len(waiting)} ({', '.join(kinds)})")
    if foreign := scheduler.pool.foreign():
        parts.append("not free: " + ", ".join(f"card {card}: {told}" for card, told in foreign.items()))
    return "; ".join([*parts, *_eta(scheduler, now)])


def _eta(scheduler: Scheduler, now: float) -> list[str]:
    """How long the rest will take, if earlier runs say it of any file."""
    jobs = [*(session.job for session in scheduler.running.values()), *scheduler.waiting.values()]
    unknown = sum(job.known is None for job in jobs)
    if unknown == len(jobs):
        return []
    ends = {
        name: (len(session.cards), session.began + (session.job.known or 0.0) - now)
        for name, session in scheduler.running.items()
    }
    slots = scheduler.limits.slots - sum(not cards for cards, _ in ends.values())
    left = time_left([waits(job) for job in scheduler.waiting.values()], ends, scheduler.pool.free(), slots)
    beside = f", beside {unknown} of unknown length" if unknown else ""
    return [f"about {clock(left)} left{beside}"]


def _current(session: Running) -> str:
    said = getattr(session, "said", None)  # what stands in for a session in tests says nothing
    running = list(said.running) if said is not None else []
    return f" ({running[-1]})" if running else ""


def verdict(result: FileResult) -> str:
    """One word on a file."""
    if result.seconds is None:
        return "not run"
    if result.failed:
        return "FAILED"
    if result.counts["interrupted"] or result.counts["not run"]:
        return "stopped"
    return "passed" if result.counts["passed"] or result.counts["xpassed"] else "skipped" if result.cases else "empty"


def report(results: Sequence[FileResult], out: Mapping[int, str], seconds: float) -> str:
    """The end of a run: every test that did not pass, with why; every problem of a file and card; the totals."""
    lines = ["", "== what did not pass =="] if any(_worth(result) for result in results) else [""]
    for result in sorted(results, key=lambda one: one.file):
        if not _worth(result):
            continue
        lines.append(f"{result.file}{_on(result.cards)}: {counted(result.counts)}" + (f"  ({result.log})" if result.log else ""))
        lines += [f"    {result.problem}"] if result.problem is not None else []
        lines += _cases([case for case in result.cases if case.outcome in _LISTED], result.problem)
    lines += [f"card {card} is out of service: {why}" for card, why in out.items()]
    files = f"{len(results)} file{'s' if len(results) != 1 else ''}"
    lines.append(f"== {files} in {clock(seconds)}: {counted(totals(results))} ==")
    return "\n".join(lines)


def _cases(cases: Sequence[Case], problem: str | None) -> list[str]:
    """A line per test, without repeating a reason that the line above has."""
    lines: list[str] = []
    last = ("not run", (problem or "").removeprefix("not run: "))
    for case in cases:
        where = f" in {case.phase}" if case.phase in ("setup", "teardown") else ""
        reason = "" if (case.outcome, case.reason) == last else f": {case.reason}"
        lines.append(f"    {case.outcome}{where}  {case.name}{reason}")
        last = (case.outcome, case.reason)
    return lines


def as_json(results: Sequence[FileResult], out: Mapping[int, str], seconds: float, code: int) -> dict[str, Any]:
    """The same for a program."""
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
    cards = {str(card): why for card, why in out.items()}
    return {"exit_code": code, "seconds": seconds, "counts": totals(results), "out_of_service": cards, "files": files}


def counted(counts: Mapping[str, int]) -> str:
    """ "3 passed, 1 failed" """
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts.get(outcome)) or "no tests"


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours from 60 minutes on."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def _worth(result: FileResult) -> bool:
    return result.problem is not None or any(result.counts[outcome] for outcome in _LISTED)


def _on(cards: Sequence[int]) -> str:
    return f" on card{'s' if len(cards) > 1 else ''} {','.join(map(str, cards))}" if cards else ""
