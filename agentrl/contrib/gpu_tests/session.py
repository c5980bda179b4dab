"""Separate pytest session per test file: its processes, limits and end, and the outcome of each test.

`agentrl.contrib.toolkit.keeper` starts the session, adopts all of its orphaned processes (also double forks), and ends them when
the session ends, on request, and when the scheduler dies for any reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.contrib.toolkit import keeper
from agentrl.utils.errors import UserError
from agentrl.utils.files import shown_path

VISIBLE = "CUDA_VISIBLE_DEVICES"
ENV = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment of each session; by default CUDA numbers the fastest card first."""
OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed", "interrupted", "not run")
NOT_PASSED = ("failed", "interrupted", "not run")
COLLECT_S = 300.0
"""Timeout in seconds for collecting all test files."""
DUMP_S, STOP_S = 2.0, 15.0
"""Seconds for a session to write its stacks after a timeout, and to end after the first Ctrl-C, before it is killed."""
STUCK_S = 30.0
"""Seconds after which processes that do not end are abandoned with their cards."""
_NO_TESTS = 5
"""Exit code of pytest without tests."""
_END = 1_000_000
"""Number of bytes read from the end of a log."""
NOT_FOR_CHILDREN = (
    "RAY_ADDRESS",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_CURRENT_TEST",
)
"""Environment variables withheld from a session: another cluster's address, state of an outer pytest."""


@dataclass(frozen=True)
class Case:
    """Result of a test. `name`: its pytest id after the file, or "[file]" for a file whose tests are unknown. `seconds`: time
    of all phases. `phase`: the failed phase."""

    name: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    phase: str = ""


@dataclass(frozen=True)
class FileJob:
    """A file to run. `targets`: arguments of pytest, the file or some of its tests. `timeout`: seconds for the whole file.
    `tests`: collected names."""

    file: str
    targets: tuple[str, ...]
    gpus: int
    timeout: float
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileResult:
    """Result of a file. `problem`: fault of the file as a whole, or None. `seconds`: time from its start to the end of its last
    process; None if it was not started."""

    file: str
    cases: tuple[Case, ...]
    gpus: int = 0
    cards: tuple[int, ...] = ()
    seconds: float | None = None
    problem: str | None = None
    log: str | None = None

    @property
    def failed(self) -> bool:
        """True if a test failed, or the file as a whole."""
        return self.problem is not None or any(case.outcome == "failed" for case in self.cases)

    @property
    def counts(self) -> Counter[str]:
        """Count the tests per outcome."""
        return Counter(case.outcome for case in self.cases)


