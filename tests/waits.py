"""Wait for what other processes and threads do."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def until(met: Callable[[], T], seconds: float = 30.0) -> T:
    """The answer of `met` as soon as it is true, or its last one after so many seconds."""
    end = time.monotonic() + seconds
    while not (found := met()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def runs(pid: int) -> bool:
    """True if a process is there; one that has ended, and that nobody has waited for, is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
