"""Report a run as lines, JSON and JUnit XML."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from agentrl.contrib.gpu_tests.scheduler import Running, Scheduler, time_left, totals, waits
from agentrl.contrib.gpu_tests.verdict import OUTCOMES, Case, FileResult

# The results of a run as one JUnit XML file, for CI.
#
# The format knows neither "interrupted" nor "not run". Both are written as `<error>` with that as its `type`: written as skipped,
# a run that was cut short would look as if all was well.

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(results: Sequence[FileResult], began: datetime) -> str:
    """The XML: a `testsuite` per file, with its cards and exit as properties; a file's own problem is a case called "[file]"."""
    root = ET.Element("testsuites", name="agentrl test")
    suites = [_suite(result, began) for result in results]
    root.extend(suites)
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", f"{sum(result.seconds or 0.0 for result in results):.3f}")
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return text.decode() + "\n"


def _suite(result: FileResult, began: datetime) -> ET.Element:
    suite = ET.Element("testsuite", name=_xml(result.file), timestamp=began.isoformat(), hostname=socket.gethostname())
    properties = ET.SubElement(suite, "properties")
    for name, value in (("gpus", str(result.gpus)), ("cards", ",".join(map(str, result.cards))), ("log", result.log or "")):
        ET.SubElement(properties, "property", name=name, value=_xml(value))
    for case in result.cases:
        suite.append(_case(result.file, case))
    if result.problem is not None:
        own = ET.SubElement(
            suite, "testcase", classname=_class(result.file, ""), name="[file]", file=_xml(result.file), time="0.000"
        )
        ET.SubElement(own, "error", type="file", message=_xml(result.problem)).text = _xml(result.at)
    suite.set("tests", str(len(suite.findall("testcase"))))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("time", f"{result.seconds or 0.0:.3f}")
    return suite


def _case(file: str, case: Case) -> ET.Element:
    above, _, name = case.name.rpartition("::") if "[" not in case.name else _split_node(case.name)
    found = ET.Element("testcase", classname=_class(file, above), name=_xml(name), file=_xml(file), time=f"{case.seconds:.3f}")
    if case.properties:
        properties = ET.SubElement(found, "properties")
        for key, value in case.properties:
            ET.SubElement(properties, "property", name=_xml(key), value=_xml(value))
    if case.outcome == "failed":
        tag = "failure" if case.phase == "call" else "error"  # as pytest: what failed outside of the test itself is an error
        ET.SubElement(found, tag, type=case.phase, message=_xml(case.reason)).text = _xml(case.text)
    elif case.outcome in ("interrupted", "not run"):
        ET.SubElement(found, "error", type=case.outcome, message=_xml(f"{case.outcome}: {case.reason}"))
    elif case.outcome in ("skipped", "xfailed"):
        ET.SubElement(found, "skipped", type=f"pytest.{case.outcome}", message=_xml(case.reason))
    for head, text in case.output:
        tag = "system-err" if "stderr" in head else "system-out"
        ET.SubElement(found, tag).text = _xml(f"--- {head} ---\n{text}")
    return found


def _split_node(name: str) -> tuple[str, str, str]:
    """Split before the last "::" that is not a parameter's."""
    head, bracket, parameters = name.partition("[")
    above, colons, own = head.rpartition("::")
    return above, colons, own + bracket + parameters


def _class(file: str, above: str) -> str:
    """`tests.gpu.test_engine.TestX`"""
    return _xml(".".join([*Path(file).with_suffix("").parts, *(part for part in above.split("::") if part)]))


def _xml(text: str) -> str:
    """Without characters that no XML may have, which terminals' colours are full of."""
    return _NOT_XML.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


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
        self._line(now, f"{verdict(result):<7} {result.file}: {count_text(result.counts)}{took}")
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
    """Estimate of the remaining time, if earlier runs timed any file."""
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
    beside = f", and {unknown} of unknown length" if unknown else ""
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
    lines = ["", "== did not pass =="] if any(_worth(result) for result in results) else [""]
    for result in sorted(results, key=lambda one: one.file):
        if not _worth(result):
            continue
        lines.append(
            f"{result.file}{_on(result.cards)}: {count_text(result.counts)}" + (f"  ({result.log})" if result.log else "")
        )
        lines += [f"    {result.problem}"] if result.problem is not None else []
        lines += _cases([case for case in result.cases if case.outcome in _LISTED], result.problem)
    lines += [f"card {card} is out of service: {why}" for card, why in out.items()]
    files = f"{len(results)} file{'s' if len(results) != 1 else ''}"
    lines.append(f"== {files} in {clock(seconds)}: {count_text(totals(results))} ==")
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


def count_text(counts: Mapping[str, int]) -> str:
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
