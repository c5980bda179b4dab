"""A pytest session of its own for each test file: its processes, its limits, its end, and the outcome of each test.

The session is started by `agentrl.contrib.toolkit.keeper`, which adopts everything that the session leaves behind, double forks
included, and ends all of it when the session ends, on request, and when the scheduler dies in whatever way.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentrl.contrib.toolkit import keeper
from agentrl.utils.errors import UserError
from agentrl.utils.files import shown_path

VISIBLE = "CUDA_VISIBLE_DEVICES"
ENV = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Added to a file's environment: CUDA itself counts the fastest card first, where cards differ."""
OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed", "interrupted", "not run")
NOT_PASSED = ("failed", "interrupted", "not run")
COLLECT_S = 300.0
"""Seconds until all test files are collected."""
_DUMP_S = 2.0
"""Seconds that a session has to write its stacks before it is ended."""
_NO_TESTS = 5
"""pytest's exit code of a session without tests."""
_END = 1_000_000
"""Bytes at the end of a log that are looked at."""
NOT_FOR_CHILDREN = (
    "RAY_ADDRESS",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_CURRENT_TEST",
)
"""Variables that a session does not get: another cluster's address, and what an outer pytest says of itself."""


@dataclass(frozen=True)
class Case:
    """One test. `name`: as pytest has it behind the file, "[file]" for a file whose tests are not known. `seconds`: of all its
    phases. `phase`: the one that failed."""

    name: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    phase: str = ""


@dataclass(frozen=True)
class FileJob:
    """One file to run. `targets`: what pytest gets, the file or some of its tests. `timeout`: seconds for all of it. `tests`:
    the names that were collected."""

    file: str
    targets: tuple[str, ...]
    gpus: int
    timeout: float
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileResult:
    """One file. `problem`: the fault of the file as a whole, or None. `seconds`: from its start to the end of its last process;
    None if it was not started."""

    file: str
    cases: tuple[Case, ...]
    gpus: int = 0
    cards: tuple[int, ...] = ()
    seconds: float | None = None
    problem: str | None = None
    log: str | None = None

    @property
    def failed(self) -> bool:
        """True if it is to blame: a test failed, or the file as a whole."""
        return self.problem is not None or any(case.outcome == "failed" for case in self.cases)

    @property
    def counts(self) -> Counter[str]:
        """Number of tests per outcome."""
        return Counter(case.outcome for case in self.cases)


