"""Verdicts on disk, one file each, named by the hash of everything that a verdict depends on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.plain_data import read_json
from agentrl.schemas import first_fault, validator
from agentrl.trajectory import Json


class VerdictCache:
    """A folder of verdicts, which several processes may share; in memory only if there is no folder."""

    def __init__(self, folder: Path | None) -> None:
        """Raises ConfigError for a folder that cannot be written."""
        if folder is not None:
            _check_place(folder)
        self.folder = folder
        self._memory: dict[str, Json] = {}

    def get(self, key: str, schema: Mapping[str, Any]) -> Json:
        """The verdict for a key, or None. A file that cannot be read, or whose verdict does not fit `schema`, counts as
        missing: others write to the folder too."""
        if key in self._memory:
            return self._memory[key]
        if self.folder is None:
            return None
        try:
            verdict = read_json(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if first_fault(validator(schema), verdict) is not None:
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


def _check_place(folder: Path) -> None:
    """What is there of the path must be a folder in which one may write."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(f"reward.judge.cache = {folder}: expected a folder, and {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"reward.judge.cache = {folder}: {there} may not be written")
