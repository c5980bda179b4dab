"""The pytest plugin: the mark `gpus`, and the journal of a session that `agentrl test` started.

A scheduled session appends one JSON object per line to its journal (`--agentrl-journal`): it began (with its process id), what
was collected, each test's start and reports. So all that is known of a session survives its death.
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
    """The option that a scheduler passes."""
    group = parser.getgroup("agentrl test", "what `agentrl test` passes to the sessions that it starts")
    group.addoption("--agentrl-journal", metavar="FILE", help="where to write what happens")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py is loaded, since one may hang."""
    known = early_config.known_args_namespace
    # A worker of pytest-xdist has its session's options, and its reports arrive in that session.
    if known.agentrl_journal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        early_config.pluginmanager.register(JournalWriter(Path(known.agentrl_journal)), "agentrl-journal")


def declared(item: pytest.Item) -> tuple[int, float | None]:
    """The cards and the time limit of a test's marks. Raises ValueError for a mark with other arguments."""
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

    def __init__(self, journal: Path) -> None:
        self._pid = os.getpid()
        self._file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # The scheduler ends a session that hangs by SIGABRT, at which pytest writes its stacks; no core is needed.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._write("began", pid=self._pid)

    def _write(self, event: str, **fields: Any) -> None:
        if os.getpid() == self._pid:  # not in a process that a test forked
            os.write(self._file, json.dumps({"event": event, **fields}).encode() + b"\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        """A file that cannot be collected, or that skips itself."""
        report = yield
        if report.outcome != "passed":
            reason = _skip_reason(report)
            if report.failed:  # the error at the end of the traceback
                lines = [line for line in report.longreprtext.splitlines() if line.strip()]
                reason = lines[-1].removeprefix("E").strip() if lines else ""
            self._write("collection", file=str(collector.path), outcome=report.outcome, reason=reason)
        return report

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The tests that will run, with the cards that each needs."""
        tests = []
        for item in session.items:
            try:
                gpus, timeout = declared(item)
            except ValueError as problem:
                self._write("collection", file=str(item.path), outcome="failed", reason=f"{item.name}: {problem}")
            else:
                tests.append({"file": str(item.path), "name": _name(item.nodeid), "gpus": gpus, "timeout": timeout})
        self._write("collected", tests=tests)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._write("start", test=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of its phases has ended: setup, call, teardown."""
        fields: dict[str, Any] = {"when": report.when, "outcome": report.outcome, "seconds": report.duration, "reason": ""}
        if hasattr(report, "wasxfail"):
            fields["xfail"] = str(report.wasxfail)
        if report.skipped:
            fields["reason"] = _skip_reason(report)
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            fields["reason"] = str(crash.message).splitlines()[0] if crash is not None and crash.message else ""
        self._write("report", test=_name(report.nodeid), **fields)


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2] or nodeid


def _skip_reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext
