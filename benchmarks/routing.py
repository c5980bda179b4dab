"""Simulate the routing of episodes to an engine's replicas: cached prompt tokens, longest queue and waits with agentrl's router,
against sticky sessions (started at the replica with the fewest requests in flight) and round-robin over requests.

    python benchmarks/routing.py [--quick]

Per step, a replica computes at most BUDGET prompt tokens and one token of each running request; its cache evicts the least
recently used entries. Groups start all at once (a synchronous run) or one after the other (an asynchronous run). Every figure is
a ratio of simulations of the same work. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from agentrl.rollout.engine import BLOCK, Need, Placed, RequestRouter

BUDGET, SEQUENCES = 4096, 128
STEP_S, PROMPT_TOKEN_S, TOKEN_S = 0.01, 4e-5, 1e-4
"""Seconds per step, per prompt token in it, and per running request in it."""
MEMBERS, MOST = 8, 2048


class Routes(Protocol):
    """Routing policy."""

    def begin(self, need: Need, hosts: Sequence[int]) -> Placed[int]: ...

    def end(self, placed: Placed[int], sampled: int | None) -> None: ...

    def forecast(self, most: int) -> float: ...


class RoundRobin:
    """Sends each request to the next replica."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def forecast(self, most: int) -> float:
        return float(most)

    def begin(self, need: Need, hosts: Sequence[int]) -> Placed[int]:
        return Placed(hosts[next(self._turn) % len(hosts)], need, 0.0)

    def end(self, placed: Placed[int], sampled: int | None) -> None: ...


class Sticky(RoundRobin):
    """Keeps each session at its first replica, the one with the fewest requests in flight at its start."""

    def __init__(self) -> None:
        self._homes: dict[str, int] = {}
        self._flying: dict[int, int] = {}

    def begin(self, need: Need, hosts: Sequence[int]) -> Placed[int]:
        host = self._homes.setdefault(need.key, min(hosts, key=lambda one: self._flying.get(one, 0)))
        self._flying[host] = self._flying.get(host, 0) + 1
        return Placed(host, need, 0.0)

    def end(self, placed: Placed[int], sampled: int | None) -> None:
        self._flying[placed.host] -= 1


@dataclass
class Episode:
    """Turns of (new prompt tokens, sampled tokens, seconds of the tool that follows)."""

    group: int
    key: str
    opening: int
    turns: list[tuple[int, int, float]]
    at: int = 0
    tokens: int = 0


@dataclass
class Request:
    episode: Episode
    placed: Placed[int]
    prompt: int
    sampled: int
    came: float
    uncached: int = 0
    begun: bool = False


@dataclass
class Replica:
    """One engine. `cache`: tokens of each group's prompt and of each session after it, least recently used first."""

    room: int
    cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    prompt: int = 0
    cached: int = 0
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    queued: int = 0
    busy: bool = False

    def add(self, request: Request) -> None:
        cached = self._cached(request)
        if not cached and any(other.episode.group == request.episode.group for other in self.waiting):
            cached = request.episode.opening  # will be cached, since a waiting request computes it
        request.uncached = request.prompt - cached
        self.queued += request.uncached + request.sampled
        self.waiting.append(request)

    def _cached(self, request: Request) -> int:
        shared = self._use(f"group {request.episode.group}")
        own = self._use(request.episode.key) if shared else 0
        return min(shared + own, request.prompt)

    def _use(self, name: str) -> int:
        if name in self.cache:
            self.cache.move_to_end(name)
        return self.cache.get(name, 0)

    def keep(self, episode: Episode, tokens: int) -> None:
        self.cache[f"group {episode.group}"] = episode.opening
        self.cache.move_to_end(f"group {episode.group}")
        self.cache[episode.key] = tokens - episode.opening
        self.cache.move_to_end(episode.key)
        while sum(self.cache.values()) > self.room:
            self.cache.popitem(last=False)

    def step(self) -> tuple[float, list[Request], list[Request]]:
        """Simulate one step, or several without changes; return seconds, started requests and ended requests."""
        left, computed, first = BUDGET, 0, list[Request]()
        while self.waiting and left and len(self.running) < SEQUENCES:
            ready = self.waiting[0]
            if not ready.begun:  # looked up now, since others of its group may have been computed after its arrival
                ready.begun, found = True, self._cached(ready)
                self.prompt, self.cached = self.prompt + ready.prompt, self.cached + found
                self.queued -= ready.uncached - (ready.prompt - found)
                ready.uncached = ready.prompt - found
            part = min(left, ready.uncached)
            ready.uncached -= part
            left, computed = left - part, computed + part
            if ready.uncached:
                break
            self.waiting.pop(0)
            self.keep(ready.episode, ready.prompt)
            self.running.append(ready)
            first.append(ready)
        steps = 1 if computed or not self.running else min(8, min(request.sampled for request in self.running))
        for request in self.running:
            request.sampled -= steps
        self.queued -= computed + steps * len(self.running)
        ended = [request for request in self.running if not request.sampled]
        self.running = [request for request in self.running if request.sampled]
        return steps * (STEP_S + TOKEN_S * len(self.running)) + PROMPT_TOKEN_S * computed, first, ended