class Journal:
    """Reader of a session's journal. `running`: tests that have begun and not ended: one, but for pytest-xdist. `collected`:
    rows of tests, None before they are known. `uncollected`: files and parts of them that failed or skipped themselves."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest, self._offset = path, b"", 0
        self.pid: int | None = None
        self.collected: list[dict[str, Any]] | None = None
        self.uncollected: list[dict[str, Any]] = []
        self.running: dict[str, None] = {}
        self.cases: dict[str, Case] = {}

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
            event = json.loads(line)
            match event["event"]:
                case "began":
                    self.pid = event["pid"]
                case "collection":
                    self.uncollected.append(event)
                case "collected":
                    self.collected = event["tests"]
                case "start":
                    self.running[event["test"]] = None
                case "report":
                    self._report(event["test"], event)

    def _report(self, name: str, event: dict[str, Any]) -> None:
        case = self.cases.get(name)
        if case is None or event["when"] == "setup":
            case = Case(name, "passed")  # also of a test that is run again
        case = replace(case, seconds=case.seconds + event["seconds"])
        outcome, xfail = event["outcome"], event.get("xfail")
        if outcome == "failed" and case.outcome != "failed":
            case = replace(case, outcome="failed", phase=event["when"], reason=event["reason"])
        elif outcome == "skipped":
            case = replace(case, outcome="skipped" if xfail is None else "xfailed", reason=xfail or event["reason"])
        elif outcome == "passed" and xfail is not None and event["when"] == "call":
            case = replace(case, outcome="xpassed", reason=xfail)
        if event["when"] == "teardown":
            self.running.pop(name, None)
        self.cases[name] = case


class PytestProcess:
    """A pytest process and all that it starts. `folder` has its log, its journal and pytest's cache."""

    def __init__(self, folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log, journal = folder / "log.txt", folder / "journal.jsonl"
        journal.unlink(missing_ok=True)
        self.journal = Journal(journal)
        command = [sys.executable, "-m", "pytest", "-p", "agentrl.contrib.gpu_tests.plugin"]
        command += [f"--agentrl-journal={journal.resolve()}", "-o", f"cache_dir={(folder / 'cache').resolve()}", *arguments]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *command],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,  # away from the terminal's Ctrl-C: the scheduler passes it on
            )  # fmt: skip

    def signal(self, number: int) -> bool:
        """Signal the pytest process itself; False if it has not begun or has ended."""
        pid = self.journal.pid
        with suppress(ProcessLookupError):
            if pid is not None and keeper.parent_of(pid) == self.process.pid:
                os.kill(pid, number)
                return True
        return False

    def close(self) -> None:
        """End all its processes, SIGTERM and then SIGKILL; idempotent. `process.poll` tells when that is done."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # tells the keeper

    def last_line(self) -> str:
        """The last line of the log that says something."""
        lines = [line.strip() for line in self._end_of_log().splitlines() if line.strip(" =-\r")]
        return lines[-1] if lines else ""

    def place(self, file: str) -> str:
        """Place of a crash, or of a test that was stopped, by the stacks that pytest's faulthandler wrote: in the current thread
        the innermost line of the file, else of any file; "" if not known."""
        _, crashed, report = self._end_of_log().rpartition("Fatal Python error: ")
        thread = re.search(r"^Current thread [^\n]*\n((?:  .*\n?)*)", report, re.MULTILINE) if crashed else None
        frames = re.findall(r'^\s*File "(.+)", line (\d+) in (.+)$', thread[1], re.MULTILINE) if thread else []
        own = [frame for frame in frames if Path(frame[0]) == Path(file).resolve()]
        return next((f", at {shown_path(path)}:{line} in {name}" for path, line, name in own or frames), "")

    def _end_of_log(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - _END, 0))
            return file.read().decode(errors="replace")


class FileSession:
    """A started file. `tick` is called again and again until it gives the result. `ending_since`: since when it is being ended,
    on the caller's clock."""

    def __init__(self, job: FileJob, cards: tuple[int, ...], out: Path, args: Sequence[str], now: float) -> None:
        self.job, self.cards, self.began = job, cards, now
        self._session = PytestProcess(file_folder(out, job.file), [*args, *job.targets], child_env(os.environ, cards))
        self._why: Literal["by itself", "timeout", "interrupted", "stuck"] = "by itself"
        self._stopped_at = 0.0
        self.ending_since: float | None = None

    @property
    def current(self) -> str:
        """The test that runs, or ""."""
        return next(reversed(self._session.journal.running), "")

    def tick(self, now: float) -> FileResult | None:
        """Look how far it is, and end it if its time is over. The result, once none of its processes is left."""
        code = self._session.process.poll()
        self._session.journal.read()
        if code is not None:
            self._session.close()
            return self._result(now, code)
        if self._why == "by itself" and now - self.began > self.job.timeout:
            self._why, self._stopped_at = "timeout", now
            if not self._session.signal(signal.SIGABRT):  # it writes where it is
                self.end(now)
        elif self._why == "timeout" and now - self._stopped_at > _DUMP_S:
            self.end(now)
        return None

    def interrupt(self, now: float) -> None:
        """Pass Ctrl-C on: pytest ends the running test, tears its fixtures down, and ends."""
        if self._why == "by itself":
            self._why = "interrupted"
            if not self._session.signal(signal.SIGINT):
                self.end(now)

    def end(self, now: float) -> None:
        """End all its processes; idempotent."""
        self._why = "interrupted" if self._why == "by itself" else self._why
        self.ending_since = self.ending_since if self.ending_since is not None else now
        self._session.close()

    def abandon(self, now: float) -> FileResult:
        """The result of a session whose processes do not end, as one that is stuck in the kernel. Its keeper goes on."""
        self._why = "stuck"
        return self._result(now, 0)

    def _result(self, now: float, code: int) -> FileResult:
        """Every test of the file with its outcome, and the fault of the file as a whole."""
        said = self._session.journal
        said.read()
        how = f"ended with exit code {code}"
        if self._why == "interrupted":
            how = "was interrupted"
        elif self._why == "timeout":
            how = f"did not end within {self.job.timeout:g} s"
        elif self._why == "stuck":
            how = "could not be ended"
        elif code > 128:
            with suppress(ValueError):
                how = f"was ended by {signal.Signals(code - 128).name}"
        at = self._session.place(self.job.file) if self._why == "timeout" or code > 128 else ""
        names = self.job.tests if said.collected is None else [row["name"] for row in said.collected]
        if said.uncollected and not names:
            names = self.job.tests
        problems = [event["reason"] for event in said.uncollected if event["outcome"] == "failed"]
        skipped = [event["reason"] for event in said.uncollected if event["outcome"] == "skipped"]
        cases, stopped_in = [], ""
        for name in dict.fromkeys([*names, *said.cases, *said.running]):
            if name in said.running:
                stopped_in = f" in {name}"
                stopped = self._why == "interrupted"
                reason = "Ctrl-C" if stopped else f"the file {how} in this test{at}"
                seconds = said.cases[name].seconds if name in said.cases else 0.0
                cases.append(Case(name, "interrupted" if stopped else "failed", seconds, reason, "" if stopped else "call"))
            elif name in said.cases:
                cases.append(said.cases[name])
            elif skipped and not problems and code in (0, _NO_TESTS):
                cases.append(Case(name, "skipped", reason=skipped[0]))
            else:
                cases.append(Case(name, "not run", reason=f"its file {how}{stopped_in}"))
        problem = None
        if self._why == "stuck":
            problem = how
        elif self._why == "interrupted" or said.running:
            pass  # the test says it
        elif problems:
            problem = f"cannot be collected: {problems[0]}"
        elif self._why == "timeout" or code not in (0, 1, _NO_TESTS):
            problem = f"{how} outside of its tests{at or f': {self._session.last_line()}'}"
        elif code == 1 and not any(case.outcome == "failed" for case in cases):
            problem = f"{how} although no test failed: {self._session.last_line()}"
        seconds, log = now - self.began, str(self._session.log)
        return FileResult(self.job.file, tuple(cases), self.job.gpus, self.cards, seconds, problem, log)


