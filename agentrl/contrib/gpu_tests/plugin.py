"""The pytest plugin: the mark `gpus`, and what a session that `agentrl test` started tells its scheduler.

A scheduled session appends one JSON object per line to its journal (`--agentrl-journal`): it began (with its process id), what
was collected, each test's start and reports. So all that is known of a session survives its death. On the signal `DUMP` it
writes where each of its threads is into the file next to the journal, also while it is stuck in C code.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DUMP = signal.SIGRTMAX - 3
"""The signal on which a session says where it is."""
MARK = (
    "gpus(count, timeout=None): the GPUs that this file needs, and the seconds that it may take in all; `agentrl test` reads it"
)
MOST_TEXT = 20_000
"""Characters of a failure, or of one captured output, that are passed on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that a scheduler passes."""
    group = parser.getgroup("agentrl test", "what `agentrl test` passes to the sessions that it starts")
    group.addoption("--agentrl-journal", metavar="FILE", help="where to write what happens")
    group.addoption("--agentrl-gpus", type=int, default=0, metavar="N", help="how many cards the scheduler gave")


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py is loaded, since one may hang."""
    known = early_config.known_args_namespace
    # A worker of pytest-xdist has its session's options, and its reports arrive in that session.
    if known.agentrl_journal is not None and "PYTEST_XDIST_WORKER" not in os.environ:
        early_config.pluginmanager.register(Teller(Path(known.agentrl_journal), known.agentrl_gpus), "agentrl-teller")


def dump_file(journal: Path) -> Path:
    """File in which the session of a journal records its stacks."""
    return journal.with_suffix(".stacks")


class Teller:
    """Writes the journal of this process's session."""

    def __init__(self, journal: Path, gpus: int) -> None:
        self._pid, self._gpus = os.getpid(), gpus
        self._file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._stacks = dump_file(journal).open("w", encoding="utf-8")
        faulthandler.register(DUMP, file=self._stacks, all_threads=True)
        self._tell("began", pid=self._pid)

    def _tell(self, event: str, **fields: Any) -> None:
        if os.getpid() == self._pid:  # not in a process that a test forked
            os.write(self._file, json.dumps({"event": event, **fields}).encode() + b"\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected, or that skips itself."""
        if report.failed:
            self._tell("collect_failed", text=_cut(report.longreprtext))
        elif report.skipped:
            self._tell("collect_skipped", reason=_reason(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The tests that will run. Raises UsageError if a mark says other than the scheduler read."""
        for item in session.items:
            mark = item.get_closest_marker("gpus")
            asked = mark.args[0] if mark is not None and mark.args else mark.kwargs.get("count") if mark is not None else None
            if asked is not None and asked != self._gpus:
                told = f"{item.nodeid} has the mark gpus({asked}), which the scheduler could not read and gave {self._gpus}"
                self._tell("refused", reason=f"{told}: write `pytestmark = pytest.mark.gpus({asked})` in the file itself")
                raise pytest.UsageError(told)
        self._tell("collected", tests=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: Sequence[str]) -> None:
        """The same of pytest-xdist, whose workers collect."""
        self._tell("collected", tests=list(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._tell("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One of its phases has ended: setup, call, teardown."""
        fields: dict[str, Any] = {"when": report.when, "outcome": report.outcome, "seconds": report.duration}
        if hasattr(report, "wasxfail"):
            fields["xfail"] = str(report.wasxfail)
        if report.skipped:
            fields["reason"] = _reason(report)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            fields["reason"] = str(crash.message).splitlines()[0] if crash is not None and crash.message else ""
            fields["text"] = _cut(report.longreprtext)
            fields["output"] = [[name, _cut(content)] for name, content in report.sections if content]
        if report.when == "teardown" and report.user_properties:
            fields["properties"] = [[str(name), str(value)] for name, value in report.user_properties]
        self._tell("report", test=report.nodeid, **fields)


def _cut(text: str) -> str:
    """The end of a long text, which names the fault."""
    return text if len(text) <= MOST_TEXT else f"[{len(text) - MOST_TEXT} characters left out]\n{text[-MOST_TEXT:]}"


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Why something was skipped."""
    if isinstance(report.longrepr, tuple):  # file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return report.longreprtext
