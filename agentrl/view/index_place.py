"""Where the index of a run's episodes lies: in the run, in the user's cache, or in a folder of this process."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from agentrl.errors import RunFolderError
from agentrl.shown import say


def cache_folder(run: Path) -> Path:
    """`.view` in the run's folder; one in the user's cache if that cannot be written; if neither can, a temporary one, which ends
    with this process, with a line on standard error. Raises RunFolderError if there is no temporary folder either."""
    inside = run / ".view"
    if _writable(inside if os.path.isdir(inside) else run):  # noqa: PTH112 - Path's raises in a folder that may not be searched
        return inside
    cached = _home() / "agentrl" / "view" / hashlib.sha256(str(run).encode()).hexdigest()[:16]
    if _writable(next(path for path in (cached, *cached.parents) if os.path.exists(path))):  # noqa: PTH110
        return cached
    return _temporary(run, cached) / cached.name


def _home() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    except RuntimeError:  # a user without a home
        return Path("/nonexistent")


def _writable(folder: Path) -> bool:
    rights = os.W_OK | os.X_OK
    return folder.is_dir() and os.access(folder, rights, effective_ids=os.access in os.supports_effective_ids)


def _temporary(run: Path, cached: Path) -> Path:
    """One folder for all runs of this process. What it is made for first is said."""
    if not _made:
        neither = f"{run}: neither it nor {cached} can be written"
        advice = "set XDG_CACHE_HOME to a folder that can"
        try:
            _made.append(tempfile.TemporaryDirectory(prefix="agentrl-view-", ignore_cleanup_errors=True))
        except OSError as problem:
            text = f"{neither}, and an index of its episodes must lie somewhere ({problem}): {advice}"
            raise RunFolderError(text) from None
        say(f"{neither}: its episodes are read anew, into {_made[0].name} until this ends; {advice}", file=sys.stderr)
    return Path(_made[0].name)


_made: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when this process ends."""
