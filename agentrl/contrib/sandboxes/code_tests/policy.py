"""The process that has the policy's code: it runs what the tests call, and knows neither tests nor their outcomes.

A program of the standard library alone, run inside of a sandbox by `runner.py`, which talks to it through two pipes. What it
answers is data, whatever the code has made of this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import select
import sys
import time
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

PRINTED = 1 << 16
"""Characters of what one call prints that are passed on."""

CHANGEABLE = (list, dict, set, bytearray, tuple)


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
            reply["changed"] = [[place, self.encode(one)] for place, one in places if isinstance(one, CHANGEABLE)]
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


# Plain data between the tests' process and that of the policy's code: JSON with a tag where it says less than Python
#
# Never pickled: what comes from the policy's side is hostile, and becomes numbers, texts and containers of these, or numbers of
# objects.

MOST = 1 << 22
"""Bytes of one message."""
DEEPEST = 60


class Talk:
    """Messages over two file descriptors, each with its length before it."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes

    def send(self, message: Any) -> None:
        """Raises ValueError for one that is too long, OSError if nobody reads."""
        text = json.dumps(message).encode()
        if len(text) > MOST:
            raise ValueError(f"{len(text)} bytes of data; at most {MOST} are passed on")
        left = memoryview(len(text).to_bytes(4, "big") + text)
        while left:
            left = left[os.write(self.writes, left) :]

    def receive(self, until: float | None = None) -> dict[str, Any]:
        """Raises EOFError if the other side has ended, TimeoutError at `until` (time.monotonic), ValueError for anything else."""
        size = int.from_bytes(self._bytes(4, until), "big")
        if size > MOST:
            raise ValueError("a message that is too long")
        message = json.loads(self._bytes(size, until))
        if not isinstance(message, dict):
            raise ValueError("no message")
        return message

    def _bytes(self, count: int, until: float | None) -> bytes:
        found = bytearray()
        while len(found) < count:
            if until is not None and not select.select([self.reads], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(self.reads, min(count - len(found), 1 << 16))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    @staticmethod
    def encode(value: Any, other: Callable[[Any], Any], deep: int = 0) -> Any:
        """`other`: for anything but plain data. Subclasses of containers and numbers pass as their base class."""
        if deep > DEEPEST:
            raise ValueError("data that is nested too deep")
        if value is None or isinstance(value, bool | str):
            return value if not isinstance(value, str) else str(value)
        if isinstance(value, int):
            return {"int": hex(value)} if abs(value) >> 53 else int(value)
        for kind, name in ((float, "float"), (complex, "complex"), (Decimal, "decimal"), (Fraction, "fraction")):
            if isinstance(value, kind):
                return {name: kind.__repr__(value) if kind is float else kind.__str__(value)}
        if isinstance(value, bytes | bytearray):
            return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [Talk.encode(item, other, deep + 1) for item in list(value)]}
        if isinstance(value, dict):
            pairs = [[Talk.encode(k, other, deep + 1), Talk.encode(v, other, deep + 1)] for k, v in list(dict.items(value))]
            return {"dict": pairs}
        return other(value)

    @staticmethod
    def decode(value: Any, others: Mapping[str, Callable[[Any], Any]]) -> Any:
        """`others`: values of the other tags. Raises ValueError, TypeError, KeyError or RecursionError for anything but data."""
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise ValueError("no data")
            return value
        ((tag, held),) = value.items()
        if tag in PLAIN:
            return PLAIN[tag](held)
        if tag == "dict":
            return {Talk.decode(k, others): Talk.decode(v, others) for k, v in held}
        if tag in CONTAINERS:
            return CONTAINERS[tag](Talk.decode(item, others) for item in held)
        return others[tag](held)


PLAIN: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16), "float": float, "complex": complex, "decimal": Decimal, "fraction": Fraction,
    "bytes": bytes.fromhex, "bytearray": bytearray.fromhex,
}  # fmt: skip
CONTAINERS: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