@dataclass
class Journal:
    """State of a session from its journal. `running`: tests in progress, at most one without pytest-xdist. `collected`: rows of
    tests, None before collection ends. `uncollected`: files, or parts of them, that failed or skipped themselves."""

    pid: int = 0
    collected: list[dict[str, Any]] | None = None
    uncollected: list[dict[str, Any]] = field(default_factory=list)
    running: dict[str, None] = field(default_factory=dict)
    cases: dict[str, Case] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read all complete lines; the last line may be incomplete."""
        said = cls()
        for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
            match json.loads(line):
                case {"pid": pid}:
                    said.pid = pid
                case {"collected": tests}:
                    said.collected = tests
                case {"start": name}:
                    said.running[name] = None
                case {"case": row, "over": over}:
                    said.cases[row["name"]] = Case(**row)
                    if over:
                        said.running.pop(row["name"], None)
                case event:
                    said.uncollected.append(event)
        return said


Why = Literal["by itself", "timeout", "interrupted", "stuck"]


class PytestSession:
    """A pytest process and its descendants. `folder` has its log, its journal and pytest's cache. `why`: reason of its end;
    `code`: exit code, -1 if its processes do not end (for example, stuck in the kernel)."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.log, self._journal = folder, folder / "log.txt", folder / "journal.jsonl"
        self.why: Why = "by itself"
        self.code = -1
        loop = asyncio.get_running_loop()
        self._asked: asyncio.Future[Any] = loop.create_future()
        self._at_once: asyncio.Future[Any] = loop.create_future()

    @property
    def journal(self) -> Journal:
        return Journal.read(self._journal)

    def stop(self, why: Why) -> None:
        """End the session. After a "timeout" it writes its stacks first; "interrupted", like Ctrl-C, lets it tear down its
        fixtures. A second call kills it at once."""
        if not (asked := self._at_once if self._asked.done() else self._asked).done():
            asked.set_result(why)

    async def run(self, arguments: Sequence[str], env: Mapping[str, str], seconds: float) -> None:
        """Run pytest until all of its processes have ended, for at most `seconds`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._journal.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-p", "agentrl.contrib.gpu_tests.plugin"]
        command += [f"--agentrl-journal={self._journal.resolve()}", "-o", f"cache_dir={(self._folder / 'cache').resolve()}"]
        with self.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", keeper.__file__, *command, *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=asyncio.subprocess.STDOUT, env=env,
                start_new_session=True,  # no Ctrl-C from the terminal: the scheduler passes it on
            )  # fmt: skip
        ended: asyncio.Future[Any] = asyncio.ensure_future(process.wait())
        timer = asyncio.get_running_loop().call_later(seconds, self.stop, "timeout")
        try:
            await asyncio.wait({ended, self._asked}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self.why = self._asked.result()
                timer.cancel()
                number, grace = (signal.SIGABRT, DUMP_S) if self.why == "timeout" else (signal.SIGINT, STOP_S)
                pid = self.journal.pid
                if pid and keeper.stat_of(pid)[1] == process.pid:  # pytest is running
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)
                    await asyncio.wait({ended, self._at_once}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            assert process.stdin is not None
            process.stdin.close()  # makes the keeper end all processes: SIGTERM, then SIGKILL
            await asyncio.wait({ended}, timeout=STUCK_S)  # also if cancelled: asyncio would kill an abandoned keeper
        if ended.done():
            self.code = ended.result()
        else:
            self.why = "stuck"

    def last_line(self) -> str:
        """Return the last line of the log that is neither empty nor a rule."""
        lines = [line.strip() for line in self._end_of_log().splitlines() if line.strip(" =-\r")]
        return lines[-1] if lines else ""

    def place(self, file: str) -> str:
        """Return the location of a crash or a stopped test from the stacks of pytest's faulthandler: the current thread's
        innermost line in `file`, else in any file; "" if unknown."""
        _, crashed, report = self._end_of_log().rpartition("Fatal Python error: ")
        thread = re.search(r"^Current thread [^\n]*\n((?:  .*\n?)*)", report, re.MULTILINE) if crashed else None
        frames = re.findall(r'^\s*File "(.+)", line (\d+) in (.+)$', thread[1], re.MULTILINE) if thread else []
        own = [frame for frame in frames if Path(frame[0]) == Path(file).resolve()]
        return next((f", at {shown_path(path)}:{line} in {name}" for path, line, name in own or frames), "")

    def _end_of_log(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - _END, 0))
            return file.read().decode(errors="replace")


class FileSession(PytestSession):
    """Session of one test file."""

    def __init__(self, job: FileJob, cards: tuple[int, ...], out: Path, args: Sequence[str]) -> None:
        super().__init__(file_folder(out, job.file))
        self.job, self.cards, self._args = job, cards, args

    @property
    def current(self) -> str:
        """Return the running test, or ""."""
        return next(reversed(self.journal.running), "")

    async def result(self) -> FileResult:
        """Run the file; return the outcome of each test, and the fault of the file as a whole."""
        began = asyncio.get_running_loop().time()
        await self.run([*self._args, *self.job.targets], child_env(os.environ, self.cards), self.job.timeout)
        return self._read(asyncio.get_running_loop().time() - began)

    def _read(self, seconds: float) -> FileResult:
        said, code = self.journal, self.code
        limit = f"did not end within {self.job.timeout:g} s"
        how = {"interrupted": "was interrupted", "timeout": limit, "stuck": "could not be ended"}.get(self.why, "")
        if not how:
            how = f"ended with exit code {code}"
            with suppress(ValueError):
                how = f"was ended by {signal.Signals(code - 128).name}" if code > 128 else how
        at = self.place(self.job.file) if self.why == "timeout" or code > 128 else ""
        names = self.job.tests if said.collected is None else [row["name"] for row in said.collected]
        if said.uncollected and not names:
            names = self.job.tests
        problems = [event["reason"] for event in said.uncollected if event["outcome"] == "failed"]
        skipped = [event["reason"] for event in said.uncollected if event["outcome"] == "skipped"]
        cases, stopped_in = [], ""
        for name in dict.fromkeys([*names, *said.cases, *said.running]):
            if name in said.running:
                stopped_in = f" in {name}"
                stopped = self.why == "interrupted"
                reason = "Ctrl-C" if stopped else f"the file {how} in this test{at}"
                lasted = said.cases[name].seconds if name in said.cases else 0.0
                cases.append(Case(name, "interrupted" if stopped else "failed", lasted, reason, "" if stopped else "call"))
            elif name in said.cases:
                cases.append(said.cases[name])
            elif skipped and not problems and code in (0, _NO_TESTS):
                cases.append(Case(name, "skipped", reason=skipped[0]))
            else:
                cases.append(Case(name, "not run", reason=f"its file {how}{stopped_in}"))
        problem = None
        if self.why == "stuck":
            problem = how
        elif self.why == "interrupted" or said.running:
            pass  # the test's result has the reason
        elif problems:
            problem = f"cannot be collected: {problems[0]}"
        elif self.why == "timeout" or code not in (0, 1, _NO_TESTS):
            problem = f"{how} outside of its tests{at or f': {self.last_line()}'}"
        elif code == 1 and not any(case.outcome == "failed" for case in cases):
            problem = f"{how} although no test failed: {self.last_line()}"
        return FileResult(self.job.file, tuple(cases), self.job.gpus, self.cards, seconds, problem, str(self.log))


def file_folder(out: Path, file: str) -> Path:
    """Return the unique folder of a file's session: below `out` as the file is below the working directory."""
    path = Path(file)
    return out / "files" / (Path("elsewhere", *path.parts[1:]) if path.is_absolute() else path)


