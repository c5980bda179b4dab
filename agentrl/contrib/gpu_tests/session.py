"""One test file's pytest session: its processes, its environment, its end.

The session is started by `agentrl.utils.keeper`, which adopts everything that the session leaves behind, double forks
included, and ends all of it when the session ends, on request, and when the scheduler dies in whatever way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentrl.contrib.gpu_tests.cards import VISIBLE
from agentrl.contrib.gpu_tests.plugin import DUMP, dump_file
from agentrl.contrib.gpu_tests.verdict import Ending, FileResult, JournalReader, Stacks, conclude
from agentrl.utils import keeper
from agentrl.utils.files import shown_path

_DUMP_S = 2.0
"""Seconds to wait for a session to say where it is."""
_TAIL = 4096
"""Bytes at the end of a log that are looked at."""
_MOST_STACKS = 1_000_000
"""Bytes of a log in which a crash's stacks are looked for, at its end."""
NOT_FOR_CHILDREN = (
    "RAY_ADDRESS",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
    "PYTEST_CURRENT_TEST",
)
"""Variables that a session does not get: another cluster's address, and what an outer pytest says of itself."""


@dataclass(frozen=True)
class FileJob:
    """One file to run. `targets`: what pytest gets, the file or some of its tests. `timeout`: seconds for all of it. `known`: the
    seconds that it took last time. `listed`: its tests as read from the file."""

    file: str
    targets: tuple[str, ...]
    gpus: int
    timeout: float
    known: float | None = None
    listed: tuple[str, ...] = ()


@dataclass(frozen=True)
class SessionOptions:
    """Options of all sessions. `folder`: where logs, journals and caches go, a name per file. `env`: added to the scheduler's
    environment. `args`: for pytest. `collect_timeout`: seconds from the start until the tests are known."""

    folder: Path
    env: Mapping[str, str]
    args: Sequence[str]
    collect_timeout: float


class FileSession:
    """A started file. `tick` is called again and again until it gives the result."""

    def __init__(self, job: FileJob, cards: tuple[int, ...], options: SessionOptions, now: float) -> None:
        self.job, self.cards, self.began = job, cards, now
        self._options = options
        self._log, self._journal, cache = (own_path(options.folder, kind, job.file) for kind in ("logs", "journals", "caches"))
        for path in (self._log, self._journal):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._journal.unlink(missing_ok=True)
        self.said = JournalReader(self._journal)
        self._why: Literal["by itself", "timeout", "collect timeout", "interrupted"] = "by itself"
        self._limit, self._stacks = 0.0, Stacks()
        self._ending_since: float | None = None
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "agentrl.contrib.gpu_tests.plugin",
            f"--agentrl-journal={self._journal.resolve()}",
        ]
        command += [f"--agentrl-gpus={job.gpus}", "-o", f"cache_dir={cache.resolve()}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *command, *options.args, *job.targets],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                env=child_env(os.environ, options.env, cards),
                start_new_session=True,  # away from the terminal's Ctrl-C: the scheduler passes it on
            )  # fmt: skip

    @property
    def stuck_for(self) -> float | None:
        """Since when it is being ended, on the caller's clock; None if it is not."""
        return self._ending_since

    def tick(self, now: float) -> FileResult | None:
        """Look how far it is, and end it if a limit has passed. The result, once none of its processes is left."""
        code = self._process.poll()
        self.said.read()
        if code is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            return self._result(now, code)
        if self._ending_since is None and self._why == "by itself":
            passed, of_collection = now - self.began, self._options.collect_timeout
            if not self.said.collected and of_collection < passed:
                self._stop(now, "collect timeout", of_collection)
            elif self.job.timeout < passed:
                self._stop(now, "timeout", self.job.timeout)
        return None

    def interrupt(self, now: float) -> None:
        """Pass Ctrl-C on: pytest ends the running test, tears its fixtures down, and ends."""
        if self._why == "by itself":
            self._why = "interrupted"
            if not self._signal(signal.SIGINT):
                self.end(now)

    def end(self, now: float) -> None:
        """End all its processes, SIGTERM and then SIGKILL; idempotent. `tick` tells when that is done."""
        self._why = "interrupted" if self._why == "by itself" else self._why
        if self._ending_since is None:
            self._ending_since = now
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # tells the keeper

    def abandon(self, now: float) -> FileResult:
        """The result of a session whose processes do not end, as one that is stuck in the kernel. Its keeper goes on."""
        return self._result(now, None)

    def _stop(self, now: float, why: Literal["timeout", "collect timeout"], limit: float) -> None:
        self._why, self._limit = why, limit
        self._stacks = self._dump_stacks()
        self.end(now)

    def _signal(self, number: int) -> bool:
        """Signal the pytest process itself; False if it has not begun or has ended."""
        pid = self.said.pid
        if pid is None or keeper.parent_of(pid) != self._process.pid:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def _dump_stacks(self) -> Stacks:
        """Ask the session where it is."""
        if not self._signal(DUMP):
            return Stacks()
        path, text, until = dump_file(self._journal), "", time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            before, text = text, path.read_text(errors="replace") if path.exists() else ""
            if text and text == before:
                break
            time.sleep(0.02)
        return stacks_of(text, Path(self.job.file))

    def _result(self, now: float, code: int | None) -> FileResult:
        self.said.read()
        stacks, tail = self._stacks, _tail(self._log)
        if self._why == "by itself" and code is not None and code > 128:
            stacks = stacks_of(_crash(self._log), Path(self.job.file))
        why = self._why if code is not None else "stuck"
        cases, problem = conclude(self.said, Ending(code, why, self._limit), self.job.listed, stacks, tail)
        return FileResult(
            self.job.file, tuple(cases), self.job.gpus, self.cards, now - self.began, problem, stacks.text, str(self._log),
            collected=bool(self.said.cases), part=self.job.targets != (self.job.file,) or bool(self._options.args),
        )  # fmt: skip


