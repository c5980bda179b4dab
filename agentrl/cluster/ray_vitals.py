"""The processes of a local Ray that it cannot do without, its GCS and its raylet: waited for while it starts, and seen at once
when one is gone.

Ray's own ways are not those of a run. A raylet has 30 s to appear, and ends itself if its agents have not in as long, neither of
which a loaded machine keeps. Of one that died Ray says so tens of seconds later, and of a GCS never: a minute later it ends the
driver, from within and without a word.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from agentrl.errors import ResourceError

NAMES = {"gcs_server": "its GCS", "raylet": "its raylet"}
"""What is vital, by the name of its program."""
POLL = 0.2
"""Seconds between two looks."""
SOON = 10.0
"""Seconds. A raylet that ends before has another cause than a machine with too much to do: it was killed, or will end again."""
CLOCK = 1.0
"""Seconds by which the time at which a process began may be off."""


class RayletEndedError(ResourceError):
    """A Ray that starts has lost its raylet. `late`: after it had waited."""

    def __init__(self, late: bool) -> None:
        super().__init__("its raylet has ended while it started; why is in raylet.out, in Ray's folder")
        self.late = late


def vitals(since: float = 0.0) -> dict[str, psutil.Process]:
    """Those that this process has started since that `time.time()`, the newest of each name; one that has ended, too."""
    found = {}
    for process in sorted(psutil.Process().children(), key=psutil.Process.create_time):
        with suppress(psutil.Error):
            if process.name() in NAMES and process.create_time() >= since:
                found[process.name()] = process
    return found


def gone(vital: Mapping[str, psutil.Process]) -> str:
    """Which of them has ended, as a user should read it; "" if none has."""
    return " and ".join(f"{NAMES[name]} (pid {process.pid})" for name, process in vital.items() if _ended(process))


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@contextmanager
def patient(seconds: float) -> Iterator[None]:
    """In the body, a Ray that starts has so long. Ray asks for its node in a loop of 30 s, of which each question waits for the
    answer here. Raises RayletEndedError, from there, as soon as the raylet has ended."""
    services: Any = importlib.import_module("ray._private.services")
    ask, since = services.get_node, time.time() - CLOCK

    def asked(*args: Any, **keywords: Any) -> Any:
        began, raylet = time.monotonic(), vitals(since).get("raylet")
        while True:
            try:
                return ask(*args, **keywords)
            except RuntimeError:  # it is not there yet
                passed = time.monotonic() - began
                raylet = raylet or vitals(since).get("raylet")  # its program may only be about to begin
                if raylet is not None and _ended(raylet):
                    raise RayletEndedError(passed > SOON) from None
                if passed > seconds:
                    raise
            time.sleep(POLL)

    services.get_node = asked
    try:
        yield
    finally:
        services.get_node = ask
