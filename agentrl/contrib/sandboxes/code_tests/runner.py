"""Process with the tests: runs pytest, with a module that forwards calls to the policy's code in another process.

Uses the standard library and pytest; `grade.py` starts it in a sandbox. The code never runs here and cannot reach this process,
so it cannot patch pytest, read a test or write a report: the test file is deleted before the code starts, no process can trace
this one, and no module is imported from files that the code can write."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.contrib.sandboxes.code_tests.policy import Talk

PR_SET_DUMPABLE = 4
BEGUN = b"begun\n"
"""Line before a report: without it the sandbox failed, and no code has run."""
MAX_REASONS = 20
"""Maximum number of failed tests in the report."""


class CodeEndedError(BaseException):
    """The process of the policy's code ended or did not answer in time; no test may expect this error."""


class UnsupportedError(BaseException):
    """The tests ask for what no code can do here; no test may expect this error."""


class Code:
    """The policy's module in another process. It starts at the first call of a test, and again after it ended."""

    def __init__(self, request: dict[str, Any], tests: Path, program: str) -> None:
        self.request, self.tests, self.program = request, tests, program
        self.process: subprocess.Popen[bytes] | None = None
        self.talk: Talk | None = None
        self.starts = 0
        self.module = CodeObject(self, 0)
        self.locals: list[Any] = []
        self.errors: dict[str, type[BaseException]] = {}
        self.raised: list[BaseException] = []
        self.ended = 0
        self.until = time.monotonic() + request["total"]
        self.asked = 0
        self.testing = False

    def start(self) -> None:
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
        try:
            self.exchange({"module": self.request["module"], "code": self.request["code"]})
        except Exception as fault:  # not an exception that a test may expect: the module could not be loaded
            self.end()
            raise self.over(f"the code cannot be run: {fault}") from None

    def end(self) -> None:
        if self.process is not None and self.talk is not None:
            with contextlib.suppress(OSError):  # older kernels forbid the signal in a sandbox; the sandbox's end then kills it
                self.process.send_signal(signal.SIGKILL)
            os.close(self.talk.reads)
            os.close(self.talk.writes)
        self.process = self.talk = None

    def ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of an operation on an object of the code, or raise the code's exception."""
        self.asked += 1
        if self.talk is None:
            self.start()
        keyed = {"kwargs": self.encode(kwargs)} if kwargs else {}
        message = {"do": do, "args": self.encode(list(args)), **keyed}
        try:
            reply = self.exchange(message)
        finally:
            changed = self.changed
            given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            self.sound(lambda: [_keep_container(given[place], one) for place, one in changed])
        if reply.get("stop"):
            raise StopIteration
        return self.sound(lambda: self.decode(reply["value"]))

    def sound(self, decode: Callable[[], Any]) -> Any:
        """Decode a message. Raises CodeEndedError if it is not plain data."""
        try:
            return decode()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as fault:
            self.end()
            raise self.over(f"the process of the code answered garbage: {type(fault).__name__}: {fault}"[:500]) from None

    def over(self, why: str) -> CodeEndedError:
        self.ended += 1
        self.raised.append(fault := CodeEndedError(why))
        return fault

    def exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the reply; calls of the tests' functions before the reply are answered."""
        until = min(self.until, time.monotonic() + self.request["seconds"])
        self.changed: list[tuple[int | str, Any]] = []
        try:
            assert self.talk is not None
            self.talk.send(message)
            while "call" in (reply := self.talk.receive(until)):
                self.talk.send({"reply": self.called(reply)})
            sys.stdout.write(str(reply.get("out", "")))
            sys.stderr.write(str(reply.get("err", "")))
            self.changed = [(place, self.decode(one)) for place, one in reply.get("changed", [])]
        except TimeoutError:
            self.end()
            raise self.over(f"no answer within {self.request['seconds']} s") from None
        except (EOFError, OSError, ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as fault:
            self.end()
            raise self.over(f"the process of the code ended: {type(fault).__name__}: {fault}"[:500]) from None
        if "raised" in reply:
            raised: BaseException = self.sound(lambda: self.fault(reply))
            self.raised.append(raised)
            raise raised
        return reply

    def fault(self, reply: dict[str, Any]) -> BaseException:
        """Rebuild the exception of a reply with its text; uses its constructor arguments if the class allows that."""
        kind, text, made = self.error(reply["kind"]), str(reply["raised"]), self.decode(reply["made"])
        if kind is CodeEndedError:
            return self.over(text)
        with contextlib.suppress(Exception):
            if str(whole := kind(*made)) == text:
                return whole
        quiet = type(kind.__name__, (kind,), {"__init__": lambda self, *args: None, "__str__": lambda self: text})
        silent: BaseException = quiet(*(made or [text]))
        return silent

    def called(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            function = self.locals[request["call"]]
            return {"value": self.encode(function(*self.decode(request["args"]), **self.decode(request["kwargs"])))}
        except (Exception, UnsupportedError) as fault:
            return {"raised": f"{type(fault).__name__}: {fault}"[:2000]}

    def encode(self, value: Any) -> Any:
        return Talk.encode(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, CodeObject):
            return {"held": self.number(value)}
        if not callable(value):
            raise UnsupportedError(f"tests cannot pass a {type(value).__name__} to the code: plain data and functions only")
        self.locals.append(value)
        return {"local": len(self.locals) - 1}

    def number(self, held: CodeObject) -> int:
        """Return the object's number in the running process; after a restart, an object with a name in the module is looked up
        again. Raises CodeEndedError for any other object of an ended process."""
        state = held.__dict__
        if state[" start"] != self.starts and state[" number"]:
            if state[" name"] is None:
                raise CodeEndedError("the process with this object has ended")
            found = self.ask("getattr", self.module, state[" name"])
            if not isinstance(found, CodeObject):
                raise CodeEndedError(f"{state[' name']} is another object now")
            state.update({**found.__dict__, " name": state[" name"]})  # to find it after the next restart, too
        return int(state[" number"])

    def decode(self, value: Any) -> Any:
        return Talk.decode(value, {"held": lambda number: CodeObject(self, int(number)), "error": self.error})

    def error(self, lineage: list[list[Any]]) -> type[BaseException]:
        """Return a built-in exception class, or one with the same name and bases as in the code; never one that ends pytest."""
        (name, module), *rest = lineage
        found = getattr(sys.modules.get(str(module)), str(name), None) if str(module).partition(".")[0] in LIBRARY else None
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        if found is SystemExit and self.testing:
            return SystemExit
        if module == "builtins":
            return CodeEndedError
        key = f"{module}.{name}"
        if key not in self.errors:
            base = self.error(rest) if rest else CodeEndedError
            self.errors[key] = base if base is CodeEndedError else type(str(name), (base,), {})
        return self.errors[key]


LIBRARY = sys.stdlib_module_names - {"unittest"} | {"builtins"}
"""Modules whose exceptions are passed on as they are; those of unittest could skip a test."""
UNSUPPORTED = """abs and ceil complex divmod float floor floordiv int invert lshift matmul mod neg or pos pow radd rand rdivmod
    rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor truediv trunc xor"""
"""Operators that no test can use on the code's objects."""


class CodeObject:
    """Reference to an object of the code. It never equals plain data, and only other such references can be added to it: the
    policy controls its answers, so only plain data may satisfy a test."""

    def __init__(self, code: Code, number: int) -> None:
        # The leading space avoids clashes with attributes of the code's object.
        self.__dict__.update({" code": code, " number": number, " start": code.starts, " name": None})

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _ask(self, "names")
        if name == "__name__" and self.__dict__[" number"] == 0:
            return self.__dict__[" code"].request["module"]
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

    def __contains__(self, item: Any) -> bool:
        if _ask(self, "contains", item) is not True:
            return False
        if isinstance(item, str | int | float | bytes) and all(_ask(self, "contains", other) is True for other in _random(item)):
            raise self.__dict__[" code"].over("an object of the code contains whatever it is asked for")
        return True

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __exit__(self, *fault: object) -> None:
        _ask(self, "exit")


def _ask(held: CodeObject, do: str, *args: Any, **kwargs: Any) -> Any:
    return held.__dict__[" code"].ask(do, held, *args, **kwargs)


def _forward(name: str, refused: Callable[..., bool], made: Callable[[Any], Any] = lambda value: value) -> Any:
    def forwarded(self: CodeObject, *args: Any) -> Any:
        if refused(*args):
            if args and isinstance(args[0], list):  # a list takes what an object yields: `found += solution.items()`
                return NotImplemented
            # Python's own TypeError would pass a test that expects the code to raise one.
            raise self.__dict__[" code"].over(f"__{name}__ of an object of the code is not supported here")
        return made(_ask(self, name, *args))

    return forwarded


for _names, _refused in {
    "iter next getitem setitem delitem enter": lambda *args: False,
    "lt le gt ge add sub mul": lambda other: not isinstance(other, CodeObject),
    UNSUPPORTED: lambda *args: True,
}.items():
    for _name in _names.split():
        setattr(CodeObject, f"__{_name}__", _forward(_name, _refused))
for _name, _made in {"len": int, "hash": int, "str": str, "repr": str}.items():
    setattr(CodeObject, f"__{_name}__", _forward(_name, lambda *args: False, _made))


def _random(item: str | float | bytes) -> list[Any]:
    """Return random values of the type of `item`."""
    draw = random.SystemRandom()
    if isinstance(item, str | bytes):
        texts = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=max(8, len(item)))) for _ in range(6)]
        return texts if isinstance(item, str) else [text.encode() for text in texts]
    near = [item + draw.randint(1, 50) * draw.choice((-1, 1)) for _ in range(6)]
    return [*near, *(type(item)(draw.randint(10**6, 10**9)) for _ in range(6))]


