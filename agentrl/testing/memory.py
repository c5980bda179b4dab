"""What earlier runs left for later ones: how long each file took, and what of it has not passed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.errors import RunFolderError, UserError
from agentrl.files import atomic_write
from agentrl.testing.verdict import FileResult

NAME = "files.json"


@dataclass(frozen=True)
class Earlier:
    """Of one file: the seconds of its last whole run, None if there was none; the tests that have not passed since (`left`),
    None for the file as a whole."""

    seconds: float | None = None
    left: tuple[str, ...] | None = ()


def recall(folder: Path) -> dict[str, Earlier]:
    """What is known of each file. Raises RunFolderError if the record is damaged."""
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())
        return {file: Earlier(row["seconds"], None if row["left"] is None else tuple(row["left"])) for file, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is damaged ({error!r}): delete it; lengths and failures of earlier runs are then not known"
        ) from error


def remember(folder: Path, results: Sequence[FileResult]) -> None:
    """Add what a run found out, over what earlier ones did."""
    known = recall(folder)
    for result in results:
        earlier = known.get(result.file, Earlier())
        known[result.file] = Earlier(_seconds(result, earlier), _left(result, earlier))
    atomic_write(folder / NAME, json.dumps({file: asdict(one) for file, one in sorted(known.items())}, indent=1))


def _seconds(result: FileResult, earlier: Earlier) -> float | None:
    whole = result.seconds is not None and not result.part and not result.counts["interrupted"] and not result.counts["not run"]
    return result.seconds if whole else earlier.seconds


def _left(result: FileResult, earlier: Earlier) -> tuple[str, ...] | None:
    left = [case.name for case in result.cases if case.outcome in ("failed", "interrupted", "not run")]
    if result.problem is not None or (left and not result.collected):
        return None  # names that were read from the file's text may not be pytest's
    if not result.part:
        return tuple(left)
    if earlier.left is None:
        return None
    asked = {case.name for case in result.cases}
    return tuple(dict.fromkeys([*left, *(name for name in earlier.left if name not in asked)]))


def failed_before(found: Mapping[str, tuple[str, ...]], known: Mapping[str, Earlier]) -> dict[str, tuple[str, ...]]:
    """Of the files found, what has not passed when it was last run. Raises UserError if there is nothing."""
    left = {file: known[file].left for file in found if file in known and known[file].left != ()}
    if not left:
        raise UserError("--failed: nothing of this has failed, was interrupted or was not run when it was last asked for")
    return {file: (file,) if names is None else tuple(f"{file}::{name}" for name in names) for file, names in left.items()}


class FolderLock:
    """Keeps a second scheduler out of the folder with logs and records, as long as the process lives."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError, with who has it, if it is taken."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            told = self._file.read().strip()
            self._file.close()
            raise UserError(
                f"another `agentrl test` uses {folder} ({told}): wait for it, or give this one its own with --out"
            ) from None
        self._file.truncate(0)
        self._file.write(f"pid {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Let others in."""
        self._file.close()
