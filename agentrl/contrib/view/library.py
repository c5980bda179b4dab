"""The viewed runs: short ids, metrics, and indexes that a thread keeps up to date."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.contrib.view.index import Index
from agentrl.contrib.view.queries import NotFoundError
from agentrl.run.reader import RunRecord, find_runs, is_run, load_run
from agentrl.utils.errors import RunFolderError, hint_text
from agentrl.utils.files import open_plain
from agentrl.utils.parsing import read_json

log = logging.getLogger(__name__)
Json = Any
WANTED_S = 60.0
"""Seconds for which a requested run is kept up to date."""
POLL_S = 2.0


def overview(run: RunRecord, rows: list[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """A run as a list row; None: unknown. `rows`: its metrics, if known. `error`: of a damaged folder."""
    out: dict[str, Any] = {"path": str(run.path), "name": run.name, "envs": run.envs, "started": run.started, "live": run.live}
    out |= dict.fromkeys(("status", "error", "steps", "updates", "success_before", "success_after", "seconds", "tokens"))
    try:
        summary = {} if out["live"] else run.summary or {}
        found = run.metrics if rows is None else rows
        out["steps"] = run.table.get("steps")
    except RunFolderError as problem:
        return out | {"status": "damaged", "error": str(problem)}
    train = [row for row in found if row.get("phase") in ("train", "data")]
    data = run.table.get("data")
    if train and train[-1].get("epoch") and isinstance(data, dict) and "epochs" in data:  # steps of all passes
        out["steps"] = round(train[-1]["step"] / train[-1]["epoch"] * data["epochs"])
    out["updates"] = train[-1].get("step") if train else (None if run.evaluation else 0)
    for phase in ("before", "after"):
        values = [row.get("success") for row in found if row.get("phase") == phase]
        out[f"success_{phase}"] = values[-1] if values else None
    out["tokens"] = sum(row.get("tokens") or 0 for row in train) if any("tokens" in row for row in train) else None
    out["seconds"], out["error"] = summary.get("seconds"), summary.get("error")
    if run.evaluation is not None:
        first = run.report.get("pass@1")
        out["success_after"] = first.get("mean") if isinstance(first, dict) else None
    last = found[-1] if found else {}
    live = f"warm start, step {last['step']}" if last.get("phase") in ("sft", "gate") else "running"
    out["status"] = live if out["live"] else summary.get("status") or run.evaluation or "unfinished"
    return out


class Metrics:
    """Rows of a metrics.jsonl; each call reads only new rows. A rewritten file is read again, which changes `edition`."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._rows: list[dict[str, Json]] = []
        self._inode, self._done = 0, 0
        self.edition = 0

    def rows(self) -> list[dict[str, Json]]:
        """Return all complete rows. Raises RunFolderError for a damaged row."""
        with self._lock:
            try:
                stat = self._path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._done:
                    self._rows, self._done, self._inode = [], 0, stat.st_ino
                    self.edition += 1
                if stat.st_size == self._done:
                    return self._rows
                with open_plain(self._path) as file:
                    file.seek(self._done)
                    new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                fresh = [read_json(line) for line in whole.split(b"\n") if line.strip()]
                if not all(isinstance(row, dict) for row in fresh):
                    raise ValueError("a row that is no JSON object")
                # A new list, because the previous one may still be in use.
                self._rows = [*self._rows, *fresh]
                self._done += len(whole)
            except FileNotFoundError:
                self._rows, self._done = [], 0
            except (OSError, ValueError, RecursionError) as problem:
                raise RunFolderError(f"{self._path}: damaged: {problem}") from None
            return self._rows


@dataclass(slots=True)
class Shelved:
    """A run with its known figures. `wanted`: time of the last request for its episodes."""

    ident: str
    run: RunRecord
    index: Index
    metrics: Metrics
    wanted: float = 0.0
    problem: str | None = None
    fresh: threading.Event = field(default_factory=threading.Event)


class Library:
    """Runs by short id. `start` starts the indexing thread; `close` stops it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """`paths`: run folders, and folders of runs, which are searched for new runs. Raises RunFolderError for other folders."""
        self._folders: list[Path] = []
        self._by_id: dict[str, Shelved] = {}
        self._by_path: dict[Path, Shelved] = {}
        self._lock, self._ask, self._end = threading.Lock(), threading.Event(), False
        self._thread: threading.Thread | None = None
        for path in paths:
            if is_run(path):
                self._add(load_run(path))
            elif path.is_dir():
                self._folders.append(path)
            else:
                load_run(path)  # raises with the reason
        self.scan()

    def scan(self) -> list[Shelved]:
        """Return the runs, including new ones and without deleted ones."""
        with self._lock:
            for folder in self._folders:
                for run in find_runs(folder):
                    self._add(run, folder)
            return [one for one in self._by_id.values() if one.run.path.is_dir()]

    def _add(self, run: RunRecord, under: Path | None = None) -> None:
        key = run.path.resolve()
        if key in self._by_path:
            return
        name = run.path.name if under is None else str(run.path.relative_to(under.absolute()))
        slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "run"
        ident, number = slug, 1
        while ident in self._by_id:
            number += 1
            ident = f"{slug}~{number}"
        self._by_id[ident] = self._by_path[key] = Shelved(ident, run, Index(run), Metrics(run.folder.metrics))

    def get(self, ident: str) -> Shelved:
        """Return the run with this id. Raises NotFoundError, with the nearest id."""
        found = self._by_id.get(ident)
        if found is None or not found.run.path.is_dir():
            self.scan()
            found = self._by_id.get(ident)
        if found is None or not found.run.path.is_dir():
            raise NotFoundError(f"there is no run {ident!r}{hint_text(ident, self._by_id)}")
        return found

    def row(self, one: Shelved) -> dict[str, Json]:
        """Return the run's list row."""
        run = RunRecord(one.run.path)
        try:
            rows: list[Any] = one.metrics.rows()
        except RunFolderError as problem:
            return {"run": one.ident, **overview(run, []), "status": "damaged", "error": str(problem)}
        return {"run": one.ident, **overview(run, rows)}

    def want(self, one: Shelved, wait: float = 0.0) -> None:
        """Keep its index up to date for a while. `wait`: seconds to wait for the first reading; a small run needs less."""
        one.wanted = time.monotonic()
        if not one.fresh.is_set():
            self._ask.set()
            one.fresh.wait(wait)

    def start(self) -> None:
        """Start the indexing thread."""
        self._thread = threading.Thread(target=self._work, name="view-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; it ends between two parts of a file."""
        self._end = True
        self._ask.set()
        if self._thread is not None:
            self._thread.join(10)

    def _work(self) -> None:
        while not self._end:
            self._ask.clear()
            for one in list(self._by_id.values()):
                if one.wanted and time.monotonic() - one.wanted < WANTED_S and not self._end:
                    self.refresh(one, lambda: self._end)
            self._ask.wait(POLL_S)

    def refresh(self, one: Shelved, stop: Callable[[], bool] = lambda: False) -> None:
        """Update an index now; an error is stored in `problem`."""
        try:
            one.index.refresh(stop)
            one.problem = None
        except (RunFolderError, OSError) as problem:
            one.problem = str(problem)
            log.warning("%s", problem)
        one.fresh.set()