def child_env(outer: Mapping[str, str], cards: Sequence[int] | None = None) -> dict[str, str]:
    """Return the environment of a session that sees only these cards; None: the cards visible to the scheduler."""
    kept = {name: value for name, value in outer.items() if name not in NOT_FOR_CHILDREN}
    shown = {} if cards is None else {VISIBLE: ",".join(map(str, cards))}
    return {**kept, **ENV, **shown, "PYTHONUNBUFFERED": "1"}


async def collect(words: Sequence[str], args: Sequence[str], out: Path, timeout: float) -> tuple[list[FileJob], list[FileResult]]:
    """Collect the tests in one pytest session; return the files to run, and results of those that failed or skipped themselves.

    `timeout`: limit of a file whose mark has none. Raises UserError if pytest cannot collect at all.
    """
    session = PytestSession(out / "collection")
    await session.run(["--collect-only", "-q", *args, *words], child_env(os.environ), COLLECT_S)
    if session.why != "by itself":
        raise UserError(f"the tests were not collected within {COLLECT_S:g} s{session.place('')} ({session.log})")
    said, code = session.journal, session.code
    rows = said.collected
    if rows is None or (code not in (0, 1, 2, _NO_TESTS) and not rows):
        lines = [line for line in session._end_of_log().splitlines() if line.startswith("ERROR: ")]
        raise UserError(f"{lines[-1][7:] if lines else session.last_line()} ({session.log})")
    by_file: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_file.setdefault(shown_path(row["file"]), []).append(row)
    results: dict[str, FileResult] = {}
    for event in said.uncollected:
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
        targets = (file,) if whole or not named else tuple(dict.fromkeys(named))  # the named tests of a file, or the whole file
        jobs.append(FileJob(file, targets, max(row["gpus"] for row in tests), limit, names))
    return jobs, list(results.values())
