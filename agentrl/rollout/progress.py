"""How far a run's rollouts are, for those who show it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Numbers for the display and the watchdog. `cancelled`: members given up because their group had enough. `faults`: attempts
    at an episode that came to no score, by cause, and what the first of them was."""

    episodes: int = 0
    cancelled: int = 0
    turns: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    first_fault: str = ""
    moved: float = field(default_factory=time.monotonic)

    def add(self, turns: int, tokens: int) -> None:
        """An attempt at an episode has ended, of so many turns and sampled tokens of its own."""
        self.episodes += 1
        self.turns += turns
        self.tokens += tokens
        self.moved = time.monotonic()

    def trouble(self) -> str:
        """The attempts at an episode that came to no score, and the first of them, in words; "" if there are none."""
        faults = dict(self.faults)  # a copy: may be called from any thread
        return f"{sum(faults.values())} episodes came to no score; the first: {self.first_fault}" if faults else ""
