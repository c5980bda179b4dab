"""Timelines of steps (`profile/step_*.json.gz`), read by track and checked."""

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


def check_update(file: Path, role: str = "actor") -> None:
    """Torch's file of rank 0's update has forward and backward passes, and lies in the driver's part, by the world's clock."""
    shown = read(file)
    [at] = file.parent.glob(f"{file.name.partition('.')[0]}.{role}.0.*.update.json.gz")
    whole = json.loads(gzip.decompress(at.read_bytes()))
    timed = [event for event in whole["traceEvents"] if event["ph"] == "X" and event.get("cat") != "Trace"]
    names = {event["name"] for event in timed}
    assert len(timed) > 200 and {"aten::mm", "aten::addmm", "aten::linear"} & names
    assert any(name.startswith("autograd::engine") for name in names), "its backward pass too"
    ahead = whole["baseTimeNanoseconds"] / 1e3 - shown.about["began"] * 1e6
    part = shown.one("driver", "run", "update")
    assert all(inside({**event, "ts": event["ts"] + ahead}, part, 50_000.0) for event in timed)
