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


class PolicyObjects:
    """The objects of the code that the tests hold, by number; 0 is the module."""

    def __init__(self, talk: Any, name: str, code: str) -> None:
        self.talk, self.name = talk, name
        self.objects: list[Any] = [None]
        self.printed = io.StringIO()
        module = types.ModuleType(name)
        sys.modules[name] = module
        self.objects[0] = module
        sys.stdout = sys.stderr = self.printed
        exec(compile(code, f"{name}.py", "exec"), module.__dict__)

    def held(self, value: Any) -> dict[str, Any]:
        """What the tests get for an object that is no plain data."""
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
            self.talk.send({"call": number, "args": self.encode(list(args)), "kwargs": self.encode(kwargs), "out": self.said()})
            reply = self.serve()
            if "raised" in reply:
                raise RuntimeError(str(reply["raised"]))
            return self.decode(reply["value"])

        return call

    def said(self) -> str:
        text = self.printed.getvalue()
        self.printed.seek(0)
        self.printed.truncate()
        return text[:PRINTED]

    def serve(self) -> dict[str, Any]:
        """Answer requests until the reply to a call of this side's."""
        while True:
            request = self.talk.receive()
            if "reply" in request:
                return dict(request["reply"])
            self.talk.send(self.answer(request))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        given: list[Any] = []
        try:
            given = self.decode(request["args"])
            value = self.do(request["do"], given, self.decode(request.get("kwargs", {"dict": []})))
            # What a call changes in the lists that it is given is changed in those of the tests too.
            changed = [[n, self.encode(one)] for n, one in enumerate(given) if isinstance(one, list | dict | set)]
            return {"value": self.encode(value), "changed": changed, "out": self.said()}
        except StopIteration:
            return {"stop": True, "out": self.said()}
        except BaseException as fault:  # sys.exit() too, which ends nothing here
            return {"raised": str(fault)[:2000], "kind": lineage(type(fault)), "out": self.said()}

    def do(self, what: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """`args`: the object, and what the operation takes besides."""
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
    """The names of an exception and of what it is derived from, nearest first; whether each is Python's own."""
    return [[one.__name__, one.__module__ == "builtins"] for one in kind.__mro__ if issubclass(one, BaseException)]


def main(talk: Any) -> None:
    """Run the code and answer. `talk`: the pipes to the runner."""
    begin = talk.receive()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        served = PolicyObjects(talk, begin["module"], begin["code"])
    except BaseException as fault:
        with contextlib.suppress(OSError):
            talk.send({"raised": f"{type(fault).__name__}: {fault}"[:2000], "kind": lineage(type(fault)), "out": ""})
        os._exit(1)
    talk.send({"value": None, "changed": [], "out": served.said()})
    served.serve()
