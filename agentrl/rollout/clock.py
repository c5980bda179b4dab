"""What each episode of a rollout waits for, and who uses its time.

The engine's seconds are nobody's: it is given up only after a silence. An environment's time does not count its queues, scoring,
or what else blocked the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentrl.deadline import LONGEST
from agentrl.rollout.engine import Engine
from agentrl.trajectory import Blame, StopReason, TokenLedger


@dataclass(frozen=True, slots=True)
class Report:
    """The longest waits of the episodes of another process, as `Watch.oldest` has them, at the time `when`."""

    waits: list[tuple[str, str, float]]
    more: int
    when: float = field(default_factory=time.monotonic)


class Watch:
    """What each episode waits for. `moves` counts everything that comes back: tokens, tool calls, turns, episodes; `heard` signs
    of life of the engine alone. `cut`: the tokens that were sampled in episodes that were then cancelled, without those of a turn
    that was not over.

    `look`: tokens and tool calls of a wait in progress are found by polling, at least once in that many seconds.
    """

    def __init__(self, look: float = LONGEST) -> None:
        self.moves, self.heard, self.cut, self.look = 0, 0, 0, look
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self._elsewhere: dict[str, Report] = {}

    def moved(self) -> None:
        """Something came back."""
        self.moves += 1

    def hear(self) -> None:
        """The engine has sampled, for whichever episode."""
        self.heard += 1
        self.moved()

    @contextmanager
    def waits(self, key: str, what: Callable[[], str]) -> Iterator[None]:
        """Episode `key` waits for something; its arrival (or giving up on it) counts as a move."""
        self._waits[key] = (what, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(key, None)
            self.moved()

    @contextmanager
    def plays(self, ledgers: Sequence[TokenLedger]) -> Iterator[None]:
        """An episode is played that fills these ledgers; if it is cancelled, their sampled tokens count as `cut`."""
        try:
            yield
        except asyncio.CancelledError:
            self.cut += sum(ledger.sampled_tokens for ledger in ledgers)
            raise

    def oldest(self, most: int) -> tuple[list[tuple[str, str, float]], int]:
        """The `most` longest waits of this process: episode, what it waits for, seconds so far; and how many more there are."""
        now = time.monotonic()
        found = sorted(self._waits.items(), key=lambda item: item[1][1])
        return [(key, what(), now - since) for key, (what, since) in found[:most]], max(len(found) - most, 0)

    def told(self, process: str, report: Report | None) -> None:
        """What the episodes of another process wait for, in the place of what it reported before; None once it is gone."""
        if report is None:
            self._elsewhere.pop(process, None)
        else:
            self._elsewhere[process] = report

    def waiting(self, most: int = 8) -> str:
        """What the episodes wait for and for how long, longest first; "" if none waits. May be called from any thread."""
        now = time.monotonic()
        waits, more = self.oldest(most)
        for process, report in list(self._elsewhere.items()):
            passed = now - report.when
            waits += [(key, f"{what} (in {process})", seconds + passed) for key, what, seconds in report.waits]
            more += report.more
        waits.sort(key=lambda wait: -wait[2])
        more += max(len(waits) - most, 0)
        shown = [f"episode {key} for {seconds:.0f} s on {what}" for key, what, seconds in waits[:most]]
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


class Quiet:
    """Seconds in which a count stood still although the event loop was free to notice."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._last, self.seconds = count, count(), 0.0

    def add(self, passed: float) -> float:
        """Count `passed` seconds; start from 0 again if the count moved during them."""
        if (now := self._count()) != self._last:
            self._last, self.seconds = now, 0.0
        else:
            self.seconds += passed
        return self.seconds


@dataclass(slots=True)
class EpisodeClock:
    """Seconds of an episode by who used them: the policy (tools that run its own code) or the infrastructure (the environment,
    its other tools, an agent's program). Each has `limit` seconds of its own, and the engine's are on neither clock."""

    limit: float
    used: dict[Blame, float] = field(default_factory=lambda: {"policy": 0.0, "infrastructure": 0.0})

    def left(self, who: Blame) -> float:
        return self.limit - self.used[who]

    def add(self, who: Blame, seconds: float) -> None:
        self.used[who] += seconds

    @property
    def over(self) -> StopReason:
        """Why an episode ends of which one of the two has used up its time."""
        return StopReason.MAX_EPISODE_TIME if self.left("policy") <= 0 else StopReason.EPISODE_TIMEOUT


class RequestClock:
    """How long the engine has been silent while one request waits for it.

    Any token or answer begins the time anew, also another episode's: an engine that is slow, or has a queue, is at work.
    """

    def __init__(self, engine: Engine, key: str, limit: float, watch: Watch) -> None:
        self._engine, self._key, self._limit, self._watch = engine, key, limit, watch
        self._silent, self._waited = Quiet(lambda: watch.heard), 0.0
        self.tokens: int | None = None

    def spend(self, passed: float) -> float:
        """For `deadline.in_time`: the seconds of silence that are left."""
        self._waited += passed
        tokens = self._engine.progress(self._key)
        if tokens is not None:
            if tokens > (self.tokens or 0):
                self._watch.hear()
            self.tokens = tokens
        return self._limit - self._silent.add(passed)

    def __str__(self) -> str:
        if self.tokens is None:
            return f"the engine ({self._waited:.0f} s; it does not report tokens)"
        speed = self.tokens / self._waited if self._waited else 0.0
        return f"the engine ({self.tokens} tokens after {self._waited:.0f} s: {speed:.2g} tokens/s)"
