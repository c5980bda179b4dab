"""The process that has the tests: pytest, with the policy's code as a module that is in another process.

A program of the standard library, run inside of a sandbox (`grade.py` starts it). The code never runs here and cannot reach this
process, so that it can patch no pytest, read no test and write no report: the file with the tests is gone before it starts, this
process cannot be traced by others, and nothing that others write is imported.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentrl.reward.unit_tests.talk import Talk

PR_SET_DUMPABLE = 4
BEGUN = b"begun\n"
"""What stands before a report: without it the sandbox failed, and no code has run."""
TOLD = 20
"""Failed tests of which it is told what they said."""


class CodeEndedError(Exception):
    """The process of the policy's code has ended, or did not answer in time."""


class Code:
    """The policy's module, in a process that is started when a test first asks, and again after it ended."""

    def __init__(self, request: dict[str, Any], tests: Path, program: str) -> None:
        self.request, self.tests, self.program = request, tests, program
        self.process: subprocess.Popen[bytes] | None = None
        self.talk: Talk | None = None
        self.starts = 0
        self.module = CodeObject(self, 0)
        self.locals: list[Any] = []
        self.errors: dict[str, type[Exception]] = {}
        self.until = time.monotonic() + request["total"]
        self.asked = False

    def start(self) -> None:
        self.asked = True
        self.starts += 1
        with contextlib.suppress(FileNotFoundError):
            self.tests.unlink()
        theirs, ours = os.pipe(), os.pipe()
        argv = [self.request["python"], "-P", "-S", "-s", "-B", "-X", "utf8", "-c", self.program, str(theirs[0]), str(ours[1])]
        null = subprocess.DEVNULL
        work = self.tests.parent.parent / "work"
        work.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            argv, stdin=null, stdout=null, stderr=null, pass_fds=(theirs[0], ours[1]), cwd=work, start_new_session=False
        )
        os.close(theirs[0])
        os.close(ours[1])
        self.talk = Talk(ours[0], theirs[1])
        self.exchange({"module": self.request["module"], "code": self.request["code"]})

    def end(self) -> None:
        if self.process is not None and self.talk is not None:
            with contextlib.suppress(OSError):  # a sandbox of an older kernel forbids the signal; its end ends the process
                self.process.send_signal(signal.SIGKILL)
            os.close(self.talk.reads)
            os.close(self.talk.writes)
        self.process = self.talk = None

    def ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        """What an operation on an object of the code gives; raises what it raises."""
        if self.talk is None:
            self.start()
        keyed = {"kwargs": self.encode(kwargs)} if kwargs else {}
        reply = self.exchange({"do": do, "args": self.encode(list(args)), **keyed})
        for place, changed in reply.get("changed", []):
            _become(args[place], self.decode(changed))
        if reply.get("stop"):
            raise StopIteration
        return self.decode(reply["value"])

    def exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to a message; calls of the tests' own functions in between are answered."""
        until = min(self.until, time.monotonic() + self.request["seconds"])
        try:
            assert self.talk is not None
            self.talk.send(message)
            while "call" in (reply := self.talk.receive(until)):
                self.talk.send({"reply": self.called(reply)})
            sys.stdout.write(str(reply.get("out", "")))
        except TimeoutError:
            self.end()
            raise CodeEndedError(f"no answer within {self.request['seconds']} s") from None
        except (EOFError, OSError, ValueError, RecursionError) as fault:
            self.end()
            raise CodeEndedError(f"the process of the code ended: {type(fault).__name__}: {fault}"[:500]) from None
        if "raised" in reply:
            raise self.error(reply["kind"])(str(reply["raised"]))
        return reply

    def called(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self.locals[request["call"]]
            return {"value": self.encode(function(*self.decode(request["args"]), **self.decode(request["kwargs"])))}
        except Exception as fault:
            return {"raised": f"{type(fault).__name__}: {fault}"[:2000]}

    def encode(self, value: Any) -> Any:
        return Talk.encode(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, CodeObject):
            return {"held": self.number(value)}
        if not callable(value):
            raise TypeError(f"tests cannot pass a {type(value).__name__} to the code: plain data and functions only")
        self.locals.append(value)
        return {"local": len(self.locals) - 1}

    def number(self, held: CodeObject) -> int:
        """Its number in the process that runs now; what has a name in the module is looked up again in a new one. Raises
        CodeEndedError for another object of a process that has ended."""
        state = held.__dict__
        if state[" start"] != self.starts and state[" number"]:
            if state[" name"] is None:
                raise CodeEndedError("the process with this object has ended")
            found = self.ask("getattr", self.module, state[" name"])
            if not isinstance(found, CodeObject):
                raise CodeEndedError(f"{state[' name']} is another object now")
            state.update({**found.__dict__, " name": state[" name"]})  # by which it is found the next time, too
        return int(state[" number"])

    def decode(self, value: Any) -> Any:
        return Talk.decode(value, {"held": lambda number: CodeObject(self, int(number)), "error": self.error})

    def error(self, lineage: list[list[Any]]) -> type[Exception]:
        """An exception class of the code: Python's own, or one of that name derived as there. Never one that ends pytest."""
        (name, own), *rest = lineage
        if own:
            found = getattr(builtins, str(name), None)
            return found if isinstance(found, type) and issubclass(found, Exception) else CodeEndedError
        if name not in self.errors:
            self.errors[str(name)] = type(str(name), (self.error(rest) if rest else Exception,), {})
        return self.errors[name]


class CodeObject:
    """An object of the code. It equals no plain data, and only an object of the code can be added to it: what it answers is up
    to the policy, so that a test must be met by data."""

    def __init__(self, code: Code, number: int) -> None:
        # Under names that no attribute of the code's object can have.
        self.__dict__.update({" code": code, " number": number, " start": code.starts, " name": None})

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _ask(self, "names")
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = _ask(self, "getattr", name)
        if isinstance(found, CodeObject) and self.__dict__[" number"] == 0:
            found.__dict__[" name"] = name
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", *args, **kwargs)

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, CodeObject) and _ask(self, "isinstance", other) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CodeObject) and _ask(self, "eq", other) is True

    def __hash__(self) -> int:
        return int(_ask(self, "hash"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __exit__(self, *fault: object) -> None:
        _ask(self, "exit")


def _ask(held: CodeObject, do: str, *args: Any, **kwargs: Any) -> Any:
    return held.__dict__[" code"].ask(do, held, *args, **kwargs)


def _forward(name: str, both: bool) -> Any:
    def forwarded(self: CodeObject, *args: Any) -> Any:
        return NotImplemented if both and not isinstance(args[0], CodeObject) else _ask(self, name, *args)

    return forwarded


for _name in ("iter", "next", "getitem", "setitem", "delitem", "contains", "enter"):
    setattr(CodeObject, f"__{_name}__", _forward(_name, both=False))
for _name in ("lt", "le", "add", "sub", "mul"):
    setattr(CodeObject, f"__{_name}__", _forward(_name, both=True))


def _become(mine: Any, changed: Any) -> None:
    """What the code did to a list, dict or set that it was given."""
    if isinstance(mine, list) and isinstance(changed, list):
        mine[:] = changed
    elif (isinstance(mine, dict) and isinstance(changed, dict)) or (isinstance(mine, set) and isinstance(changed, set)):
        mine.clear()
        mine.update(changed)


class Outcomes:
    """A plug-in of pytest that keeps what came of each test."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}
        self.why: dict[str, str] = {}
        self.broken: str | None = None

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.broken = self.broken or str(report.longrepr)[-1000:]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # Of what is marked to be skipped or to fail no code could pass, and it tells nothing of this one.
        marked = ("skip", "xfail")
        self.passed = {item.nodeid: False for item in items if not any(map(item.get_closest_marker, marked))}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.passed:
            return
        if report.when == "call":
            self.passed[report.nodeid] = report.passed
        elif report.failed:
            self.passed[report.nodeid] = False
        if report.failed and len(self.why) < TOLD:
            self.why.setdefault(report.nodeid, str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)[-300:])


def main(request: dict[str, Any], program: str) -> dict[str, Any]:
    """Run the tests. `program`: that of the other process. The outcome of each, or why the tests could not be collected."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody traces this process or opens its files in /proc
    import pytest

    tests = Path("tests/test_task.py").absolute()
    tests.parent.mkdir(exist_ok=True)
    tests.write_text(request["tests"])
    code, outcomes = Code(request, tests, program), Outcomes()
    sys.modules[request["module"]] = code.module  # type: ignore[assignment]
    words = ["-q", "--assert=plain", "--noconftest", "-c", os.devnull, "--import-mode=importlib"]
    words += ["--rootdir", str(tests.parent), "--confcutdir", str(tests.parent)]
    pytest.main([*words, "-p", "no:cacheprovider", "-p", "no:faulthandler", str(tests)], plugins=[outcomes])
    code.end()
    return {"passed": outcomes.passed, "why": outcomes.why, "broken": outcomes.broken, "asked": code.asked}


def serve(request: dict[str, Any], program: str) -> None:
    """Run the tests of a request, write the report, and end before anything else runs."""
    pipe = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 0)
    os.write(pipe, BEGUN)  # before there is anything of the policy's
    report = main(request, program)
    left = memoryview(json.dumps(report).encode())
    while left:
        left = left[os.write(pipe, left) :]
    os._exit(0)
