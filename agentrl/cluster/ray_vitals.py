"""The processes of a local Ray that it cannot do without, its GCS and its raylet: waited for while it starts, and seen at once
when one is gone.

Ray's own ways are not those of a run. A raylet has 30 s to appear, which a loaded machine does not keep. Of one that died Ray
says so tens of seconds later, and of a GCS never: a minute later it ends the driver, from within and without a word.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

NAMES = {"gcs_server": "its GCS", "raylet": "its raylet"}
"""What is vital, by the name of its program."""
POLL = 0.2
"""Seconds between two looks."""


def vitals() -> dict[str, psutil.Process]:
    """Those that this process has started, by name."""
    found = {}
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if process.name() in NAMES and process.status() != psutil.STATUS_ZOMBIE:
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
    """In the body, a Ray that starts has so long, unless its raylet ends before. Ray asks for its node in a loop of 30 s, of
    which each question waits for the answer here."""
    services: Any = importlib.import_module("ray._private.services")
    ask = services.get_node

    def asked(*args: Any, **keywords: Any) -> Any:
        until = time.monotonic() + seconds
        while True:
            try:
                return ask(*args, **keywords)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > until or "raylet" not in vitals():
                    raise
            time.sleep(POLL)

    services.get_node = asked
    try:
        yield
    finally:
        services.get_node = ask
