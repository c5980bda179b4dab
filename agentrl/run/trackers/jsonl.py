"""One JSON object a line, appended and never changed: for what ships logs, and the smallest of trackers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.identity import without_secrets
from agentrl.plain_data import json_text
from agentrl.run.trackers import TRACKERS, Cell, Status, TrackedRun, Tracker


@TRACKERS.register("jsonl")
class EventLines(Tracker):
    """`path` is in the run folder, or whole. Each line has `event` (start, row, rewind, episodes, picture, end), `run` and
    `time`, seconds since 1970; after a `rewind`, rows of later steps come again, and the last of them counts."""

    def __init__(self, run: TrackedRun, *, path: str = "events.jsonl") -> None:
        self._run = run
        self._path = run.folder.path / path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        self._write("start", resumed=run.resumed, config=without_secrets(run.config))

    def row(self, phase: str, step: int, values: Mapping[str, float | None]) -> None:
        self._write("row", phase=phase, step=step, values=dict(values))

    def rewind(self, step: int) -> None:
        self._write("rewind", step=step)

    def episodes(self, phase: str, step: int, rows: Sequence[Mapping[str, Cell]]) -> None:
        self._write("episodes", phase=phase, step=step, episodes=[dict(row) for row in rows])

    def picture(self, name: str, path: Path) -> None:
        self._write("picture", name=name, path=str(path))

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        self._write("end", status=status, summary=dict(summary))
        self._file.close()

    def look(self) -> str:
        return f"tail {self._path}"

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json_text({"event": event, "run": self._run.name, "time": time.time(), **fields}) + "\n")
        self._file.flush()