def own_path(folder: Path, kind: Literal["logs", "journals", "caches"], file: str) -> Path:
    """Path to which a file's session writes: below `folder` as the file is below the working directory, so that no two have one
    place."""
    path = Path(file)
    place = folder / kind / (Path("elsewhere", *path.parts[1:]) if path.is_absolute() else path)
    return place.with_name(place.name.removesuffix(".py") + {"logs": ".log", "journals": ".jsonl", "caches": ""}[kind])


def child_env(outer: Mapping[str, str], added: Mapping[str, str], cards: Sequence[int]) -> dict[str, str]:
    """The environment of a file's session that has these cards alone."""
    kept = {name: value for name, value in outer.items() if name not in NOT_FOR_CHILDREN}
    return {**kept, **added, VISIBLE: ",".join(map(str, cards)), "PYTHONUNBUFFERED": "1"}


def stacks_of(text: str, file: Path) -> Stacks:
    """Stacks that faulthandler wrote: all of it, and the innermost line of `file` in which its current thread is, else of any
    file."""
    inside = False
    frames: list[re.Match[str]] = []
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread")):
            inside = line.startswith("Current thread")
            frames = [] if inside else frames  # asked twice, the last answer counts
        elif inside and (found := _FRAME.match(line)):
            frames.append(found)
    own = [frame for frame in frames if Path(frame["file"]) == file.resolve()]
    return Stacks(next((f"{shown_path(frame['file'])}:{frame['line']} in {frame['name']}" for frame in own or frames), ""), text)


_FRAME = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


def _tail(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in _end_of_file(log, _TAIL).splitlines() if line.strip(" =-\r")]
    return lines[-1] if lines else ""


def _crash(log: Path) -> str:
    """Faulthandler's report of a crash, at the end of a log."""
    _, found, rest = _end_of_file(log, _MOST_STACKS).rpartition("Fatal Python error: ")
    return found + rest


def _end_of_file(path: Path, most: int) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - most, 0))
        return file.read().decode(errors="replace")
