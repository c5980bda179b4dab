"""Spans and torch's events as one file in Chrome's trace format, which ui.perfetto.dev opens.

Processes: the driver with its parts, calls and buckets; the episodes of each process that plays, a track each; the engine; each
rank of the training roles with its calls and torch's threads and streams.
"""

from __future__ import annotations

import gzip
import heapq
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.cluster.watched import RankCall
from agentrl.plain_data import json_text
from agentrl.spans import TraceSpan

Event = tuple[int, int, str, str, dict[str, Any]]
"""Begin and end in nanoseconds, name, category and arguments."""
Track = tuple[str, str]
"""Process and track, as they are named."""
PLAYED = ("episode", "turn", "generation", "environment", "tool", "scoring")


class Timeline:
    """Collects what happened since `zero`, in nanoseconds of the driver's clock; at most `most` events, the longest."""

    def __init__(self, zero: int, engine: str, most: int) -> None:
        self._zero, self._most, self.dropped = zero, most, 0
        self._engine = f"engine {engine}"
        self._tracks: dict[Track, list[Event]] = defaultdict(list)
        self._asked: list[tuple[int, int]] = []

    def span(self, found: TraceSpan) -> None:
        """Add a span of the driver, or of a rollout worker in the driver's time."""
        values = {key: value for key, value in found.values.items() if value is not None}
        if found.error:
            values["error"] = found.error
        self._tracks[self._track(found)].append((found.begin, found.end, found.name, found.kind, values))
        if found.kind == "generation":
            self._asked += [(found.begin, 1), (found.end, -1)]

    def rank(self, call: RankCall, ahead: int, torch: Mapping[str, Any] | None) -> None:
        """Add a rank's call, and what torch recorded in it. `ahead`: from its clock to the driver's."""
        process = f"{call.group} rank {call.rank}"
        end = call.end or call.begin
        self._tracks[process, "calls"].append((call.begin + ahead, end + ahead, call.method, "rank", {}))
        if torch is None:
            return
        self.dropped += torch["dropped"]
        for name, kind, place, thread, begin, took in torch["events"]:
            track = torch["names"].get(f"{place} {thread}") or f"{place} {thread}"
            self._tracks[process, f"torch: {track}"].append((begin + ahead, begin + ahead + took, name, kind, {}))

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """The file; one of that name is replaced at the end. Raises OSError."""
        self._cut()
        numbers = {process: place for place, process in enumerate(sorted({process for process, _ in self._tracks}), 1)}
        rows = [_name("process_name", pid, 0, process) for process, pid in numbers.items()]
        for process, pid in numbers.items():
            lane = 0
            for track in sorted(name for of, name in self._tracks if of == process):
                for place, events in enumerate(lanes(self._tracks[process, track])):
                    lane += 1
                    rows.append(_name("thread_name", pid, lane, track if not place else f"{track} ({place + 1})"))
                    rows += [self._row(pid, lane, event) for event in events]
        rows += self._running(len(numbers) + 1)
        about = {**about, "dropped_events": self.dropped}
        text = json_text({"traceEvents": rows, "displayTimeUnit": "ms", "otherData": about})
        aside = path.with_name(f".{path.name}")
        aside.write_bytes(gzip.compress(text.encode(), compresslevel=5))
        aside.replace(path)

    def _track(self, found: TraceSpan) -> Track:
        if found.kind == "bucket" and found.track.endswith("engine"):
            return self._engine, "buckets"
        if found.kind in PLAYED and found.track != "groups":
            return f"episodes in {found.place or 'the driver'}", found.track
        return found.place or "driver", found.track

    def _cut(self) -> None:
        """Leave out the shortest events, if there are too many: what they lie in is longer and stays."""
        every = [
            (event[1] - event[0], track, place) for track, events in self._tracks.items() for place, event in enumerate(events)
        ]
        if len(every) <= self._most:
            return
        kept: dict[Track, set[int]] = defaultdict(set)
        for _, track, place in heapq.nlargest(self._most, every):
            kept[track].add(place)
        self.dropped += len(every) - self._most
        self._tracks = defaultdict(
            list, {track: [self._tracks[track][place] for place in sorted(places)] for track, places in kept.items()}
        )

    def _row(self, pid: int, tid: int, event: Event) -> dict[str, Any]:
        begin, end, name, kind, values = event
        times = {"ts": (begin - self._zero) / 1000, "dur": (end - begin) / 1000}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": kind, **times, "args": values}

    def _running(self, pid: int) -> list[dict[str, Any]]:
        """How many turns the engine was asked for at each moment, as a counter."""
        rows, running = [_name("process_name", pid, 0, f"{self._engine}: turns")], 0
        for when, change in sorted(self._asked)[: self._most]:
            running += change
            values = {"ts": (when - self._zero) / 1000, "args": {"turns": running}}
            rows.append({"ph": "C", "pid": pid, "tid": 0, "name": "turns being sampled", **values})
        return rows if self._asked else []


def lanes(events: list[Event]) -> list[list[Event]]:
    """The events of a track in as few lanes as needed for each to lie in or after the others of its lane."""
    found: list[tuple[list[int], list[Event]]] = []
    for event in sorted(events, key=lambda one: (one[0], -one[1])):
        for open_until, lane in found:
            while open_until and open_until[-1] <= event[0]:
                open_until.pop()
            if not open_until or event[1] <= open_until[-1]:
                open_until.append(event[1])
                lane.append(event)
                break
        else:
            found.append(([event[1]], [event]))
    return [lane for _, lane in found]


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}}
