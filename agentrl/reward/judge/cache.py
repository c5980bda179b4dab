"""Verdicts on disk, one file each, named by the hash of everything that the verdict depends on."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from agentrl.trajectory import Json


class VerdictCache:
    """A folder of verdicts; many processes may share it. Without a folder, remembers in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, Json] = {}

    def get(self, key: str) -> Json:
        """The verdict for a key, or None. A file that cannot be read counts as not there."""
        if key in self._memory:
            return self._memory[key]
        if self.folder is None:
            return None
        try:
            verdict = json.loads(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        self._memory[key] = verdict
        return verdict

    def put(self, key: str, verdict: Json) -> None:
        """Keep a verdict. Written aside and renamed, so that a reader never sees half of one."""
        self._memory[key] = verdict
        if self.folder is None:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".verdict-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(verdict, file)
        Path(name).replace(path)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"