def file_folder(out: Path, file: str) -> Path:
    """Folder of a file's session, below `out` as the file is below the working directory: no two files have one place."""
    path = Path(file)
    return out / "files" / (Path("elsewhere", *path.parts[1:]) if path.is_absolute() else path)


def child_env(outer: Mapping[str, str], cards: Sequence[int] | None = None) -> dict[str, str]:
    """The environment of a file's session that has these cards alone, None: those that the scheduler sees."""
    kept = {name: value for name, value in outer.items() if name not in NOT_FOR_CHILDREN}
    shown = {} if cards is None else {VISIBLE: ",".join(map(str, cards))}
    return {**kept, **ENV, **shown, "PYTHONUNBUFFERED": "1"}


def collect(words: Sequence[str], args: Sequence[str], out: Path, timeout: float) -> tuple[list[FileJob], list[FileResult]]:
    """Collect the tests in one pytest session: the files to run, and the results of those that failed or skipped themselves.

    `timeout`: for a file whose mark has none. Raises UserError if pytest cannot collect at all.
    """
    until = time.monotonic() + COLLECT_S
    session = PytestProcess(out / "collection", ["--collect-only", "-q", *args, *words], child_env(os.environ))
    try:
        while (code := session.process.poll()) is None:
            if time.monotonic() > until:
                session.signal(signal.SIGABRT)
                time.sleep(_DUMP_S)
                at = session.place("")
                raise UserError(f"the tests were not collected within {COLLECT_S:g} s{at} ({session.log})")
            time.sleep(0.02)
            session.journal.read()
    finally:
        session.close()
        session.process.wait()
    session.journal.read()
    rows = session.journal.collected
    if rows is None or (code not in (0, 1, 2, _NO_TESTS) and not rows):
        lines = [line for line in session._end_of_log().splitlines() if line.startswith("ERROR: ")]
        raise UserError(f"{lines[-1][7:] if lines else session.last_line()} ({session.log})")
    by_file: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_file.setdefault(shown_path(row["file"]), []).append(row)
    results: dict[str, FileResult] = {}
    for event in session.journal.uncollected:
        file, failed = shown_path(event["file"]), event["outcome"] == "failed"
        if failed or file not in by_file:
            by_file.pop(file, None)
            outcome, problem = ("not run", f"cannot be collected: {event['reason']}") if failed else ("skipped", None)
            results.setdefault(file, FileResult(file, (Case("[file]", outcome, reason=event["reason"]),), problem=problem))
    jobs = []
    for file, tests in by_file.items():
        limit = max((row["timeout"] for row in tests if row["timeout"] is not None), default=timeout)
        names = tuple(row["name"] for row in tests)
        path = Path(file).resolve()
        whole = any("::" not in word and path.is_relative_to(Path(word).resolve()) for word in words)
        named = [word for word in words if "::" in word and Path(word.partition("::")[0]).resolve() == path]
        targets = (file,) if whole or not named else tuple(dict.fromkeys(named))  # named tests of a file, or all of it
        jobs.append(FileJob(file, targets, max(row["gpus"] for row in tests), limit, names))
    return jobs, list(results.values())