def _keep_container(old: Any, new: Any) -> Any:
    """Apply the code's changes to the test's container, nested ones included, and return it; return other values as they are."""
    kinds = (list, dict, set, bytearray, tuple)
    if type(new) not in kinds or not isinstance(old, type(new)):
        return new
    if isinstance(new, dict):
        now = {key: _keep_container(old[key], one) if key in old else one for key, one in new.items()}
        old.clear()
        old.update(now)
        return old
    if isinstance(new, set):
        old.clear()
        old.update(new)
        return old
    if isinstance(new, bytearray):
        old[:] = new
        return old
    whole = [_keep_container(mine, one) for mine, one in zip(old, new, strict=False)] + list(new[len(old) :])
    if isinstance(new, list):
        old[:] = whole
        return old
    return old if len(old) == len(new) and all(a is b for a, b in zip(old, whole, strict=True)) else new


class Outcomes:
    """Pytest plug-in that records each test's outcome, and if the code or the tests are at fault."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.passed: dict[str, bool] = {}
        self.why: dict[str, str] = {}
        self.broken: str | None = None
        self.fault: str | None = None
        self.failed: set[str] = set()
        self.asked = self.ended = 0

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Blame the tests for an exception at collection, and for one that no code can cause."""
        fault, chain = call.excinfo.value, []
        while fault is not None:
            chain.append(fault)
            fault = fault.__cause__ or fault.__context__
        module = self.code.request["module"]
        own = any(fault in self.code.raised for fault in chain) or any(
            isinstance(fault, ImportError) and str(fault.name).partition(".")[0] == module for fault in chain
        )
        traceback_text = str(report.longrepr)[-1000:]
        if own and report.when == "collect":
            self.broken = self.broken or traceback_text
        # A test raises these regardless of the code's answers: a missing name, module or fixture.
        kinds = (NameError, ImportError, SyntaxError, UnsupportedError)
        alone = any(isinstance(one, kinds) or type(one).__name__ == "FixtureLookupError" for one in chain)
        if not own and (report.when == "collect" or alone):
            self.fault = self.fault or traceback_text

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.fault = self.fault or str(excrepr)[-1000:]

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # No code can pass a test that is marked to be skipped or to fail, so such a test says nothing about this code.
        marked = ("skip", "xfail")
        self.passed = {item.nodeid: False for item in items if not any(map(item.get_closest_marker, marked))}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.code.testing = True
        self.asked, self.ended = self.code.asked, self.code.ended

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.passed:
            return
        if report.skipped and self.code.asked == self.asked and report.nodeid not in self.why:
            del self.passed[report.nodeid]  # skipped by the tests alone; after an answer of the code, the code may have caused it
            return
        if self.code.ended > self.ended or report.failed:
            # A later report of the same test, for example of another subtest, does not undo a failure.
            said = getattr(report.longrepr, "reprcrash", None) or report.longrepr or self.code.raised[-1]
            if len(self.why) < MAX_REASONS or report.nodeid in self.why:
                self.why.setdefault(report.nodeid, str(said)[-300:])
            self.failed.add(report.nodeid)
        elif report.when == "call":
            self.passed[report.nodeid] = report.passed
        if report.nodeid in self.failed:
            self.passed[report.nodeid] = False


