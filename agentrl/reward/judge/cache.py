"""Verdicts on disk, one file each, named by the hash of everything that a verdict depends on."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from agentrl.plain_data import read_json
from agentrl.trajectory import Json


class VerdictCache:
    """A folder of verdicts, which several processes may share; in memory only if there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, Json] = {}

    def get(self, key: str) -> Json:
        """The verdict for a key, or None. An unreadable file counts as missing."""
        if key in self._memory:
            return self._memory[key]
        if self.folder is None:
            return None
        try:
            verdict = read_json(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        self._memory[key] = verdict
        return verdict

    def put(self, key: str, verdict: Json) -> None:
        """Store a verdict. It is written to a temporary file and renamed, so that readers never see a partial one."""
        self._memory[key] = verdict
        if self.folder is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".verdict-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(verdict, file)
        Path(name).replace(path)

    def forget(self) -> None:
        """Drop what is in memory alone."""
        if self.folder is None:
            self._memory.clear()

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"
