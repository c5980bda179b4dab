"""Run a benchmark's code in an interpreter of its own."""

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

# A benchmark's code in an interpreter of its own, with the versions of packages that it pins.
#
# A suite whose package cannot be installed beside agentrl (it pins another pydantic, patches the clock, keeps its world in global
# variables) comes with a script that its own Python runs; the suite calls the script's functions by name, with JSON.

COLLECT_S = 0.5
ANSWERS_S = 1800.0  # a bound of what hangs: a caller with a limit of its own (a step's, a tool's) kills the process at that
ENDS_S = 5.0  # for a process that closed its pipe to end
TOLD = 1500  # characters of what a process wrote before it ended that an error shows


def python_of(source: Path, given: str | None = None) -> str:
    """The interpreter that runs a benchmark's code: the one given, else that of a virtual environment `.venv` in its folder, else
    this one. Raises ConfigError if the one given does not exist."""
    if given is None:
        own = source / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable
    path = Path(given).expanduser()
    if not path.exists():
        raise ConfigError(f"params.python = {given!r}: no such file; expected the path of a Python interpreter")
    return str(path)


class ForeignProcess:
    """One process that serves the functions of a script, and this side of its pipes."""

    def __init__(self, command: Sequence[str]) -> None:
        # Its temporary files go with it, however it ends.
        self.folder = Path(tempfile.mkdtemp(prefix="agentrl-foreign-"))
        # Appending, so that what is cut from the beginning leaves no hole.
        self._told = tempfile.TemporaryFile("ab+")  # noqa: SIM115 - closed by `end`
        try:
            # It ends by itself when its input is closed or its parent is gone. A group of its own: what it started ends with it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, text=True, encoding="utf-8",
                env={**os.environ, "TMPDIR": str(self.folder), foreign_main.FOLDER: str(self.folder)}, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._told.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def lives(self) -> bool:
        """True if it has not ended. What it started ends with it, however it does."""
        if self._process.returncode is None and self._process.poll() is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.returncode is None

    async def call(self, function: str, values: dict[str, Json]) -> Json:
        """`ask`, awaited. If the caller is cancelled, the process is killed: it is in the middle of an answer, which nobody else
        may read, and which may never come."""
        try:
            return await TOOLS.call(function, self.ask, function, values)
        except asyncio.CancelledError:
            self.kill()
            raise

    def ask(self, function: str, values: dict[str, Json]) -> Json:
        """Call a function of the script; blocks, at most `ANSWERS_S`. Raises EnvError for what it raises, and if the process ends
        instead, writes no valid answer, after which it is killed."""
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
            size = os.fstat(self._told.fileno()).st_size
            said = os.pread(self._told.fileno(), TOLD, max(size - TOLD, 0)).decode("utf-8", "replace").strip()
            try:
                code = self._process.wait(ENDS_S)
            except subprocess.TimeoutExpired:  # it closed its pipe, and goes on
                self.kill()
                code = self._process.wait()
            raise EnvError(f"the benchmark's process ended with exit code {code} in {function}: {said}")
        try:
            answer = read_json(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.keys() not in ({"value"}, {"fault", "trace"}):
            self.kill()  # which answer belongs to which question is not known any more
            raise EnvError(f"the benchmark's process wrote in place of an answer to {function}: {line[:200]!r}")
        os.ftruncate(self._told.fileno(), 0)
        if "fault" in answer:
            said = f"the benchmark's {function} failed: {answer['fault']}\n{answer['trace'][-TOLD:]}"
            raise EnvError(said.encode("utf-8", "replace").decode())
        return answer["value"]

    def kill(self) -> None:
        """Kill it and what it started; whoever waits for its answer gets EnvError."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> None:
        """Kill it, close its pipes, which nobody may read any more, and delete its temporary files; idempotent."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._told):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a request that it never read
                    pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Foreign:
    """Processes of one interpreter that serve one script, at most `most` of them; started as they are needed, and kept."""

    def __init__(self, command: Sequence[str], most: int) -> None:
        self.command, self.most = tuple(command), most
        self._begin()
        after_fork(self, Foreign._begin)

    def _begin(self) -> None:
        # In a fork, too: the processes are not its children, and it would talk over its parent's pipes.
        self._idle: list[ForeignProcess] = []
        self._out: set[ForeignProcess] = set()
        self._taken, self._free = 0, threading.Condition()

    def __deepcopy__(self, memo: dict[int, Any]) -> Foreign:
        return self  # copies of an environment ask the same processes

    async def call(self, function: str, /, **values: Any) -> Json:
        """Call a function of the script in any of the processes. Raises EnvError for what it raises; a process whose caller is
        cancelled is killed."""
        process = await self.held()
        try:
            return await process.call(function, values)
        finally:
            self.give(process)

    def ask(self, function: str, /, **values: Any) -> Json:
        """`call`, blocking."""
        process = self.take()
        try:
            return process.ask(function, values)
        finally:
            self.give(process)

    async def held(self) -> ForeignProcess:
        """`take`, awaited: if the caller is cancelled while it waits, the process goes back as soon as there is one."""
        taking = asyncio.ensure_future(TOOLS.call("a benchmark's process", self.take))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self.give(done.result()))
            raise

    def take(self) -> ForeignProcess:
        """A process for the caller alone until it is given back; blocks until one is free."""
        with self._free:
            while self._taken >= self.most:
                if not self._free.wait(COLLECT_S):
                    gc.collect()  # an environment that was dropped without `close` gives its process back only then
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
        # Held here as well: of what is dropped in a circle of references, the collector would close the pipes, too.
        self._out.add(process)
        return process

    def give(self, process: ForeignProcess) -> None:
        """Give a process back. Nothing in a fork, to which it does not belong: it would take it for one that has ended, and kill
        what is left of it."""
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
        """End all processes, also those that a user holds."""
        with self._free:
            idle, self._idle = self._idle, []
        for process in (*idle, *self._out):
            process.end()


_POOLS: dict[tuple[tuple[str, ...], int], Foreign] = {}
_LOCK = fork_safe(threading.Lock())


def foreign(python: str, script: Path, arguments: Sequence[str] = (), most: int = 1) -> Foreign:
    """The processes for a script: the same ones for all environments of this process that ask with the same arguments."""
    command = (python, foreign_main.__file__, str(script), *arguments)
    key = command, most
    with _LOCK:
        if key not in _POOLS:
            _POOLS[key] = Foreign(command, most)
            atexit.register(_POOLS[key].close)
        return _POOLS[key]


class ForeignSuite(SuiteEnv):
    """A suite over processes of the benchmark's own Python, which serve the functions of `script`, a file of the suite.

    `inside`: the processes. A subclass that adds to `beside` or `shared` keeps these (`ForeignSuite.beside | {...}`)."""

    script: ClassVar[Path]
    beside = frozenset({"python", "processes"})
    host_params = SuiteEnv.host_params | {"python", "processes"}
    shared = frozenset({"inside", "python", "source", "version"})

    def __init__(self, *, python: str | None = None, processes: int = 2, **base: Any) -> None:
        """`python`: the interpreter that has the benchmark's packages, by default that of SOURCE/.venv, else this one.
        `processes` (1..256): how many of them answer at the same time; the rest waits.

        Raises ConfigError for a number outside this range, and for an interpreter that does not exist."""
        super().__init__(**base)
        self.python = python_of(self.source, python)
        most = within(processes, 1, 256, f"{self.suite}: processes")
        self.inside: Foreign = foreign(self.python, self.script, self.arguments(), most)

    def arguments(self) -> tuple[str, ...]:
        """The script's `sys.argv[1:]`; by default the source."""
        return (str(self.source),)

    def first(self, function: str) -> Any:
        """The script's answer to a first question, such as its list of tasks. Raises ConfigError if it cannot be loaded by that
        interpreter."""
        try:
            return self.inside.ask(function)
        except EnvError as problem:
            raise ConfigError(
                f"{self.suite}: {self.python} cannot load {self.source}: {problem}\nIts packages belong into an environment of "
                f"its own: python3.11 -m venv {self.source}/.venv, then what envs/{self.suite}/README.md lists"
            ) from None


class HeldWorld:
    """A benchmark's world that lives in a process's memory, one at a time: held by one episode, from `start` to `end`.

    `begin`: the script's function that makes it, and what that gets; `made`: the calls that changed it so far. A copy makes them
    again, in a process of its own, when it is first used: right for worlds whose time and random numbers are fixed."""

    def __init__(
        self,
        pool: Foreign,
        begin: tuple[str, Mapping[str, Json]],
        made: tuple[tuple[str, Mapping[str, Json]], ...] = (),
    ) -> None:
        self.pool, self.begin, self.made = pool, begin, list(made)
        self.waits = False
        self._process: ForeignProcess | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldWorld:
        return HeldWorld(self.pool, self.begin, tuple(self.made))

    def __del__(self) -> None:
        self.end()

    async def start(self) -> None:
        """Take a process (waiting for one), and make the world in it."""
        self.waits = True
        try:
            self._process = await self.pool.held()
        finally:
            self.waits = False
        for function, values in (self.begin, *self.made):
            await self._process.call(function, dict(values))

    async def ask(self, function: str, **values: Json) -> Any:
        """Call a function that leaves the world as it is. Raises EnvError if it fails or its process ends."""
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
        """Give the process back; idempotent. The next world in it takes this one's place."""
        process, self._process = self._process, None
        if process is not None:
            self.pool.give(process)
