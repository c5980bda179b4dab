"""Functions that a child process can import: what `process=True` asks for."""

from __future__ import annotations

import os
import time

from agentrl.errors import ToolError
from agentrl.tool import tool


@tool(process=True, timeout=20)
def square(n: int) -> list[int]:
    if n < 0:
        raise ToolError(f"{n} is negative")
    return [n * n, os.getpid()]


@tool(process=True, timeout=0.5)
def spin() -> int:
    while True:
        pass


@tool(process=True, timeout=0.5)
def sleep() -> int:
    time.sleep(60)
    return 0


@tool(process=True, timeout=20)
def die() -> int:
    os._exit(3)


@tool(process=True, timeout=20)
def unfit() -> object:
    return lambda: None
