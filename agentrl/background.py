"""One event loop in a thread of its own, for callers in whose thread another one is running: the cells of a notebook."""

from __future__ import annotations

import asyncio
import os
import threading

from agentrl.executors import fork_safe


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="agentrl-loop", daemon=True)
        self.thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller is in this thread, in which nothing of this loop can be waited for."""
        return threading.current_thread() is self.thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_lock = fork_safe(threading.Lock())
_held: list[LoopThread] = []
os.register_at_fork(after_in_child=_held.clear)


def background() -> LoopThread:
    """The loop of this process, started with its first work."""
    with _lock:
        if not _held:
            _held.append(LoopThread())
        return _held[0]
