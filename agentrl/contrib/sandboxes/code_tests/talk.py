"""Plain data between the tests' process and that of the policy's code: JSON with a tag where it says less than Python.

Never pickled: what comes from the policy's side is hostile, and becomes numbers, texts and containers of these, or numbers of
objects. Standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
        for kinds, name in (((list,), "list"), ((tuple,), "tuple"), ((set,), "set"), ((frozenset,), "frozenset")):
            if isinstance(value, kinds):
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
CONTAINERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
