"""The process that has the policy's code: it runs what the tests call, and knows neither tests nor their outcomes.

A program of the standard library alone, run inside of a sandbox by `runner.py`, which talks to it through two pipes. What it
answers is data, whatever the code has made of this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import types
from collections.abc import Callable
from typing import Any

PRINTED = 1 << 16
"""Characters of what one call prints that are passed on."""


CONTAINERS = (list, dict, set, bytearray, tuple)


def _no_data(value: Any) -> Any:
    raise TypeError("no plain data")


class _Printed(io.TextIOWrapper):
    """Substitute for standard output: its `buffer` takes bytes, and nothing closes it."""

    def write(self, text: str) -> int:
        count = super().write(text)
        self.flush()
        return count

    def close(self) -> None:
        self.flush()


class PolicyObjects:
    """The objects of the code that the tests hold, by number; 0 is the module."""

    def __init__(self, talk: Any, name: str, code: str) -> None:
        self.talk, self.name = talk, name
        self.objects: list[Any] = [None]
        self.printed = {"out": io.BytesIO(), "err": io.BytesIO()}
        module = types.ModuleType(name)
        sys.modules[name] = module
        self.objects[0] = module
        sys.stdout, sys.stderr = (_Printed(one, encoding="utf-8", errors="replace") for one in self.printed.values())
        exec(compile(code, f"{name}.py", "exec", dont_inherit=True), module.__dict__)

    def held(self, value: Any) -> dict[str, Any]:
        """Stand-in that the tests get for an object that is no plain data."""
        number = next((n for n, one in enumerate(self.objects) if one is value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": lineage(value)}
        return {"held": number}

    def encode(self, value: Any) -> Any:
        return self.talk.encode(value, self.held)

    def decode(self, value: Any) -> Any:
        return self.talk.decode(value, {"held": lambda n: self.objects[n], "local": self.stub})

    def stub(self, number: int) -> Callable[..., Any]:
        """A function of the tests that the code may call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.talk.send({"call": number, "args": self.encode(list(args)), "kwargs": self.encode(kwargs), **self.said()})
            reply = self.serve()
            if "raised" in reply:
                raise RuntimeError(str(reply["raised"]))
            return self.decode(reply["value"])

        return call

    def said(self) -> dict[str, str]:
        """Output printed since the last call."""
        said = {name: one.getvalue()[:PRINTED].decode("utf-8", "replace") for name, one in self.printed.items()}
        for one in self.printed.values():
            one.seek(0)
            one.truncate()
        return said

    def serve(self) -> dict[str, Any]:
        """Answer requests until the reply to a call of this side's."""
        while True:
            request = self.talk.receive()
            if "reply" in request:
                return dict(request["reply"])
            self.talk.send(self.answer(request))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        given: list[Any] = []
        named: dict[str, Any] = {}
        reply: dict[str, Any]
        try:
            given, named = self.decode(request["args"]), self.decode(request.get("kwargs", {"dict": []}))
            reply = {"value": self.encode(self.do(request["do"], given, dict(named)))}
        except StopIteration:
            reply = {"stop": True}
        except BaseException as fault:  # sys.exit() too, which ends nothing here
            reply = self.fault(fault)
        # What a call changes in the containers that it is given is changed in those of the tests too.
        places = [*enumerate(given), *named.items()]
        try:
            reply["changed"] = [[place, self.encode(one)] for place, one in places if isinstance(one, CONTAINERS)]
        except ValueError as fault:
            reply = self.fault(fault)
        return {**reply, **self.said()}

    def fault(self, fault: BaseException) -> dict[str, Any]:
        """An exception: its text, its class and what it was made of, as far as that is data."""
        try:
            text = str(fault)[:2000]
        except Exception:
            text = ""
        made: list[Any] = []
        with contextlib.suppress(ValueError, TypeError):
            # Of a file's name OSError's own `args` are silent.
            args = fault.args
            if isinstance(fault, OSError) and fault.filename is not None:
                args = (fault.errno, fault.strerror, fault.filename)
            made = [self.talk.encode(one, _no_data) for one in args]
        return {"raised": text, "kind": lineage(type(fault)), "made": {"list": made}}

    def do(self, what: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`args`: the object, and the operation's other arguments."""
        one, *rest = args
        if what == "names":
            return list(getattr(one, "__all__", [name for name in vars(one) if not name.startswith("_")]))
        if what == "call":
            made = one(*rest, **kwargs)
            args[:] = [None, *rest]
            return made
        return OPERATIONS[what](one, *rest)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr, "setattr": setattr, "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool,
    "getitem": lambda a, b: a[b], "setitem": lambda a, b, c: a.__setitem__(b, c), "delitem": lambda a, b: a.__delitem__(b),
    "contains": lambda a, b: b in a, "isinstance": lambda a, b: isinstance(b, a), "enter": lambda a: a.__enter__(),
    "exit": lambda a: a.__exit__(None, None, None), "eq": lambda a, b: bool(a == b), "lt": lambda a, b: bool(a < b),
    "le": lambda a, b: bool(a <= b), "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "hash": hash,
}  # fmt: skip


def lineage(kind: type) -> list[list[Any]]:
    """The names of an exception and of what it is derived from, nearest first, and their modules."""
    return [[one.__name__, one.__module__] for one in kind.__mro__ if issubclass(one, BaseException)]


def main(talk: Any) -> None:
    """Run the code and answer. `talk`: the pipes to the runner."""
    begin = talk.receive()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        served = PolicyObjects(talk, begin["module"], begin["code"])
    except BaseException as fault:
        with contextlib.suppress(OSError):
            talk.send({"raised": f"{type(fault).__name__}: {fault}"[:2000], "kind": lineage(type(fault)), "made": {"list": []}})
        os._exit(1)
    talk.send({"value": None, **served.said()})
    served.serve()
