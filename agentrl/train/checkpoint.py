"""Checkpoint folders: whole or not there.

A step is written to a folder under a temporary name; its files are flushed to disk, a manifest that
lists them with their sizes is written last, and only then is the folder renamed. A reader takes the
newest folder whose manifest is there and whose files have the sizes that it lists.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError, ResourceError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{6,})")
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Checkpoints:
    """The checkpoints of a run, under one root folder; the newest `keep` stay."""

    def __init__(self, root: Path, keep: int) -> None:
        self.root, self.keep = Path(root), keep

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write into; it becomes `step_NNNNNN` when the block ends without an error.

        Raises ResourceError where the disk is full; whatever goes wrong, older checkpoints stay.
        """
        aside = self.root / f".writing_step_{step:06d}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            yield aside
            seal(aside, step)
            self._publish(aside, self.root / f"step_{step:06d}")
        except BaseException as error:
            shutil.rmtree(aside, ignore_errors=True)
            if disk_full(error):
                raise ResourceError(
                    f"{self.root}: the disk is full: checkpoint {step} was not written, older ones are whole"
                ) from error
            raise
        self._prune()

    def newest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return next((path for _, path in sorted(self._steps(), reverse=True) if whole(path)), None)

    def at(self, step: int) -> Path:
        """The checkpoint of one step. Raises CheckpointError where it is missing or damaged."""
        path = self.root / f"step_{step:06d}"
        if not whole(path):
            known = [str(number) for number, found in sorted(self._steps()) if whole(found)]
            raise CheckpointError(f"{path}: no whole checkpoint; whole ones: {', '.join(known) or 'none'}")
        return path

    def _steps(self) -> list[tuple[int, Path]]:
        if not self.root.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.root.iterdir() if path.is_dir())
        return [(int(match.group(1)), path) for match, path in found if match]

    def _publish(self, aside: Path, target: Path) -> None:
        if target.exists():
            old = target.with_name(f".old_{target.name}")
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            aside.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(target)
        _sync_folder(self.root)

    def _prune(self) -> None:
        newest_first = sorted(self._steps(), reverse=True)
        for _, path in [(n, p) for n, p in newest_first if whole(p)][self.keep :]:
            (path / MANIFEST).unlink(missing_ok=True)  # a half-removed folder must never look whole
            shutil.rmtree(path, ignore_errors=True)


def seal(folder: Path, step: int) -> None:
    """Flush all files of `folder` and write its manifest last."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            sizes[str(path.relative_to(folder))] = path.stat().st_size
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _sync_folder(path)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"step": step, "files": sizes}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)


def whole(folder: Path) -> bool:
    """True where the manifest is there and every file that it lists has its size."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def disk_full(error: BaseException | None) -> bool:
    """True where `error`, or what caused it, says that no space is left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
