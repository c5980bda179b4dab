"""Thread pools by purpose, so that work of one kind that hangs never keeps another kind from running.

`asyncio.to_thread` puts everything into one pool of cores + 4 threads: six hung tool calls there keep a
checkpoint from being committed. Code of this package names its purpose instead.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Purpose = Literal["batch", "files", "load", "score", "tools", "update", "weights"]
_THREADS: dict[Purpose, int] = {"batch": 1, "files": 2, "load": 2, "score": 8, "tools": 64, "update": 4, "weights": 4}


async def in_thread(purpose: Purpose, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)` in a thread of the pool for `purpose`, with the caller's context variables.

    Raises what the function raises. Cancelling the awaiting task does not end the thread.
    """
    call = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
    return await asyncio.get_running_loop().run_in_executor(_pool(purpose), call)


@cache
def _pool(purpose: Purpose) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS[purpose], thread_name_prefix=f"agentrl-{purpose}")
