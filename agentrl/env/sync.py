"""The synchronous interface of an asynchronous environment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentrl.background import background
from agentrl.executors import after_fork

T = TypeVar("T")

# A forked child must not poll its parent's file descriptors.
_local = after_fork(threading.local(), lambda held: held.__dict__.clear())


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion on this thread's own event loop, which all environments share. In a thread in which an event
    loop runs already (a notebook's cells), it is run in the background loop, and waited for.

    Raises RuntimeError in the background loop itself (a callback, a tool): await `astep` there.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop().run_until_complete(work)
    held = background()
    if held.here:
        work.close()
        raise RuntimeError("reset() and step() block; inside of agentrl's own event loop await areset() and astep() instead")
    return asyncio.run_coroutine_threadsafe(work, held.loop).result()


def _loop() -> asyncio.AbstractEventLoop:
    held: asyncio.AbstractEventLoop | None = _local.__dict__.get("held")
    if held is None or held.is_closed():
        held = _local.held = asyncio.new_event_loop()
    return held