def main(request: dict[str, Any], program: str) -> dict[str, Any]:
    """Run the tests; return their outcomes, or why they could not be collected. `program`: source of the code's process."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no other process can trace this one or open its files in /proc
    import pytest

    tests = Path("tests/test_task.py").absolute()
    tests.parent.mkdir(exist_ok=True)
    tests.write_text(request["tests"])
    code = Code(request, tests, program)
    outcomes = Outcomes(code)
    sys.modules[request["module"]] = code.module  # type: ignore[assignment]
    words = ["-q", "--assert=plain", "--noconftest", "-c", os.devnull, "--import-mode=importlib"]
    words += ["--rootdir", str(tests.parent), "--confcutdir", str(tests.parent)]
    pytest.main([*words, "-p", "no:cacheprovider", "-p", "no:faulthandler", str(tests)], plugins=[outcomes])
    code.end()
    return {"passed": outcomes.passed, "why": outcomes.why, "broken": outcomes.broken, "fault": outcomes.fault}


def serve(request: dict[str, Any], program: str) -> None:
    """Run the tests of a request, write the report, and end before anything else runs."""
    pipe = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 0)
    os.write(pipe, BEGUN)  # before any code of the policy runs
    report = main(request, program)
    left = memoryview(json.dumps(report).encode())
    while left:
        left = left[os.write(pipe, left) :]
    os._exit(0)
