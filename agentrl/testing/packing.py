"""Which waiting test file starts next: the largest first, smaller ones beside it, and none waits for ever.

Pure functions. As in EASY backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995) the largest file that does not fit gets a
reservation: of the files that ran when it was first refused, those expected to end soonest, until their cards and the free ones
suffice. What these leave over goes to smaller files at once. So a file with a reservation starts, at the latest, when all files
have ended that ran when it got it. Unlike EASY, no file is let past the reservation because it is expected to end in time: that
rests on lengths, which may be unknown or wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Queued:
    """A file that waits. `gpus`: cards that it needs. `seconds`: how long it took last time, None: not known."""

    name: str
    gpus: int
    seconds: float | None = None


@dataclass(frozen=True)
class Held:
    """A file that runs on so many `cards`, until about `end` (seconds on the run's clock; infinite: not known)."""

    name: str
    cards: int
    end: float = math.inf


@dataclass(frozen=True)
class Reservation:
    """The file that is next, and the files for whose end it waits."""

    name: str
    running: frozenset[str]


@dataclass(frozen=True)
class Starts:
    """The files to start now with their cards, in order, and the reservation that holds from now on."""

    starts: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    reserved: Reservation | None = None


def largest_first(waiting: Sequence[Queued]) -> list[Queued]:
    """By cards, then by length (an unknown one counts as the longest), then by name."""
    return sorted(waiting, key=lambda one: (-one.gpus, -math.inf if one.seconds is None else -one.seconds, one.name))


def choose(waiting: Sequence[Queued], free: Sequence[int], held: Sequence[Held], reserved: Reservation | None = None) -> Starts:
    """Which files that need cards start now, each on which of the `free` cards. `reserved`: what the last choice reserved."""
    left, running = sorted(free), list(held)
    starts: list[tuple[str, tuple[int, ...]]] = []
    kept: Reservation | None = None
    over = 0  # cards that the reservation leaves to smaller files
    for one in largest_first(waiting):
        if one.gpus <= (len(left) if kept is None else min(len(left), over)):
            starts.append((one.name, tuple(left[: one.gpus])))
            del left[: one.gpus]
            over -= one.gpus if kept is not None else 0
            running.append(Held(one.name, one.gpus))
        elif kept is None:
            before = reserved.running if reserved is not None and reserved.name == one.name else frozenset()
            kept, over = _reserve(one, len(left), [other for other in running if other.name in before])
            if kept is None:
                kept, over = _reserve(one, len(left), running)
    return Starts(starts, kept)


def _reserve(one: Queued, free: int, running: Sequence[Held]) -> tuple[Reservation | None, int]:
    """Its reservation, and the cards left over; none if the running files do not have enough: it would then hold up the rest for
    nothing, since what it lacks is not ours."""
    cards = free
    for other in sorted(running, key=lambda other: other.end):
        if cards >= one.gpus:
            break
        cards += other.cards
    if cards < one.gpus:
        return None, 0
    return Reservation(one.name, frozenset(other.name for other in running)), cards - one.gpus


def time_left(waiting: Sequence[Queued], ends: Mapping[str, tuple[int, float]], free: Sequence[int], slots: int) -> float:
    """Seconds until all files have ended, by playing the rest with the lengths that are known (an unknown one counts 0).

    `ends`: of each running file its cards (0: it has a slot) and the seconds that it is expected to take from now on. `slots`:
    free ones for files without cards.
    """
    now, cards, left = 0.0, len(free), list(waiting)
    running = {name: (gpus, max(seconds, 0.0)) for name, (gpus, seconds) in ends.items()}
    lengths = {one.name: one.seconds or 0.0 for one in waiting}
    reserved: Reservation | None = None
    while left or running:
        held = [Held(name, gpus, end) for name, (gpus, end) in running.items() if gpus]
        choice = choose([one for one in left if one.gpus], range(cards), held, reserved)
        reserved = choice.reserved
        starting = {name: len(given) for name, given in choice.starts}
        cards -= sum(starting.values())
        for one in largest_first([one for one in left if not one.gpus])[: max(slots, 0)]:
            starting[one.name] = 0
            slots -= 1
        running |= {name: (gpus, now + lengths[name]) for name, gpus in starting.items()}
        left = [one for one in left if one.name not in starting]
        if not running:  # what is left fits nowhere
            break
        name = min(running, key=lambda name: running[name][1])
        gpus, now = running.pop(name)
        cards, slots = cards + gpus, slots + (gpus == 0)
    return now
