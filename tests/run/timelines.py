"""Timelines of steps (`profile/step_*.json.gz`), read by track and checked."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A timeline's file, read."""

    about: dict[str, Any]
    tracks: dict[tuple[str, str], list[dict[str, Any]]]

    def of(self, process: str, track: str | None = None) -> list[dict[str, Any]]:
        return [e for (at, name), events in self.tracks.items() if at == process and track in (None, name) for e in events]

    def one(self, process: str, track: str, name: str) -> dict[str, Any]:
        [found] = [event for event in self.of(process, track) if event["name"] == name]
        return found


def read(file: Path) -> Shown:
    whole = json.loads(gzip.decompress(file.read_bytes()))
    names: dict[tuple[str, int, int], str] = {}
    for event in whole["traceEvents"]:
        if event["ph"] == "M":
            names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
    tracks: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in whole["traceEvents"]:
        if event["ph"] != "M":
            track = names.get(("thread_name", event["pid"], event["tid"]), "")
            tracks[names["process_name", event["pid"], 0], track].append(event)
    return Shown(whole["otherData"], tracks)


def nested(events: list[dict[str, Any]]) -> bool:
    """Whether each event lies in those that are open when it begins, as Perfetto needs of a track (to a nanosecond)."""
    open_until: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while open_until and open_until[-1] <= event["ts"] + 1e-3:
            open_until.pop()
        if open_until and event["ts"] + event["dur"] > open_until[-1] + 1e-3:
            return False
        open_until.append(event["ts"] + event["dur"])
    return True


def inside(inner: dict[str, Any], outer: dict[str, Any], slack: float = 0.0) -> bool:
    return bool(outer["ts"] - slack <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack)


def check_update(shown: Shown) -> None:
    """What torch computed lies in the rank's calls, and that of the update in the driver's part, in microseconds of one clock."""
    call = shown.one("actor rank 0", "calls", "update")
    assert inside(call, shown.one("driver", "run", "update"), 1.0)
    threads = [events for (at, name), events in shown.tracks.items() if at == "actor rank 0" and name.startswith("torch")]
    torch = [event for events in threads for event in events]
    calls = shown.of("actor rank 0", "calls")
    assert all(any(inside(event, one, 500.0) for one in calls) for event in torch)
    names = {event["name"] for event in torch if inside(event, call, 500.0)}
    assert len(torch) > 200 and {"aten::mm", "aten::addmm", "aten::linear"} & names
    assert any(name.startswith("autograd::engine") for name in names), "its backward pass too"
