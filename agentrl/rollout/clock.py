"""What each episode of a rollout waits for, and who is responsible for the time that it uses.

A deadline counts only the time that the engine or the environment had: not queues, not pauses for a publish, not
scoring, and not time during which something else blocked the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentrl.deadline import LONGEST
from agentrl.rollout.engine import Engine, Underway
from agentrl.tool.tool import Blame
from agentrl.trajectory import TokenLedger


@dataclass(frozen=True, slots=True)
class Report:
    """The longest waits of the episodes of another process, as `Watch.oldest` has them, at the time `when`."""

    waits: list[tuple[str, str, float]]
    more: int
    when: float = field(default_factory=time.monotonic)


class Watch:
    """What each episode waits for. `moves` counts everything that comes back: tokens, tool calls, turns, episodes. `cut`: the
    tokens that were sampled in episodes that were then cancelled, without those of a turn that was not over.

    `look`: tokens and tool calls of a wait in progress are found by polling, at least once in that many seconds.
    """

    def __init__(self, look: float = LONGEST) -> None:
        self.moves, self.cut, self.look = 0, 0, look
        self._waits: dict[str, tuple[Callable[[], str], float]] = {}
        self._elsewhere: dict[str, Report] = {}

    def moved(self) -> None:
        """Something came back."""
        self.moves += 1

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
    """Seconds in which nothing moved although the event loop was free to notice."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._moves, self.seconds = watch, watch.moves, 0.0

    def add(self, passed: float) -> float:
        """Count `passed` seconds; start from 0 again if anything moved during them."""
        if self._watch.moves != self._moves:
            self._moves, self.seconds = self._watch.moves, 0.0
        else:
            self.seconds += passed
        return self.seconds


@dataclass(slots=True)
class EpisodeClock:
    """Seconds used of an episode's `limit`, by who used them: the policy (sampling, and tools whose lateness is
    its fault) or the infrastructure (the environment, its other tools, an engine that does not report progress)."""

    limit: float
    used: dict[Blame, float] = field(default_factory=lambda: {"policy": 0.0, "infrastructure": 0.0})

    @property
    def left(self) -> float:
        return self.limit - sum(self.used.values())

    def add(self, blame: Blame, seconds: float) -> None:
        self.used[blame] += seconds

    def blame(self, blame: Blame, seconds: float) -> Blame:
        """Who used most of the time, including the `seconds` of what is in progress."""
        used = {**self.used, blame: self.used[blame] + seconds}
        return "policy" if used["policy"] >= used["infrastructure"] else "infrastructure"


class RequestClock:
    """The time that one request has at the engine.

    If the engine reports progress (`Engine.progress`), only seconds in which it worked on the request count. If not,
    all seconds do, and a late answer is then never the policy's fault, because nobody knows whether tokens arrived.
    """

    def __init__(
        self, engine: Engine, key: str, turn_timeout: float, stall_timeout: float, clock: EpisodeClock, watch: Watch
    ) -> None:
        self._engine, self._key, self._clock, self._watch = engine, key, clock, watch
        self._turn_timeout, self._stall_timeout = turn_timeout, stall_timeout
        self._waited = self._last_token = 0.0
        self._quiet = Quiet(watch)
        self.reported: Underway | None = None

    @property
    def tokens(self) -> int:
        return 0 if self.reported is None else self.reported.tokens

    @property
    def active_s(self) -> float:
        return self._waited if self.reported is None else self.reported.active_s

    @property
    def blame(self) -> Blame:
        return "policy" if self.tokens else "infrastructure"

    def spend(self, passed: float) -> float:
        """For `deadline.in_time`: the seconds that the request has left."""
        self._waited += passed
        progress = self._engine.progress(self._key)
        if progress is not None:
            if progress.tokens != self.tokens:
                # A token of this request is a move for all of them: an engine that serves one is not stuck.
                self._last_token = progress.active_s
                self._watch.moved()
            self.reported = progress
        stalled = self._quiet.add(passed)
        # The episode's clock gets this request's time only at its end, so until then it is subtracted here.
        return min(self._turn_timeout - self.active_s, self._clock.left - self.active_s, self._stall_timeout - stalled)

    @property
    def episode_over(self) -> bool:
        return self._clock.left - self.active_s <= 0

    @property
    def thinking(self) -> bool:
        """Whether the turn's time ran out while tokens arrived: the policy thinks for too long. If no token arrived for
        half of the time, the engine is considered broken instead."""
        silent = self.active_s - self._last_token
        return self.active_s >= self._turn_timeout and self.tokens > 0 and silent < self._turn_timeout / 2

    def __str__(self) -> str:
        if self.reported is None:
            return "the engine, which does not report progress"
        done = self.reported
        state = f"{done.tokens} tokens after {done.active_s:.0f} s" if done.active_s else "queued or paused"
        return f"the engine ({state})"
