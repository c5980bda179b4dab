"""Functions that a child process can import: what `process=True` asks for."""

import asyncio
import functools
import os
import sys
import time

from agentrl.env import tool
from agentrl.utils.errors import ToolError


@tool(process=True, timeout=20)
def square(n: int) -> list[int]:
    if n < 0:
        raise ToolError(f"{n} is negative")
    return [n * n, os.getpid()]


async def double(n: int) -> int:
    await asyncio.sleep(0)
    return 2 * n


@tool(process=True, timeout=20)
@functools.wraps(double)
def wrapped(n: int) -> object:
    return double(n)


@tool(process=True, timeout=0.5)
def spin() -> int:
    while True:
        pass


@tool(process=True, timeout=0.5)
def sleep() -> int:
    time.sleep(60)
    return 0


@tool(process=True, timeout=20)
def fails(how: str) -> object:
    if how == "dies":
        os._exit(3)
    return sys.exit(5) if how == "leaves" else lambda: None


@tool(process=True, timeout=20)
def nap() -> int:
    time.sleep(1.0)
    return os.getpid()


class Refusal(ToolError):
    """An error that pickle cannot make again: its words are put together."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


@tool(process=True, timeout=20)
def refuse() -> int:
    raise Refusal("no", "closed")
