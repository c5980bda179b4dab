"""Pytest plugin: the mark `gpus`, and the journal of a session that `agentrl test` started.

A scheduled session appends one JSON object per line to its journal (`--agentrl-journal`): its process id, the collected tests,
each test's start, and its result after each phase. So the results survive a crash of the session.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MARK = (
    "gpus(count, timeout=None): the GPUs that this file needs, and the seconds that it may take in all; `agentrl test` reads it"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that the scheduler passes."""
    group = parser.getgroup("agentrl test", "what `agentrl test` passes to the sessions that it starts")
    group.addoption("--agentrl-journal", metavar="FILE", help="where to write what happens")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Open the journal before any conftest.py is loaded, since one may hang."""
    known = early_config.known_args_namespace
    # A pytest-xdist worker has the options of its session, which also receives its reports.
    if known.agentrl_journal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        writer = JournalWriter(Path(known.agentrl_journal), early_config)
        early_config.pluginmanager.register(writer, "agentrl-journal")


def declared(item: pytest.Item) -> tuple[int, float | None]:
    """Return the cards and the time limit of a test's marks. Raises ValueError for invalid arguments of a mark."""
    gpus, limit = 0, None
    for mark in item.iter_markers("gpus"):
        if len(mark.args) > 1 or mark.kwargs.keys() - {"count", "timeout"}:
            raise ValueError(f"gpus{mark.args}, {mark.kwargs}: expected gpus(COUNT, timeout=SECONDS)")
        count, timeout = mark.args[0] if mark.args else mark.kwargs.get("count"), mark.kwargs.get("timeout")
        if type(count) is not int or count < 0:
            raise ValueError(f"gpus needs a whole number of cards, 0 or more, not {count!r}")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
            raise ValueError(f"gpus: timeout needs seconds, more than 0, not {timeout!r}")
        gpus, limit = max(gpus, count), limit if timeout is None else max(limit or 0.0, timeout)
    return gpus, limit


class JournalWriter:
    """Writes the journal of this process's session."""

    def __init__(self, journal: Path, config: pytest.Config) -> None:
        self._pid, self._config = os.getpid(), config
        self._cases: dict[str, dict[str, Any]] = {}
        self._file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # The scheduler ends a hanging session by SIGABRT, at which pytest writes its stacks; no core dump is needed.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._write(pid=self._pid)

    def _write(self, **event: Any) -> None:
        if os.getpid() == self._pid:  # not in a process that a test forked
            os.write(self._file, json.dumps(event).encode() + b"\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """Record a file that cannot be collected or skips itself."""
        report = yield
        if report.outcome != "passed":
            reason = _skip_reason(report)
            if report.failed:  # the error is at the end of the traceback
                lines = [line for line in report.longreprtext.splitlines() if line.strip()]
                reason = lines[-1].removeprefix("E").strip() if lines else ""
            self._write(file=str(collector.path), outcome=report.outcome, reason=reason)
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record the tests to run, with the cards of each."""
        tests = []
        for item in session.items:
            try:
                gpus, timeout = declared(item)
            except ValueError as problem:
                self._write(file=str(item.path), outcome="failed", reason=f"{item.name}: {problem}")
            else:
                tests.append({"file": str(item.path), "name": _name(item.nodeid), "gpus": gpus, "timeout": timeout})
        self._write(collected=tests)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the start of a test."""
        self._write(start=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of a phase (setup, call, teardown). The setup of a rerun test starts a new result."""
        name = _name(report.nodeid)
        if report.when == "setup" or name not in self._cases:
            self._cases[name] = {"name": name, "outcome": "passed", "seconds": 0.0, "reason": "", "phase": ""}
        case = self._cases[name]
        case["seconds"] += report.duration
        status = self._config.hook.pytest_report_teststatus(report=report, config=self._config)[0]
        if report.failed and case["outcome"] != "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message).splitlines()[0] if crash is not None and crash.message else ""
            case |= {"outcome": "failed", "phase": report.when, "reason": reason}
        elif status in ("skipped", "xfailed", "xpassed"):
            case |= {"outcome": status, "reason": str(getattr(report, "wasxfail", "")) or _skip_reason(report)}
        self._write(case=case, over=report.when == "teardown")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid


def _skip_reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext
