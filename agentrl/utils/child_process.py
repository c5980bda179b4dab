"""Run tools in child processes, which can be killed: `@tool(process=True)`.

A child serves one call after the other. If a call is abandoned (timeout, cancelled episode), its child is killed and the next
call starts another. A child imports the tool's module, so the tool must be a plain module function."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentrl.utils.errors import EnvError, ToolError, exception_for, fault_text
from agentrl.utils.threads import TOOLS

FunctionRef = tuple[str, str, str]
"""Module, qualified name and file of a function."""

_idle: list[Child] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked process must not use its parent's children


def function_ref(function: Callable[..., Any], name: str) -> FunctionRef:
    """Return a reference by which a child imports the function. Raises TypeError, naming the tool, if it cannot."""
    kinds = {
        "a coroutine function": inspect.iscoroutinefunction(function),
        "a method": next(iter(inspect.signature(function).parameters), None) == "self",
        "defined inside a function": "<" in function.__qualname__,
    }
    if kind := next((kind for kind, found in kinds.items() if found), ""):
        raise TypeError(
            f"tool {name}: process=True needs a plain function of a module, which a child process can import; this one is {kind}"
        )
    return function.__module__, function.__qualname__, inspect.getfile(function)


@asynccontextmanager
async def child_for(name: str, place: FunctionRef) -> AsyncIterator[Child]:
    """Yield a child that has already imported the function, so that its start does not count as the tool's time."""
    child = None
    while _idle and child is None:  # one that has ended since (for example killed for memory) must not fail the next call
        child = found if (found := _idle.pop())._process.is_alive() else None
    if child is None:
        child = await TOOLS.call(name, Child)
    try:
        await child.call(name, place, None)
        yield child
    finally:
        if child.lives:  # a child whose call was abandoned has been killed
            _idle.append(child)


class Child:
    """A process that serves calls, with the parent's end of its pipe."""

    def __init__(self) -> None:
        # spawn: a forked copy of this multi-threaded process may hang on a lock that another thread held.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, list(sys.path)), daemon=True, name="agentrl-tool")
        self._process.start()
        theirs.close()
        self.lives = True
        self.used = 0.0
        """CPU seconds of the call during which it was killed."""

    async def call(self, name: str, place: FunctionRef, values: Mapping[str, Any] | None) -> Any:
        """Call the function (`values` None: only import it). Raises what it raises, and EnvError if the child exits instead of
        answering. Cancelling the call kills the child."""
        began = self._processor_s()
        try:
            answered, result = await TOOLS.call(name, self._ask, place, values)
        except asyncio.CancelledError:
            self.used = self._processor_s() - began
            self._kill()
            raise
        except (EOFError, OSError):
            await TOOLS.call(name, self._process.join, 1)  # it is exiting; wait for the exit code
            self._kill()
            raise EnvError(f"tool {name}: its process ended with exit code {self._process.exitcode}") from None
        if not answered:
            raise result
        return result

    def _ask(self, place: FunctionRef, values: Mapping[str, Any] | None) -> tuple[bool, Any]:
        """Send a request and block for the answer. Raises EOFError or OSError if the process is gone."""
        self._pipe.send((place, values))
        answer: tuple[bool, Any] = pickle.loads(self._pipe.recv_bytes())
        return answer

    def _kill(self) -> None:
        self.lives = False
        self._process.kill()
        self._process.join(1)  # takes milliseconds

    def _processor_s(self) -> float:
        with suppress(OSError):
            # Linux's id of a process's CPU clock (clock_getcpuclockid).
            return time.clock_gettime((~(self._process.pid or 0) << 3) | 2)
        return 0.0


def serve(pipe: Connection, path: list[str]) -> None:
    """Serve calls in the child until the parent closes the pipe."""
    sys.path[:] = path
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):  # sent to all processes of a job; the run finishes its step
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            place, values = pipe.recv()
        except EOFError:
            return
        answer: tuple[bool, Any]
        try:
            function = _find(*place)
            made = None if values is None else call_whole(function, values)
            answer = True, asyncio.run(made) if inspect.iscoroutine(made) else made  # a plain function may return a coroutine
        except BaseException as fault:
            answer = False, exception_for(fault, place[1])
        answered, result = answer
        try:
            packed = pickle.dumps(answer)
            if not answered:
                pickle.loads(packed)  # an exception whose constructor needs other arguments may not unpickle
        except Exception as problem:
            plain: Exception = TypeError(f"what it returned cannot be pickled: {fault_text(problem)}")
            if isinstance(result, ToolError):
                plain = ToolError(str(result))
            elif not answered:
                plain = RuntimeError(fault_text(result))
            packed = pickle.dumps((False, plain))
        pipe.send_bytes(packed)


def call_whole(function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call a tool's function; the items of a generator become a list here, since its code is the tool's too."""
    made = function(**values)
    return list(made) if isinstance(made, types.GeneratorType | map | filter | zip) else made


def _find(module: str, name: str, file: str) -> Callable[..., Any]:
    package, _, _ = module.rpartition(".")
    if package.startswith("_agentrl_shelf_") and package not in sys.modules:
        # Shelf files belong to a package that only the catalog's loader creates.
        parent = types.ModuleType(package)
        parent.__path__ = [str(Path(file).parent)]
        sys.modules[package] = parent
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    plain: Callable[..., Any] = getattr(found, "function", found)  # of a decorated function (a Tool)
    return plain
