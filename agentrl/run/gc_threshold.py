"""How often Python looks for cyclic garbage."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000


def raise_gc_threshold() -> None:
    """Look once in 20,000 new objects instead of once in 700; a rarer setting of the user's own stays.

    Rollouts keep what they make (messages, turns, ledgers), so a look finds next to nothing, and at Python's
    default the looks took over a third of the time of a turn (benchmarks/rollout.py).
    """
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:  # 0: the user turned collection off
        gc.set_threshold(YOUNG_OBJECTS, *older)
