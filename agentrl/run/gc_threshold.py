"""How often Python's cyclic garbage collector runs."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 20_000


def raise_gc_threshold() -> None:
    """Collect once per 20,000 new objects instead of once per 700; a higher threshold set by the user stays.

    Rollouts keep what they allocate (messages, turns, ledgers), so a collection finds almost nothing, and with Python's
    default the collections took over a third of the time of a turn (benchmarks/rollout.py).
    """
    young, *older = gc.get_threshold()
    if 0 < young < YOUNG_OBJECTS:  # 0: the user turned collection off
        gc.set_threshold(YOUNG_OBJECTS, *older)
