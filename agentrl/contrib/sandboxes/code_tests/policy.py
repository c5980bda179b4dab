"""Process with the policy's code: it runs the calls of the tests, and knows neither tests nor their outcomes.

Uses the standard library alone; `runner.py` starts it in a sandbox and talks to it through two pipes. Its answers are plain
data, even if the code has manipulated this process.
"""

from __future__ import annotations

import contextlib
import io
import json
import operator
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
"""Bytes of output that are passed on, per call and stream."""

CHANGEABLE = (list, dict, set, bytearray, tuple)


def _no_data(value: Any) -> Any:
    raise TypeError("no plain data")


class _Printed(io.TextIOWrapper):
    """Replacement for standard output whose `buffer` takes bytes; `close` only flushes it."""

    def write(self, text: str) -> int:
        count = super().write(text)
        self.flush()
        return count

    def close(self) -> None:
        self.flush()


class PolicyObjects:
    """Objects of the code that the tests refer to, by number; 0 is the module."""

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
        """Return the reference that the tests get for an object that is not plain data."""
        if isinstance(value, types.CoroutineType):  # whoever runs it would raise a ValueError that a test may expect
            raise KeyboardInterrupt("coroutines are not supported")
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
        """Return a function that calls function `number` of the tests."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.talk.send({"call": number, "args": self.encode(list(args)), "kwargs": self.encode(kwargs), **self.said()})
            reply = self.serve()
            if "raised" in reply:
                raise RuntimeError(str(reply["raised"]))
            return self.decode(reply["value"])

        return call

    def said(self) -> dict[str, str]:
        """Return and clear the output printed since the last call."""
        said = {name: one.getvalue()[:PRINTED].decode("utf-8", "replace") for name, one in self.printed.items()}
        for one in self.printed.values():
            one.seek(0)
            one.truncate()
        return said

    def serve(self) -> dict[str, Any]:
        """Answer requests until the reply to this process's own call arrives; return that reply."""
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
        except BaseException as fault:  # sys.exit() too, which must not end this process
            reply = self.fault(fault)
        # Report changes of the argument containers, to apply them to those of the tests.
        places = [*enumerate(given), *named.items()]
        try:
            reply["changed"] = [[place, self.encode(one)] for place, one in places if isinstance(one, CHANGEABLE)]
        except ValueError as fault:
            reply = self.fault(fault)
        return {**reply, **self.said()}

    def fault(self, fault: BaseException) -> dict[str, Any]:
        """Describe an exception: its text, class and constructor arguments, if those are plain data."""
        try:
            text = str(fault)[:2000]
        except Exception:
            text = ""
        made: list[Any] = []
        with contextlib.suppress(ValueError, TypeError):
            # `OSError.args` lacks the file name.
            args = fault.args
            if isinstance(fault, OSError) and fault.filename is not None:
                args = (fault.errno, fault.strerror, fault.filename)
            made = [self.talk.encode(one, _no_data) for one in args]
        return {"raised": text, "kind": lineage(type(fault)), "made": {"list": made}}

    def do(self, what: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run operation `what`. `args`: the object, then the operation's other arguments."""
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
    "contains": lambda a, b: b in a, "isinstance": lambda a, b: isinstance(b, a), "enter": lambda a: a.__enter__(),
    "exit": lambda a: a.__exit__(None, None, None), "hash": hash,
    **{name: getattr(operator, name) for name in ("getitem", "setitem", "delitem", "add", "sub", "mul")},
    **{name: lambda a, b, to=getattr(operator, name): bool(to(a, b)) for name in ("eq", "lt", "le", "gt", "ge")},
}  # fmt: skip


def lineage(kind: type) -> list[list[Any]]:
    """Return (name, module) of an exception class and its base exceptions, nearest first."""
    return [[one.__name__, one.__module__] for one in kind.__mro__ if issubclass(one, BaseException)]


def main(talk: Any) -> None:
    """Run the code, then answer calls. `talk`: the pipes to the runner."""
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


# Plain data between the two processes: JSON, with a tag for Python types that JSON lacks
#
# Never pickled: messages from the policy's side are hostile; they can become only numbers, texts, containers of these, and
# references to objects.

MOST = 1 << 25
"""Maximum bytes per message."""
DEEPEST = 60


class Talk:
    """Exchange messages over two file descriptors; 4 bytes of length precede each message."""

    def __init__(self, reads: int, writes: int) -> None:
        self.reads, self.writes = reads, writes

    def send(self, message: Any) -> None:
        """Send a message. Raises ValueError if it is too long, OSError if nobody reads."""
        text = json.dumps(message).encode()
        if len(text) > MOST:
            raise ValueError(f"{len(text)} bytes of data; at most {MOST} are passed on")
        left = memoryview(len(text).to_bytes(4, "big") + text)
        while left:
            left = left[os.write(self.writes, left) :]

    def receive(self, until: float | None = None) -> dict[str, Any]:
        """Receive a message. Raises EOFError if the peer has ended, TimeoutError at `until` (time.monotonic), else ValueError."""
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
        """Encode plain data, and the rest by `other`. Subclasses of containers and numbers become their base class."""
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
        """Decode a value. `others`: tag -> decoder. Raises ValueError, TypeError, KeyError or RecursionError for bad data."""
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
