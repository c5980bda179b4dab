"""Verdict on each test of a file: its session's journal, and how the session ended, as one result."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped", "xfailed", "xpassed", "interrupted", "not run"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "skipped", "xfailed", "xpassed", "interrupted", "not run")
_NO_TESTS = 5
"""pytest's exit code of a session without tests."""


@dataclass(frozen=True)
class Case:
    """One test. `name`: as pytest has it behind the file. `seconds`: of all its phases. `phase`: the one that failed. `text`: the
    failure in full. `output`: what it wrote, by pytest's name for where."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    phase: str = ""
    text: str = ""
    output: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FileResult:
    """One file. `problem`: the fault of the file as a whole, or None. `at`: where that was, as text of all
    threads. `seconds`: from its start to the end of its last process; None if it was not started. `collected`: whether the cases
    are pytest's, else they are names read from the file. `part`: whether only some of its tests were asked for."""

    file: str
    cases: tuple[Case, ...]
    gpus: int = 0
    cards: tuple[int, ...] = ()
    seconds: float | None = None
    problem: str | None = None
    at: str = ""
    log: str | None = None
    collected: bool = False
    part: bool = False

    @property
    def failed(self) -> bool:
        """True if it is to blame: a test failed, or the file as a whole."""
        return self.problem is not None or any(case.outcome == "failed" for case in self.cases)

    @property
    def counts(self) -> Counter[str]:
        """Number of tests per outcome."""
        return Counter(case.outcome for case in self.cases)


@dataclass(frozen=True)
class Ending:
    """End of a session. `code`: its exit code as a shell has it, None if it is not known. `why`: what the scheduler did."""

    code: int | None
    why: Literal["by itself", "timeout", "collect timeout", "interrupted", "stuck"] = "by itself"
    limit: float = 0.0


class JournalReader:
    """Reader of a session's journal."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest, self._offset = path, b"", 0
        self.pid: int | None = None
        self.collected = False
        self.running: dict[str, None] = {}
        """Tests that have begun and not ended: one, but for pytest-xdist."""
        self.refused: str | None = None
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self.cases: dict[str, Case | None] = {}

    def read(self) -> None:
        """Read new lines; an incomplete line is left for later."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "began":
                self.pid = event["pid"]
            case "collect_failed":
                self.failures.append(event["text"])
            case "collect_skipped":
                self.skipped.append(event["reason"])
            case "refused":
                self.refused = event["reason"]
            case "collected":
                self.collected = True
                self.cases |= {_name(test): self.cases.get(_name(test)) for test in event["tests"]}
            case "start":
                self.running[_name(event["test"])] = None
                self.cases.setdefault(_name(event["test"]), None)
            case "report":
                self._report(_name(event["test"]), event)

    def _report(self, name: str, event: dict[str, Any]) -> None:
        case = self.cases.get(name) or Case(name, "passed")
        if event["when"] == "setup":
            case = Case(name, "passed")  # also of a test that is run again
        case = replace(case, seconds=case.seconds + event["seconds"])
        outcome, xfail = event["outcome"], "xfail" in event
        if outcome == "failed" and case.outcome != "failed":
            case = replace(case, outcome="failed", phase=event["when"], reason=event["reason"], text=event["text"])
            case = replace(case, output=tuple((head, text) for head, text in event["output"]))
        elif outcome == "skipped":
            case = replace(case, outcome="xfailed" if xfail else "skipped", reason=event["xfail"] if xfail else event["reason"])
        elif outcome == "passed" and xfail and event["when"] == "call":
            case = replace(case, outcome="xpassed", reason=event["xfail"])
        if event["when"] == "teardown":
            case = replace(case, properties=tuple((key, value) for key, value in event.get("properties", [])))
            self.running.pop(name, None)
        self.cases[name] = case


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid


@dataclass(frozen=True)
class Stacks:
    """Stacks of a session that was stopped, or that crashed: in one line, and all its threads; both "" if not known."""

    where: str = ""
    text: str = ""