@dataclass
class Run:
    """One simulation. `longest`: most tokens queued at a replica; `seconds`: time until the last episode ended."""

    routes: Routes
    replicas: list[Replica]
    longest: int = 0
    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def prompt(self) -> int:
        return sum(replica.prompt for replica in self.replicas)

    @property
    def cached(self) -> int:
        return sum(replica.cached for replica in self.replicas)

    def play(self, episodes: Sequence[tuple[float, Episode]]) -> Run:
        for start, episode in episodes:
            self._at(start, partial(self._turn, episode))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
            self.seconds = now
        return self

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _turn(self, episode: Episode, now: float) -> None:
        new, sampled, _ = episode.turns[episode.at]
        prompt = episode.tokens + new
        need = Need(episode.key, prompt, self.routes.forecast(MOST), lambda: _names(episode, prompt))
        placed = self.routes.begin(need, range(len(self.replicas)))
        replica, request = self.replicas[placed.host], Request(episode, placed, prompt, sampled, now)
        replica.add(request)
        self.longest = max(self.longest, replica.queued)
        if not replica.busy:
            replica.busy = True
            self._at(now, partial(self._step, replica))

    def _step(self, replica: Replica, now: float) -> None:
        if not replica.waiting and not replica.running:
            replica.busy = False
            return
        seconds, begun, ended = replica.step()
        self.waits += [now + seconds - request.came for request in begun]
        for request in ended:
            episode = request.episode
            sampled = episode.turns[episode.at][1]
            episode.tokens = request.prompt + sampled
            replica.keep(episode, episode.tokens)
            self._at(now + seconds, partial(self._ended, request.placed, sampled))
            delay = episode.turns[episode.at][2]
            episode.at += 1
            if episode.at < len(episode.turns):
                self._at(now + seconds + delay, partial(self._turn, episode))
        self._at(now + seconds, partial(self._step, replica))

    def _ended(self, placed: Placed[int], sampled: int, now: float) -> None:
        self.routes.end(placed, sampled)


def _names(episode: Episode, prompt: int) -> list[tuple[str, int]]:
    blocks = [(f"group {episode.group}", at) for at in range(episode.opening // BLOCK)]
    return blocks + [(episode.key, at) for at in range(len(blocks), prompt // BLOCK)]


def work(groups: int, gap: float, seed: int) -> list[tuple[float, Episode]]:
    """Draw groups of MEMBERS episodes, `gap` seconds apart on average; lengths and tool times are lognormal."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(gap, groups)) if gap else np.zeros(groups)
    episodes = []
    for group, start in enumerate(starts.tolist()):
        opening = int(rng.lognormal(6.9, 0.7)) + 64
        for member in range(MEMBERS):
            turns = []
            for turn in range(int(rng.integers(2, 9))):
                new = opening if turn == 0 else int(rng.lognormal(4.5, 1.0)) + 8
                sampled = min(int(rng.lognormal(4.8, 1.0)) + 4, MOST)
                turns.append((new, sampled, float(rng.lognormal(-1.0, 1.0))))
            episodes.append((start, Episode(group, f"{group}.{member}", opening, turns)))
    return episodes


def compare(count: int, groups: int, gap: float, room: int, seed: int) -> dict[str, Run]:
    """Simulate the same work with each routing policy, on `count` replicas whose caches hold `room` tokens."""
    ways: dict[str, Callable[[], Routes]] = {"router": RequestRouter, "sticky": Sticky, "round_robin": RoundRobin}
    return {name: Run(make(), [Replica(room) for _ in range(count)]).play(work(groups, gap, seed)) for name, make in ways.items()}


def ratios(runs: dict[str, Run]) -> dict[str, float]:
    """Return the ratios of the router to the others: computed prompt tokens, longest queue, 95th percentile of the time to first
    token, total seconds; and each policy's share of cached prompt tokens."""
    mine, row = runs["router"], {}
    for name in ("sticky", "round_robin"):
        other = runs[name]
        row[f"computed_over_{name}"] = (mine.prompt - mine.cached) / (other.prompt - other.cached)
        row[f"longest_queue_over_{name}"] = mine.longest / other.longest
        row[f"wait_p95_over_{name}"] = float(np.quantile(mine.waits, 0.95) / np.quantile(other.waits, 0.95))
        row[f"seconds_over_{name}"] = mine.seconds / other.seconds
    return row | {f"cached_share_{name}": run.cached / run.prompt for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one size")
    args = parser.parse_args()
    cases = [(2, 16, 0.0), (4, 64, 0.0), (8, 128, 0.0), (4, 64, 0.3), (8, 128, 0.15)]
    found: dict[str, list[float]] = {}
    for count, groups, gap in cases[:1] if args.quick else cases:
        for seed in range(1 if args.quick else 3):
            row = ratios(compare(count, groups, gap, 200_000, seed))
            for key, value in row.items():
                found.setdefault(key, []).append(value)
            start = "at once" if not gap else f"{gap:g} s apart"
            print(f"{count} replicas, {groups} groups {start}: " + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    medians = {key: round(statistics.median(values), 4) for key, values in found.items()}
    worst = {key: round(max(values), 4) for key, values in found.items() if "_over_" in key}
    print(json.dumps({"benchmark": "routing", "ratios": medians, "worst": worst}))


if __name__ == "__main__":
    main()
