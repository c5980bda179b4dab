"""Seconds in which an engine was not paused."""

from __future__ import annotations

import time


class ActiveClock:
    """Stands still while the engine is paused."""

    def __init__(self) -> None:
        self._lost = 0.0
        self._stopped: float | None = None

    def now(self) -> float:
        """Active seconds since some moment."""
        return (time.monotonic() if self._stopped is None else self._stopped) - self._lost

    def stop(self) -> None:
        if self._stopped is None:
            self._stopped = time.monotonic()

    def go(self) -> None:
        if self._stopped is not None:
            self._lost += time.monotonic() - self._stopped
            self._stopped = None