def conclude(
    said: JournalReader, ending: Ending, listed: Sequence[str], stacks: Stacks, log_tail: str
) -> tuple[list[Case], str | None]:
    """Every test of a file with its outcome, and the fault of the file as a whole (None: nothing).

    `listed`: the names of tests that were read from the file, for one that was never collected. `log_tail`: the last lines that
    the session wrote.
    """
    how = _how(ending)
    if not said.collected or (not said.cases and (said.failures or said.skipped or ending.why != "by itself")):
        problem, reason = _collection_problem(said, ending, how, stacks, log_tail)
        outcome: Outcome = "not run" if problem or ending.why == "interrupted" else "skipped"
        return [Case(name, outcome, reason=reason) for name in listed], problem
    cases, stopped_in = [], None
    for name, case in said.cases.items():
        if name in said.running:
            stopped_in = name
            cases.append(_stopped_case(case or Case(name, "passed"), ending, how, stacks))
        elif case is not None:
            cases.append(case)
        else:
            where = f" in {stopped_in}" if stopped_in is not None else ""
            cases.append(Case(name, "not run", reason=f"its file {how}{where}"))
    return cases, _problem(said, ending, how, stopped_in is not None, cases, stacks, log_tail)


def _how(ending: Ending) -> str:
    """Describe the session's end, for the file's report."""
    if ending.why == "interrupted":
        return "was interrupted"
    if ending.why == "timeout":
        return f"did not end within {ending.limit:g} s"
    if ending.why == "collect timeout":
        return f"was not collected within {ending.limit:g} s"
    if ending.why == "stuck" or ending.code is None:
        return "could not be ended"
    if ending.code > 128:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(ending.code - 128).name}"
    return f"ended with exit code {ending.code}"


def _stopped_case(case: Case, ending: Ending, how: str, stacks: Stacks) -> Case:
    """The test that ran when its session was stopped."""
    if ending.why == "interrupted":
        return replace(case, outcome="interrupted", reason="Ctrl-C")
    reason = f"the file {how} in this test{_at(stacks)}"
    return replace(case, outcome="failed", phase="call", reason=reason, text=stacks.text)


def _collection_problem(said: JournalReader, ending: Ending, how: str, stacks: Stacks, log_tail: str) -> tuple[str | None, str]:
    """The problem of a file whose tests are not known, and why they were not run."""
    if ending.why == "interrupted":
        return None, "interrupted (Ctrl-C) while its file was collected"
    if said.refused is not None:
        return said.refused, "its file was refused"
    if said.failures:
        return f"cannot be collected: {_last_line(said.failures[0])}", "its file cannot be collected"
    if said.skipped and ending.code in (0, _NO_TESTS):
        return None, said.skipped[0]
    if ending.why == "collect timeout":
        return f"{how}{_at(stacks)}{_end_of(log_tail, stacks)}", f"its file {how}"
    return f"{how} before its tests were collected{_at(stacks)}{_end_of(log_tail, stacks)}", f"its file {how}"


def _problem(
    said: JournalReader, ending: Ending, how: str, in_test: bool, cases: Sequence[Case], stacks: Stacks, log_tail: str
) -> str | None:
    """Problem with a file apart from its tests."""
    if ending.why == "stuck":
        return how
    if ending.why == "interrupted" or in_test:
        return None  # the test says it
    if said.failures:
        return f"a part cannot be collected: {_last_line(said.failures[0])}"
    if ending.why == "timeout" or ending.code not in (0, 1, _NO_TESTS):
        return f"{how} outside of its tests{_at(stacks)}{_end_of(log_tail, stacks)}"
    if ending.code == 1 and not any(case.outcome == "failed" for case in cases):
        return f"{how} although no test failed{_end_of(log_tail, stacks)}"
    return None


def _at(stacks: Stacks) -> str:
    return f", at {stacks.where}" if stacks.where else ""


def _end_of(log_tail: str, stacks: Stacks) -> str:
    return f": {log_tail}" if log_tail and not stacks.where else ""


def _last_line(text: str) -> str:
    """The error at the end of a traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("E").strip() if lines else ""
