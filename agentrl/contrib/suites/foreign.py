"""Call a benchmark's code in a separate Python interpreter."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl.contrib.suites import foreign_main
from agentrl.contrib.suites.suite import SuiteEnv, within
from agentrl.data.trajectory import Json
from agentrl.utils.errors import ConfigError, EnvError
from agentrl.utils.parsing import read_json
from agentrl.utils.threads import TOOLS, after_fork, fork_safe

# Run a benchmark's code in a separate interpreter, with the package versions that it pins.
#
# A suite whose package cannot share agentrl's process (it pins another pydantic, patches the clock, keeps its world in global
# variables) brings a script that the benchmark's own Python runs; the suite calls the script's functions by name, with JSON.

COLLECT_S = 0.5
ANSWERS_S = 1800.0  # limit for hanging calls; a caller with its own limit (step, tool) kills the process earlier
ENDS_S = 5.0  # for a process to end after it closed its pipe
SHOWN_CHARS = 1500  # characters of an ended process's output that an error shows


def python_of(source: Path, given: str | None = None) -> str:
    """Return the interpreter for a benchmark's code: `given`, else that of a virtual environment `.venv` in its folder, else the
    current one. Raises ConfigError if `given` does not exist."""
    if given is None:
        own = source / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable
    path = Path(given).expanduser()
    if not path.exists():
        raise ConfigError(f"params.python = {given!r}: no such file; expected the path of a Python interpreter")
    return str(path)


class ForeignProcess:
    """A process that serves the functions of a script, with the pipes to it."""

    def __init__(self, command: Sequence[str]) -> None:
        # Folder of the process's temporary files, removed with it.
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-foreign-"))
        # Append mode: after a truncation, writes continue at the new end without a hole.
        self._output = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - closed by `end`
        try:
            # The process ends if its input closes or its parent dies. It has a new process group, so its children end with it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True, encoding="utf-8",
                env={**os.environ, "TMPDIR": str(self.folder), foreign_main.FOLDER: str(self.folder)}, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._output.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def lives(self) -> bool:
        """True if the process runs; after its end, its remaining children are killed."""
        if self._process.returncode is None and self._process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.returncode is None

    async def call(self, function: str, values: dict[str, Json]) -> Json:
        """Run `ask` in a thread. On cancellation, kill the process: its answer may never come, and would be read as the answer
        to the next call."""
        try:
            return await TOOLS.call(function, self.ask, function, values)
        except asyncio.CancelledError:
            self.kill()
            raise

    def ask(self, function: str, values: dict[str, Json]) -> Json:
        """Call a function of the script; blocks for at most `ANSWERS_S`. Raises EnvError if the function raises, if the process
        ends, or if its answer is invalid, after which the process is killed."""
        late = threading.Timer(ANSWERS_S, self.kill)
        late.daemon = True
        late.start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": function, "with": values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (OSError, UnicodeDecodeError):
            line = ""
        finally:
            late.cancel()
        if not line.endswith("\n"):
            size = os.fstat(self._output.fileno()).st_size
            said = os.pread(self._output.fileno(), SHOWN_CHARS, max(size - SHOWN_CHARS, 0)).decode("utf-8", "replace").strip()
            try:
                code = self._process.wait(ENDS_S)
            except subprocess.TimeoutExpired:  # it closed its pipe, but still runs
                self.kill()
                code = self._process.wait()
            raise EnvError(f"the benchmark's process ended with exit code {code} in {function}: {said}")
        try:
            answer = read_json(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.keys() not in ({"value"}, {"fault", "trace"}):
            self.kill()  # later answers could no longer be matched to their calls
            raise EnvError(f"the benchmark's process wrote in place of an answer to {function}: {line[:200]!r}")
        os.ftruncate(self._output.fileno(), 0)
        if "fault" in answer:
            said = f"the benchmark's {function} failed: {answer['fault']}\n{answer['trace'][-SHOWN_CHARS:]}"
            raise EnvError(said.encode("utf-8", "replace").decode())
        return answer["value"]

    def kill(self) -> None:
        """Kill the process and its children; a waiting caller gets EnvError."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Kill the process, close its pipes, which no caller may use later, and delete its temporary files; idempotent."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._output):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the pipe still holds an unread request
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Foreign:
    """Pool of at most `most` processes that serve one script with one interpreter; started on demand and kept."""

    def __init__(self, command: Sequence[str], most: int) -> None:
        self.command, self.most = tuple(command), most
        self._begin()
        after_fork(self, Foreign._begin)

    def _begin(self) -> None:
        # Also runs in a forked process, which must not use its parent's processes and pipes.
        self._idle: list[ForeignProcess] = []
        self._out: set[ForeignProcess] = set()
        self._taken, self._free = 0, threading.Condition()

    def __deepcopy__(self, memo: dict[int, Any]) -> Foreign:
        return self  # copies of an environment share the processes

    async def call(self, function: str, /, **values: Any) -> Json:
        """Call a function of the script in any process. Raises EnvError if the function fails. On cancellation, kills the
        process."""
        lock, using, wanted = threading.Lock(), list[ForeignProcess](), True

        def run() -> Json:
            # In one thread, which gives the process back by itself: an `ask` on the event loop may be waiting for it.
            process = self.take()
            try:
                with lock:
                    using.append(process)
                return process.ask(function, values) if wanted else None
            finally:
                with lock:
                    using.clear()
                self.give(process)

        try:
            return await TOOLS.call(function, run)
        except asyncio.CancelledError:
            wanted = False
            with lock:
                for process in using:
                    process.kill()  # its answer may never come
            raise

    def ask(self, function: str, /, **values: Any) -> Json:
        """Call a function of the script in any process; blocks. Raises EnvError as `call`."""
        process = self.take()
        try:
            return process.ask(function, values)
        finally:
            self.give(process)

    async def held(self) -> ForeignProcess:
        """Run `take` in a thread; on cancellation, the process is returned to the pool as soon as it is taken."""
        taking = asyncio.ensure_future(TOOLS.call("a benchmark's process", self.take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self.give(done.result()))
            raise

    def take(self) -> ForeignProcess:
        """Take a process for exclusive use until `give`; blocks until one is free."""
        with self._free:
            while self._taken >= self.most:
                if not self._free.wait(COLLECT_S):
                    gc.collect()  # frees the process of an environment that was dropped without `close`
            self._taken += 1
            process = self._idle.pop() if self._idle else None
        try:
            if process is not None and not process.lives:
                process.end()
                process = None
            process = process or ForeignProcess(self.command)
        except BaseException:
            self._release()
            raise
        # Keep a reference here: the collector would otherwise close the pipes of a process in a dropped reference cycle.
        self._out.add(process)
        return process

    def give(self, process: ForeignProcess) -> None:
        """Return a process to the pool. Does nothing in a forked process, which does not own it and would take it for ended and
        kill its group."""
        with self._free:
            if process not in self._out:
                return
            self._out.discard(process)
            if process.lives:
                self._idle.append(process)
            else:
                process.end()
        self._release()

    def _release(self) -> None:
        with self._free:
            self._taken -= 1
            self._free.notify()

    def close(self) -> None:
        """End all processes, also those in use."""
        with self._free:
            idle, self._idle = self._idle, []
        for process in (*idle, *self._out):
            process.end()


_POOLS: dict[tuple[tuple[str, ...], int], Foreign] = {}
_LOCK = fork_safe(threading.Lock())


def foreign(python: str, script: Path, arguments: Sequence[str] = (), most: int = 1) -> Foreign:
    """Return the process pool of a script; environments with equal arguments share it."""
    command = (python, foreign_main.__file__, str(script), *arguments)
    key = command, most
    with _LOCK:
        if key not in _POOLS:
            _POOLS[key] = Foreign(command, most)
            atexit.register(_POOLS[key].close)
        return _POOLS[key]


class ForeignSuite(SuiteEnv):
    """A suite that calls a script's functions in processes of the benchmark's own Python.

    `script`: a file of the suite. `inside`: the process pool. A subclass that extends `beside` or `shared` keeps these
    (`ForeignSuite.beside | {...}`)."""

    script: ClassVar[Path]
    beside = frozenset({"python", "processes"})
    host_params = SuiteEnv.host_params | {"python", "processes"}
    shared = frozenset({"inside", "python", "source", "version"})

    def __init__(self, *, python: str | None = None, processes: int = 2, **base: Any) -> None:
        """`python`: the interpreter with the benchmark's packages, by default that of SOURCE/.venv, else the current one.
        `processes` (1..256): number of processes; further callers wait.

        Raises ConfigError for a number outside this range or a missing interpreter."""
        super().__init__(**base)
        self.python = python_of(self.source, python)
        most = within(processes, 1, 256, f"{self.suite}: processes")
        self.inside: Foreign = foreign(self.python, self.script, self.arguments(), most)

    def arguments(self) -> tuple[str, ...]:
        """Return the script's `sys.argv[1:]`, by default the source."""
        return (str(self.source),)

    def first(self, function: str) -> Any:
        """Call a function that loads the benchmark, such as its list of tasks; blocks. Raises ConfigError if that fails in the
        chosen interpreter."""
        try:
            return self.inside.ask(function)
        except EnvError as problem:
            raise ConfigError(
                f"{self.suite}: {self.python} cannot load {self.source}: {problem}\nInstall its packages into a separate "
                f"environment: python3.11 -m venv {self.source}/.venv, then the packages that envs/{self.suite}/README.md lists"
            ) from None


class HeldWorld:
    """A benchmark's world in the memory of a process that one episode holds from `start` to `end`.

    `begin`: the script's function that makes the world, and its arguments; `made`: the calls that changed it so far. A copy
    replays them in another process at its first use: correct only for worlds with fixed time and random numbers."""

    def __init__(
        self, pool: Foreign, begin: tuple[str, Mapping[str, Json]], made: tuple[tuple[str, Mapping[str, Json]], ...] = ()
    ) -> None:
        self.pool, self.begin, self.made = pool, begin, list(made)
        self.waits = False
        self._process: ForeignProcess | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldWorld:
        return HeldWorld(self.pool, self.begin, tuple(self.made))

    def __del__(self) -> None:
        self.end()

    async def start(self) -> None:
        """Wait for a process, and make the world in it, replaying earlier calls."""
        self.waits = True
        try:
            self._process = await self.pool.held()
        finally:
            self.waits = False
        for function, values in (self.begin, *self.made):
            await self._process.call(function, dict(values))

    async def ask(self, function: str, **values: Json) -> Any:
        """Call a function that does not change the world. Raises EnvError if it fails or its process ends."""
        if self._process is None:
            await self.start()
        assert self._process is not None
        return await self._process.call(function, values)

    async def act(self, function: str, **values: Json) -> Any:
        """Call a function that may change the world. Raises EnvError as `ask`."""
        if self._process is None:
            await self.start()
        self.made.append((function, values))
        return await self.ask(function, **values)

    def end(self) -> None:
        """Return the process to the pool; idempotent. The next world in it replaces this one."""
        process, self._process = self._process, None
        if process is not None:
            self.pool.give(process)
